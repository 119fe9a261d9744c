"""What a user feels: stamps of streamed requests, and the times that are defined over them. Lesson 13.

Everything is measured where the user is, in seconds of one monotonic clock (time.perf_counter). A definition decides
the number, so each is stated; where they differ between tools, these are those of vLLM's `vllm bench serve`:

TTFT   time to first token: first token - sent. Of a connection that must be opened first, opening it is in.
ITL    inter-token latency: every gap between two arrivals of one stream. A chunk that brings two tokens is one arrival.
TPOT   time per output token of a request: (last token - first token) / (n - 1), n from the usage chunk.
E2E    end-to-end latency: last token - sent.

An answer that ends by itself has a last token without text, the end-of-sequence token. n counts it, so its time counts
too: the last token is there when the finish reason is. ITL is what a reader sees, and has no gap for it.

Percentiles interpolate linearly between the closest ranks (type 7 of Hyndman and Fan, 1996; numpy's default).

In an open loop a request has a time at which it should be sent. A client that was held up sends later, and what its
users wait meanwhile is missing from TTFT and E2E: coordinated omission (Tene, "How not to measure latency", 2013).
`Stamps.from_schedule` counts from when the request was due, and goodput always does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from minillm.errors import MinillmError

BOUNDS = (128, 512, 2048, 8192, 32768)  # tokens: upper ends of the length buckets, here and in /metrics


@dataclass(frozen=True)
class Stamps:
    """One streamed request as its client saw it. Times in seconds of time.perf_counter.

    scheduled      when it was due (in a closed loop: when it was sent)
    sent           before the connection was taken or opened
    chunks         (time, tokens) of every arrival of new text; tokens is 1 where the server does not say
    end            when the stream was over, or given up
    prompt_tokens, output_tokens  from the usage chunk; None where none came
    status         of HTTP; None without an answer
    error          what went wrong, in words; None when nothing did
    retry_after_s  what the server asked to wait
    cancelled      the client left on purpose
    request_id     the server's
    finished       when the finish reason came (of several choices: the last one's); None where none came
    """

    scheduled: float
    sent: float
    chunks: tuple[tuple[float, int], ...] = ()
    end: float = 0.0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    status: int | None = None
    error: str | None = None
    retry_after_s: float | None = None
    cancelled: bool = False
    finish_reason: str | None = None
    request_id: str = ""
    finished: float | None = None

    @property
    def ok(self) -> bool:
        """Answered to its end, with at least one token."""
        return self.status == 200 and self.error is None and not self.cancelled and bool(self.chunks)

    @property
    def first(self) -> float | None:
        return self.chunks[0][0] if self.chunks else None

    @property
    def last(self) -> float | None:
        """The last token: that of the last text, or one without text that ended the answer."""
        if not self.chunks:
            return None
        at = self.chunks[-1][0]
        return at if self.finished is None else max(at, self.finished)

    @property
    def tokens(self) -> int:
        return sum(n for _, n in self.chunks) if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float | None:
        return self.chunks[0][0] - self.sent if self.chunks else None

    @property
    def itl(self) -> list[float]:
        return [b - a for (a, _), (b, _) in zip(self.chunks, self.chunks[1:])]

    @property
    def tpot(self) -> float | None:
        """None for fewer than two tokens: there is no gap."""
        if self.last is None or self.tokens < 2:
            return None
        return (self.last - self.chunks[0][0]) / (self.tokens - 1)

    @property
    def e2e(self) -> float | None:
        return self.last - self.sent if self.last is not None else None

    @property
    def lateness(self) -> float:
        """How much later than due it was sent. In a sound open-loop run this is next to nothing."""
        return self.sent - self.scheduled

    def from_schedule(self) -> Stamps:
        """The same request, with TTFT and E2E counted from when it was due."""
        return replace(self, sent=self.scheduled)


def percentile(values: Sequence[float], q: float) -> float:
    """q from 0 to 100, by linear interpolation between the closest ranks. Raises MinillmError for no values."""
    if not len(values):
        raise MinillmError("a percentile needs at least one value")
    if not 0 <= q <= 100:
        raise MinillmError(f"a percentile is a number from 0 to 100, got {q!r}")
    xs = sorted(values)
    at = (len(xs) - 1) * q / 100
    low = min(int(at), len(xs) - 1)
    high = min(low + 1, len(xs) - 1)
    return xs[low] + (xs[high] - xs[low]) * (at - low)


@dataclass(frozen=True)
class Summary:
    """Of one quantity over many requests (or gaps), in the unit of the values."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


def summarize(values: Iterable[float | None]) -> Summary | None:
    """What is None is left out: it cannot be known. None when nothing is left."""
    xs = sorted(v for v in values if v is not None)
    if not xs:
        return None
    p50, p95, p99 = (percentile(xs, q) for q in (50, 95, 99))
    return Summary(len(xs), sum(xs) / len(xs), p50, p95, p99, xs[-1])


@dataclass(frozen=True)
class SLO:
    """Service level objectives of one request, in seconds; None demands nothing. A request is good when all are met.

    ttft_s, tpot_s, e2e_s  bounds of the times above
    itl_s                  bound of its longest gap: what a reader notices as a stall, and TPOT averages away
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    itl_s: float | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "e2e_s", "itl_s"):
            v = getattr(self, name)
            if v is not None and (isinstance(v, bool) or not isinstance(v, int | float) or not 0 < v < math.inf):
                raise MinillmError(f"{name} is a number of seconds above 0, or None for no demand, got {v!r:.80}")

    def met(self, s: Stamps) -> bool:
        """False for every request that failed, was refused or was left."""
        pairs = (
            (s.ttft, self.ttft_s),
            (s.tpot, self.tpot_s),
            (s.e2e, self.e2e_s),
            (max(s.itl, default=None), self.itl_s),
        )
        return s.ok and all(bound is None or value is None or value <= bound for value, bound in pairs)


# Choices, made before any measurement, from what the person at the other end does with the answer.
SLOS = {
    "chat": SLO(
        ttft_s=1.0, tpot_s=0.15, itl_s=1.0,
        reason="A person waits and reads along. Within a second a train of thought stays unbroken (Nielsen, 1993), and "
        "0.15 s a token is about 300 words a minute, faster than most people read (Brysbaert, 2019).",
    ),
    "rag": SLO(
        ttft_s=3.0, tpot_s=0.15,
        reason="Thousands of retrieved tokens come before the first one of the answer, and a person who asked for a "
        "search accepts a short wait; then they read as in a chat.",
    ),
    "agent": SLO(
        e2e_s=6.0,
        reason="A program reads, and acts only on the whole answer: the first token is worth nothing by itself. Ten "
        "calls in a chain make a minute.",
    ),
    "batch": SLO(
        e2e_s=86_400.0,
        reason="Nobody waits. What counts is that a day's work is done in a day (the window of OpenAI's Batch API), so "
        "the machine may be filled to the brim.",
    ),
}  # fmt: skip


def slo(text: str) -> SLO:
    """A preset by name, or "ttft=0.5,tpot=0.05,e2e=5,itl=1" in seconds."""
    if text in SLOS:
        return SLOS[text]
    bounds: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in ("ttft", "tpot", "e2e", "itl"):
            raise MinillmError(
                f"an SLO is one of {', '.join(SLOS)}, or bounds of ttft, tpot, e2e, itl; got {text!r:.80}"
            )
        if f"{name}_s" in bounds:
            raise MinillmError(f"an SLO bounds {name} once, got {text!r:.80}")
        try:
            bounds[f"{name}_s"] = float(value)
        except ValueError:
            raise MinillmError(f"{name} of an SLO is a number of seconds, got {value!r:.80}") from None
    return SLO(**bounds)


def duration(stamps: Sequence[Stamps]) -> float:
    """Seconds from when the first request was due to the last token (or end, of those without)."""
    if not stamps:
        return 0.0
    return max(s.end if s.last is None else s.last for s in stamps) - min(s.scheduled for s in stamps)


def goodput(stamps: Sequence[Stamps], slo: SLO, seconds: float | None = None) -> float:
    """Requests a second that meet the whole SLO (Zhong et al., DistServe, 2024). seconds: of the run, if known.

    TTFT and E2E count from when a request was due: what a client could not send in time was not served in time. In a
    closed loop it is due when it is sent.
    """
    seconds = duration(stamps) if seconds is None else seconds
    return sum(slo.met(s.from_schedule()) for s in stamps) / seconds if seconds > 0 else 0.0


def by_length(
    stamps: Iterable[Stamps], bounds: Sequence[int] = BOUNDS, of: str = "prompt"
) -> dict[str, list[Stamps]]:  # fmt: skip
    """Requests by the length of their prompt (or "output"): "1-128", "129-512", ... Shortest first."""
    if of not in ("prompt", "output"):
        raise MinillmError(f"lengths are those of the 'prompt' or the 'output', got {of!r:.80}")
    if not bounds or list(bounds) != sorted(set(bounds)) or bounds[0] < 1:
        raise MinillmError(f"bounds of length buckets are rising numbers of tokens, got {tuple(bounds)!r:.80}")
    lows = [1, *(b + 1 for b in bounds[:-1])]
    names = [*(f"{low}-{high}" for low, high in zip(lows, bounds, strict=True)), f"over {bounds[-1]}", "unknown"]
    groups: dict[str, list[Stamps]] = {name: [] for name in names}
    for s in stamps:
        n = s.prompt_tokens if of == "prompt" else s.tokens
        groups["unknown" if n is None else names[sum(n > b for b in bounds)]].append(s)
    return {name: group for name, group in groups.items() if group}


def worst(groups: Mapping[str, Sequence[Stamps]], value: Callable[[Stamps], float | None], q: float = 99) -> str | None:
    """The bucket whose percentile is highest, which the percentile of all may hide; None when none has a value."""
    found = {name: [v for s in group if (v := value(s)) is not None] for name, group in groups.items()}
    return max((n for n in found if found[n]), key=lambda n: percentile(found[n], q), default=None)


def to_jsonl(stamps: Iterable[Stamps]) -> str:
    """One request a line: the raw stamps, so that any other definition can be applied later."""
    return "".join(json.dumps(asdict(s)) + "\n" for s in stamps)


def from_jsonl(text: str) -> list[Stamps]:
    """Raises MinillmError naming the line that is no request."""
    known, found = {f.name for f in fields(Stamps)}, []
    for n, line in enumerate((part for part in text.split("\n") if part), 1):
        try:
            data = json.loads(line)
            if not isinstance(data, dict) or not {"scheduled", "sent"} <= data.keys() <= known:
                raise ValueError("its keys are not those of a request")
            data["chunks"] = tuple((float(t), int(k)) for t, k in data.get("chunks", ()))
            data |= {key: float(data[key]) for key in ("scheduled", "sent", "end") if key in data}
            data["finished"] = None if data.get("finished") is None else float(data["finished"])
            found.append(Stamps(**data))
        except (ValueError, TypeError) as error:
            raise MinillmError(f"line {n} is no request's stamps: {error}") from None
    return found
