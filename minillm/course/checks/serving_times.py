"""References and mistakes of exercise 13 for times and rates: what a user felt, and what a machine can take.

A request is a dict of raw stamps: it was due at "scheduled" and left the client at "sent"; "chunks" holds (time,
tokens) of each arrival; "end" is when it was over, "status" what HTTP said. All times are seconds of one clock. The
schedules here are made of 1024ths, so that sums and differences are exact.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from minillm.course.tasks import Wrong

Stamps = dict[str, Any]
TICK = 1024
SLO = {"ttft_s": 0.5, "tpot_s": 0.0625}


# 13.2 latencies and goodput


def latencies_with(
    requests: Sequence[Stamps], slo: dict[str, float], *, since: str = "scheduled", less: int = 1,
    chunks_as_tokens: bool = False, ones: bool = False, divided: bool = False, mean_of_means: bool = False,
    keep_failed: bool = False, all_count: bool = False, own_time: bool = False, share: bool = False,
    either: bool = False, strict: bool = False, no_tpot_fails: bool = False, to_end: bool = False,
    one_chunk: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The reference; each flag is a slip."""
    there = [r for r in requests if r["chunks"] and (keep_failed or r["status"] == 200)]
    rows = []
    for r in there:
        times = [t for t, _ in r["chunks"]]
        n = len(times) if chunks_as_tokens else sum(k for _, k in r["chunks"])
        gaps = [(b - a) / (k if divided else 1) for a, b, (_, k) in zip(times, times[1:], r["chunks"][1:])]
        tpot = (times[-1] - times[0]) / max(1, n - less) if n > 1 else 0.0 if ones else None
        tpot = None if one_chunk and len(times) < 2 else tpot
        rows.append((times[0] - r[since], gaps, tpot, (r["end"] if to_end else times[-1]) - r[since]))
    gaps = [gap for _, some, _, _ in rows for gap in some]
    means = [sum(some) / len(some) for _, some, _, _ in rows if some]
    pooled = means if mean_of_means else gaps
    within = (lambda value, bound: value < bound) if strict else (lambda value, bound: value <= bound)
    met = any if either else all
    good = (len(requests) - len(there)) * all_count
    for ttft, _, tpot, _ in rows:
        steady = not no_tpot_fails if tpot is None else within(tpot, slo["tpot_s"])
        good += met((within(ttft, slo["ttft_s"]), steady))
    timed = there if own_time else requests
    seconds = max((r["end"] for r in timed), default=1) - min((r["scheduled"] for r in timed), default=0)
    return {
        "ttft": [row[0] for row in rows], "itl": gaps, "tpot": [row[2] for row in rows if row[2] is not None],
        "e2e": [row[3] for row in rows], "mean_itl": sum(pooled) / len(pooled) if pooled else None,
        "goodput": good / (len(requests) if share else seconds),
    }  # fmt: skip


def latencies(requests: Sequence[Stamps], slo: dict[str, float]) -> dict[str, Any]:
    return latencies_with(requests, slo)


def answered(
    scheduled: float, late: float, first: float, gaps: Sequence[float], tokens: Sequence[int], status: int = 200
) -> Stamps:
    """Sent `late` seconds after it was due; its first chunk came `first` seconds later; tokens[i] in chunk i."""
    times = [scheduled + late + first]
    for gap in gaps:
        times.append(times[-1] + gap)
    end = times[-1] + 2 / TICK
    return {
        "scheduled": scheduled, "sent": scheduled + late, "status": status, "end": end,
        "chunks": list(zip(times, tokens, strict=True)),
    }  # fmt: skip


def refused(scheduled: float, after: float) -> Stamps:
    return {"scheduled": scheduled, "sent": scheduled, "chunks": [], "status": 429, "end": scheduled + after}


def schedule(seed: int, late: bool = False, merged: bool = False, ones: bool = False) -> list[Stamps]:
    """Six answers of different lengths, and a refusal. merged: some chunks hold several tokens."""
    rng, made = random.Random(seed), []
    for i in range(6):
        n = 1 if ones and i % 2 else rng.randint(2, 6)
        gaps = [rng.randint(8, 96) / TICK for _ in range(n - 1)]
        tokens = [rng.choice((1, 1, 3)) if merged else 1 for _ in range(n)]
        wait = rng.randint(1, 900) / TICK if late else 0.0
        made.append(answered(100 + i * 0.25, wait, rng.randint(50, 800) / TICK, gaps, tokens))
    made.insert(3, refused(100.5, 3 / TICK))
    return made


def merged(seed: int) -> list[Stamps]:
    """Chunks of one token and of three, and a last answer that came all at once."""
    return [*schedule(seed, merged=True), answered(102.0, 0.0, 0.25, [], [3])]


