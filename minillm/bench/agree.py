"""Do two say the same? What clients measured, and what the server's own metrics say of the same requests. Lesson 13.

Two clients take turns on one server, each a closed loop of a few users with fresh prompts: ours (`minillm load`'s, in a
process of its own), and guidellm, which knows nothing of this project. Neither is compared with the other's numbers,
since their requests differ; each is compared with the server, and so the two with each other.

The ratio of a quantity is the client's over the server's, for its mean and three percentiles, in each turn. The
server's side is server_side.py's; the definitions are those of trace/latency.py, applied to the raw stamps of either
client. The stamps are in the record, so any other definition can be applied later.

Predicted before: 1, and for TTFT what comes before the engine's clock starts: a request's way to a bare server and back
(bare.py), and what this server does with it first (spans of a warm turn). End to end only the way is added: the trace
has the rest. Gaps between tokens begin and end on the same way, and add nothing.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from minillm.bench import bare, guidellm
from minillm.bench.common import Options, ceilings, ceilings_after, progress, recorder
from minillm.bench.server_side import DIGITS, Served, compare, counted, grown, plain_id, scrape, served
from minillm.errors import MinillmError
from minillm.models import hub
from minillm.roofline.evidence import seconds
from minillm.roofline.quantities import AGREE_GOALS
from minillm.trace import latency
from minillm.trace.apart import load_apart
from minillm.trace.client import calls
from minillm.trace.latency import Stamps

USERS = 4
OURS = "minillm"
SETTLE_S = 20.0  # for the server to count the end of what its clients have read already


@dataclass
class Run:
    """One turn of a client: what it stamped, what the server saw and counted."""

    stamps: list[Stamps]
    rows: dict[str, Served]
    histograms: dict[str, tuple[float, float]]


def run(options: Options) -> dict[str, Any]:
    """Predict, let the clients take turns, compare, record."""
    from minillm.async_llm import AsyncLLM
    from minillm.server.local import LocalServer

    options.model = options.model or hub.EMBEDDED
    if options.new < 2 or options.requests < USERS:
        raise MinillmError(
            f"--new must be at least 2 (TPOT is time between tokens) and --requests {USERS} (its users), "
            f"got {options.new} and {options.requests}"
        )
    python = guidellm.python_of(options.peer)
    names = [OURS] if python is None else [OURS, guidellm.NAME]
    if python is None:
        options.out(f"no second client: --peer {guidellm.NAME}=PYTHON names one (docs/serving.md)")
    folder, repeats = hub.resolve(options.model), options.repeats or 3
    device = ceilings(options)
    low, high = _lengths(options)
    llm = AsyncLLM(
        folder, dtype=options.dtype, device=options.device, max_num_seqs=2 * USERS,
        max_model_len=2 * high + options.new, enable_prefix_caching=False,
    )  # fmt: skip
    clients = _clients(options, python, folder)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "trace.jsonl"
            with LocalServer(llm, trace_file=path) as server:
                site = Site(llm, server, path)
                warm = [site.turn(clients[OURS], turn) for turn in (-2, -1)][-1]
                expected = {key: pair[1] for key, pair in compare(warm.stamps, warm.rows, {}, per_token=True).items()}
                request_s = bare.costs(USERS)["request_s"]
                front_s = statistics.fmean(row.front for row in warm.rows.values())
                added = {"ttft": request_s + front_s, "e2e": request_s}
                book = recorder(
                    options, device, weights="checkpoint", repeats=repeats, users=USERS, requests=options.requests,
                    prompt=[low, high], new=options.new, clients=names, prefix_cache=False, bare_request_s=request_s,
                    warm_front_s=front_s,
                    order="minillm guidellm, guidellm minillm, ...; fresh prompts in every turn",
                    goals=AGREE_GOALS,
                    timer="perf_counter of client (guidellm: the wall clock) and of engine",
                )  # fmt: skip
                for name in names:
                    for key in _keys(name):
                        of = key.partition(".")[0]
                        book.expect(
                            f"{name}.{key}", "agreement", of=of, added_s=added.get(of, 0.0), seconds=expected[key]
                        )
                options.out(f"predictions sealed: sha256 {book.seal()}")
                runs: dict[str, list[Run]] = {name: [] for name in names}
                for turn in progress(range(repeats), "agree"):
                    for name in names[:: 1 if turn % 2 == 0 else -1]:
                        runs[name].append(site.turn(clients[name], turn))
        record_runs(book, runs, options.new)
    finally:
        llm.shutdown()
    if (version := getattr(clients.get(guidellm.NAME), "version", None)) is not None:
        book.record["setup"]["guidellm"] = version
    return book.finish(ceilings_after(options))


def _keys(name: str) -> list[str]:
    """The quantities that a client's stamps give: only ours has one for each token."""
    of = ("ttft", "tpot", "itl", "e2e") if name == OURS else ("ttft", "tpot", "e2e")
    return [f"{quantity}.{stat}" for quantity in of for stat in ("mean", "p50", "p95", "p99")]


