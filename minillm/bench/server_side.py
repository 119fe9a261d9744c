"""What a server says of its requests, beside what their client measured: one pair of numbers a quantity. Lesson 13.

The server's side, with what each interval is:

mean of TTFT, TPOT, ITL   /metrics: sum / count of the histogram, as it grew over the run. Exact
their percentiles         the event log, through the fold that feeds those histograms
e2e                       the trace of a request: the sum of its spans, first byte in to last byte out

TTFT begins for the client when it sends, for /metrics when the engine takes the request (read, judged and tokenised
by then), and ends for the client when it has read the text. So the client's is the longer one, by what that takes.
The client's e2e here ends with its stream, not with the last token: so do the spans.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minillm.errors import MinillmError
from minillm.trace.latency import Stamps, percentile

QUANTITIES = ("ttft", "tpot", "itl", "e2e")
STATS = ("mean", "p50", "p95", "p99")
FRONT = ("ingress", "auth", "admit", "preprocess")  # spans before the engine takes it
HISTOGRAMS = {
    "ttft": "minillm:time_to_first_token_seconds",
    "tpot": "minillm:request_time_per_output_token_seconds",
    "itl": "minillm:inter_token_latency_seconds",
    "ended": "minillm:e2e_request_latency_seconds",
}
DIGITS = 6  # of a stored stamp: microseconds


@dataclass(frozen=True)
class Served:
    """One request as its server saw it, in seconds. gaps: between its tokens. spans: {stage: seconds}."""

    request_id: str
    ttft: float
    tpot: float | None
    gaps: tuple[float, ...]
    spans: Mapping[str, float]

    @property
    def e2e(self) -> float:
        return sum(self.spans.values())

    @property
    def front(self) -> float:
        return sum(self.spans.get(stage, 0.0) for stage in FRONT)


def served(observed: Iterable[Any], traces: Iterable[Mapping[str, Any]]) -> dict[str, Served]:
    """{id: what the server saw} of `fold.observe(events)` and the records of a trace file, for ids that both know.

    The engine's own id of a request may go on after the trace's, behind a "~".
    """
    known = {o.request_id.partition("~")[0]: o for o in observed}
    found = {}
    for trace in traces:
        o = known.get(trace["id"])
        if o is not None and o.ttft_s is not None:
            spans: dict[str, float] = {}
            for stage, begin, end in trace["spans"]:
                spans[stage] = spans.get(stage, 0.0) + (end - begin) / 1e9
            gaps = tuple(round(g, DIGITS) for g in o.gaps)
            found[trace["id"]] = Served(trace["id"], o.ttft_s, o.tpot_s, gaps, spans)
    return found


def scrape(url: str) -> dict[str, tuple[float, float]]:
    """{quantity: (sum, count)} of the HISTOGRAMS of a server's /metrics, over all their labels."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
        text = answer.read().decode()
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    pair = lambda name: (totals.get(name + "_sum", 0.0), totals.get(name + "_count", 0.0))
    return {quantity: pair(name) for quantity, name in HISTOGRAMS.items()}


def grown(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """What came between two scrapes."""
    return {k: (after[k][0] - before[k][0], after[k][1] - before[k][1]) for k in after}


def plain_id(stamps: Stamps) -> str:
    """The server's own id of a request: a reply's id is that, behind the kind of reply."""
    return stamps.request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")


def compare(
    stamps: Sequence[Stamps], rows: Mapping[str, Served], histograms: Mapping[str, tuple[float, float]],
    *, per_token: bool,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """{"ttft.mean": (client's seconds, server's), ...} over the same requests. per_token: the client stamps each token.

    Both sides' percentiles interpolate alike. Raises MinillmError where a request of the client is not known to the
    server, or none has two tokens.
    """
    names = [plain_id(s) for s in stamps]
    if missing := [n for n in names if n not in rows]:
        raise MinillmError(f"{len(missing)} of {len(names)} requests are unknown to the server, such as {missing[0]!r}")
    ours = [rows[n] for n in names]
    sides: dict[str, tuple[list[float], list[float]]] = {
        "ttft": ([s.ttft for s in stamps if s.ttft is not None], [r.ttft for r in ours]),
        "tpot": ([s.tpot for s in stamps if s.tpot is not None], [r.tpot for r in ours if r.tpot is not None]),
        "e2e": ([s.end - s.sent for s in stamps], [r.e2e for r in ours]),
    }
    if per_token:
        sides["itl"] = ([g for s in stamps for g in s.itl], [g for r in ours for g in r.gaps])
    found = {}
    for quantity, (client, server) in sides.items():
        if not client or not server:
            raise MinillmError(f"no request has a {quantity.upper()}: an answer must have two tokens")
        total, count = histograms.get(quantity, (sum(server), len(server)))  # e2e is the trace's
        if not count:
            raise MinillmError(f"/metrics counted no {quantity.upper()} during the run")
        found[f"{quantity}.mean"] = (sum(client) / len(client), total / count)
        for stat, q in (("p50", 50), ("p95", 95), ("p99", 99)):
            found[f"{quantity}.{stat}"] = (percentile(client, q), percentile(server, q))
    return found


def counted(stamps: Sequence[Stamps], histograms: Mapping[str, tuple[float, float]]) -> bool:
    """Whether the server counted exactly the client's requests, and their tokens."""
    count = {k: v[1] for k, v in histograms.items()}
    return count["ttft"] == count["tpot"] == count["ended"] == len(stamps) and count["itl"] == sum(
        s.tokens - 1 for s in stamps
    )