def at_the_bound() -> list[Stamps]:
    """Good by a hair or not: on the bound is within it, and both bounds must hold."""
    quick, slow = 0.03125, 0.125
    return [
        answered(10.0, 0.0, 0.5, [0.0625] * 4, [1] * 5),
        answered(10.5, 0.0, 0.25, [slow] * 3, [1] * 4),
        answered(11.0, 0.0, 0.75, [quick] * 3, [1] * 4),
        answered(11.5, 0.0, 0.25, [], [1]),
        answered(12.0, 0.0, 0.25, [slow, quick, quick], [1] * 4),
        refused(12.5, 0.5),
        answered(12.75, 0.0, 0.125, [0.03125], [1, 1], status=500),  # it broke off after two tokens
        refused(13.0, 1.0),
    ]


def pick(*keys: str) -> Callable[..., Any]:
    """A scenario that looks at some keys of the answer."""

    def run(function: Any, requests: list[Stamps], slo: dict[str, float]) -> Any:
        got = function(requests, slo)
        if not isinstance(got, dict):
            raise Wrong(f"expected a dict, got a {type(got).__name__}")
        if missing := [key for key in keys if key not in got]:
            raise Wrong(f"the dict has no key {missing[0]!r}")
        return {key: got[key] for key in keys}

    return run


# 13.3 C = a m + b n

Sample = tuple[int, int, float]
A, B = 4e-5, 3e-4  # seconds for a prompt token and for an output token


def fitted(samples: Sequence[Sample], relative: bool = True, positive: bool = True) -> tuple[float, float]:
    """Least squares of (a m + b n) / s - 1: normal equations of two unknowns."""
    rows = [(m / s, n / s, 1.0) if relative else (m, n, s) for m, n, s in samples]
    xx, xy, yy = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    xt, yt = (sum(r[i] * r[2] for r in rows) for i in (0, 1))
    det = xx * yy - xy * xy
    a, b = (xt * yy - yt * xy) / det, (yt * xx - xt * xy) / det
    if positive and a < 0:
        return 0.0, yt / yy
    if positive and b < 0:
        return xt / xx, 0.0
    return a, b


def capacity_with(
    samples: Sequence[Sample], lengths: Sequence[tuple[int, int]], machines: int, *, relative: bool = True,
    positive: bool = True, cut: bool = False, swapped: bool = False, alone: bool = False, rates: bool = False,
    no_prompts: bool = False, longest: bool = False,
) -> tuple[float, float, float]:  # fmt: skip
    a, b = fitted(samples, relative, positive and not cut)
    if cut:
        a, b = max(a, 0.0), max(b, 0.0)
    costs = [(0.0 if no_prompts else a * m) + b * n for m, n in lengths]
    mean = max(costs) if longest else sum(costs) / len(costs)
    rate = sum(1 / c for c in costs) / len(costs) if rates else 1 / mean
    pair = (b, a) if swapped else (a, b)
    return *pair, rate * (1 if alone else machines)


def capacity(
    samples: Sequence[Sample], lengths: Sequence[tuple[int, int]], machines: int
) -> tuple[float, float, float]:  # fmt: skip
    return capacity_with(samples, lengths, machines)


def measured(seed: int, count: int, noise: float, a: float = A, b: float = B) -> list[Sample]:
    """Requests of very different lengths; each time is off by up to `noise` of itself."""
    rng, made = random.Random(seed), []
    for _ in range(count):
        m, n = int(10 ** rng.uniform(1, 4.2)), int(10 ** rng.uniform(0.5, 2.7))
        made.append((m, n, (a * m + b * n) * (1 + rng.uniform(-noise, noise))))
    return made


MIX = [(2000, 100), (50, 400), (8000, 20), (300, 300)]


def both(function: Any, samples: list[Sample], lengths: Any, machines: int) -> Any:
    got = function(samples, lengths, machines)
    return list(got[:2])


def rate_of(function: Any, samples: list[Sample], lengths: Any, machines: int) -> Any:
    return function(samples, lengths, machines)[2]


def held_out(function: Any, samples: list[Sample], unseen: list[Sample]) -> Any:
    """a and b must foretell requests that the fit has not seen, short ones too, within 15 %."""
    a, b, _ = function(samples, [(1, 1)], 1)
    off = [(abs(a * m + b * n - s) / s, m, n) for m, n, s in unseen]
    worst, m, n = max(off)
    if not worst <= 0.15:
        raise Wrong(
            f"a = {a:.3g} s and b = {b:.3g} s miss a held-out request of {m} + {n} tokens by {100 * worst:.0f} percent",
            "divide each row by its seconds, so that a short request counts as much as a long one",
        )  # fmt: skip
    return "within 15 percent"