def _lengths(options: Options) -> tuple[int, int]:
    return max(1, options.prompt * 2 // 3), max(2, options.prompt * 4 // 3)


# Clients ----------------------------------------------------------------------------------------------------------


def _ours(options: Options, url: str, turn: int) -> list[Stamps]:
    rng, (low, high) = random.Random(f"{options.seed} {turn}"), _lengths(options)
    lengths = [rng.randint(low, high) for _ in range(options.requests)]
    work = calls(
        [0.0] * options.requests, prompt_tokens=lengths, max_tokens=options.new, seed=rng.randrange(1 << 30),
        extra={"ignore_eos": True},
    )  # fmt: skip
    return load_apart(url, work, concurrency=USERS, wait_s=guidellm.PATIENCE)


class _Guide:
    """guidellm, with the version that its last report named."""

    def __init__(self, options: Options, python: str, folder: Path):
        self.options, self.python, self.folder = options, python, folder
        self.version: str | None = None

    def __call__(self, url: str, turn: int) -> list[Stamps]:
        o = self.options
        stamps, self.version = guidellm.load(
            self.python, url, self.folder, users=USERS, requests=o.requests, prompt=_lengths(o), new=o.new,
            seed=o.seed * 1000 + turn,
        )  # fmt: skip
        return stamps


def _clients(options: Options, python: str | None, folder: Path) -> dict[str, Callable[[str, int], list[Stamps]]]:
    found: dict[str, Callable[[str, int], list[Stamps]]] = {OURS: lambda url, turn: _ours(options, url, turn)}
    if python is not None:
        found[guidellm.NAME] = _Guide(options, python, folder)
    return found


# Turns ------------------------------------------------------------------------------------------------------------


class Site:
    """The server, and all that it says of a turn."""

    def __init__(self, llm: Any, server: Any, path: Path):
        self.llm, self.server, self.path = llm, server, path

    def turn(self, client: Callable[[str, int], list[Stamps]], turn: int) -> Run:
        from minillm.server.fold import observe
        from minillm.server.tracing import read_traces

        before = scrape(self.server.url)
        self.llm.engine.events.clear()
        stamps = normal(client(self.server.url, turn))
        end = time.monotonic() + SETTLE_S
        while True:  # the last request's end is counted after its client has read it
            histograms = grown(before, scrape(self.server.url))
            if histograms["ended"][1] >= len(stamps) or time.monotonic() > end:
                break
            time.sleep(0.05)
        self.server.state.traces.flush()
        rows = served(observe(list(self.llm.engine.events.events)), read_traces(self.path))
        return Run(stamps, rows, histograms)


def normal(stamps: Sequence[Stamps]) -> list[Stamps]:
    """From the first request on, in whole microseconds: as they are stored, and so as they are compared."""
    zero = min((s.sent for s in stamps), default=0.0)
    at = lambda t: round(t - zero, DIGITS)
    return [
        replace(
            s, scheduled=at(s.scheduled), sent=at(s.sent), end=at(s.end),
            chunks=tuple((at(t), n) for t, n in s.chunks), finished=None if s.finished is None else at(s.finished),
        )
        for s in stamps
    ]  # fmt: skip


# The record -------------------------------------------------------------------------------------------------------


def record_runs(book: Any, runs: dict[str, list[Run]], new: int) -> None:
    """Both sides' numbers of every turn, their ratios, the raw stamps, and the checks."""
    for name, turns in runs.items():
        for r in turns:
            if wrong := [s for s in r.stamps if not s.ok or s.tokens != new]:
                what = wrong[0].error or f"status {wrong[0].status}, {wrong[0].tokens} tokens of {new}"
                raise MinillmError(f"a stream of {name} is not whole: {what}")
        pairs = [compare(r.stamps, r.rows, r.histograms, per_token=name == OURS) for r in turns]
        for key in _keys(name):
            for side, values in zip(("client", "server"), zip(*(p[key] for p in pairs), strict=True), strict=True):
                book.measured(f"{name}.{key}.{side}", values)
            book.derive(f"{name}.{key}", "ratio", [f"{name}.{key}.client", f"{name}.{key}.server"])
        ours = [[r.rows[plain_id(s)] for s in r.stamps] for r in turns]
        book.measured(
            f"{name}.run", [latency.duration(r.stamps) for r in turns],
            stamps=[latency.to_jsonl(r.stamps) for r in turns],
            server=["".join(json.dumps(asdict(row)) + "\n" for row in rows) for rows in ours],
        )  # fmt: skip
        book.measured(f"{name}.front", [statistics.fmean(row.front for row in rows) for rows in ours])
        sent = sum(len(r.stamps) for r in turns)
        exact = all(counted(r.stamps, r.histograms) for r in turns)
        book.check(f"the server counted {name}'s requests and tokens, no others", exact, f"{sent} requests of {new}")
        for of, goal in AGREE_GOALS.items():
            ratios = {k: book.record["derived"][f"{name}.{k}"]["median"] for k in _keys(name) if k.startswith(of + ".")}
            if not ratios:
                continue
            worst = max(ratios, key=lambda k: abs(ratios[k] - 1))
            detail = f"the worst is {worst}, {ratios[worst]:.4f}"
            passed = abs(ratios[worst] - 1) <= goal
            book.check(f"{of.upper()} of {name} and of the server are within {goal:.0%}", passed, detail)


def show(record: dict[str, Any]) -> str:
    """The record as text."""
    setup, derived, results = record["setup"], record["derived"], record["results"]
    low, high = setup["prompt"]
    lines = [
        f"{setup['users']} users, {setup['requests']} requests a turn, prompts of {low} to {high} tokens, "
        f"{setup['new']} new ones each; client / server"
    ]
    for name in setup["clients"]:
        lines.append(f"  {name}, {results[f'{name}.run']['median']:.1f} s a turn")
        lines.append(f"    {'':<10}{'client':>10}{'server':>10}{'ratio':>9}{'p10':>9}{'p90':>9}{'predicted':>11}")
        for key in _keys(name):
            e, sides = derived[f"{name}.{key}"], [results[f"{name}.{key}.{s}"]["median"] for s in ("client", "server")]
            predicted = record["predictions"][f"{name}.{key}"]["prediction"]["expected"]
            lines.append(
                f"    {key:<10}{seconds(sides[0]):>10}{seconds(sides[1]):>10}"
                f"{e['median']:>9.4f}{e['p10']:>9.4f}{e['p90']:>9.4f}{predicted:>11.4f}"
            )
        front = results[f"{name}.front"]["median"]
        lines.append(f"    of TTFT, the server spends {seconds(front)} before its engine takes the request")
    lines += [f"  check  {'ok  ' if c['passed'] else 'FAIL'}  {c['name']}: {c['detail']}" for c in record["checks"]]
    return "\n".join(lines)
