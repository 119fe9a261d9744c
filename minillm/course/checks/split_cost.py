"""References and mistakes of exercise 15 for time: a transfer that overlaps its prefill, and when a split pays."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from minillm.course.tasks import Mistake

# 15.5 the timetable


def timetable(compute_s: list[float], sizes: list[int], rate: float, latency_s: float, places: int) -> dict[str, Any]:
    return timetable_with(compute_s, sizes, rate, latency_s, places)


def timetable_with(
    compute_s: list[float], sizes: list[int], rate: float, latency_s: float, places: int, *, streams: bool = True,
    queued: bool = True, latency: str = "beside", bounded: bool = True, off_by: int = 0, base: str = "alone",
    frees: str = "sent", whole: str = "line", early: bool = False, bits: bool = False, share: str = "hidden",
) -> dict[str, Any]:  # fmt: skip
    """latency: "beside" the bytes, "on" the line as if it were busy, or "none". The rest are the mistakes by name."""
    computed, sent, arrives = list[float](), list[float](), list[float]()
    for i, (seconds, size) in enumerate(zip(compute_s, sizes, strict=True)):
        begin = computed[-1] if computed else 0.0
        oldest = i - places + off_by
        if bounded and 0 <= oldest < i:
            begin = max(begin, (sent if frees == "sent" else arrives)[oldest])
        computed.append(begin + seconds)
        ready = computed[-1] if streams else sum(compute_s)
        if early:
            ready -= seconds
        start = max(ready, sent[-1]) if sent and queued else ready
        sent.append(start + (8 if bits else 1) * size / rate + (latency_s if latency == "on" else 0.0))
        arrives.append(sent[-1] + (latency_s if latency == "beside" else 0.0))
    exposed = arrives[-1] - {"alone": sum(compute_s), "stalled": computed[-1], "start": 0.0}[base]
    once = {"line": latency_s, "bytes": 0.0, "each": len(sizes) * latency_s, "all": 0.0}[whole]
    seen = exposed / (arrives[-1] if whole == "all" else once + sum(sizes) / rate)
    return {"arrives": arrives, "exposed_s": exposed, "hidden": 1 - seen if share == "hidden" else seen}


TIMETABLE_MISTAKES = [
    Mistake("a layer leaves when it is computed, not when all are", partial(timetable_with, streams=False)),
    Mistake("one line: a piece waits until the one before it has left", partial(timetable_with, queued=False)),
    Mistake("during the latency the line is free for the next piece", partial(timetable_with, latency="on")),
    Mistake("after the last byte it takes latency_s to arrive", partial(timetable_with, latency="none")),
    Mistake("with all places taken the next layer waits", partial(timetable_with, bounded=False)),
    Mistake("layer i takes the place of piece i - places, not of another", partial(timetable_with, off_by=1)),
    Mistake("layer i takes the place of piece i - places, not of another", partial(timetable_with, off_by=-1)),
    Mistake(
        "a place is free when its piece has left, not when it has arrived", partial(timetable_with, frees="arrived")
    ),
    Mistake("exposed: from the end of the compute, not from the start", partial(timetable_with, base="start")),
    Mistake(
        "a compute that was held up is exposed, too: it would have ended at sum(compute_s)",
        partial(timetable_with, base="stalled"),
    ),
    Mistake("hidden is a share of the transfer, not of everything", partial(timetable_with, whole="all")),
    Mistake("the latency is a part of the transfer that could be hidden", partial(timetable_with, whole="bytes")),
    Mistake(
        "pieces are under way together: the transfer alone has one latency, not one a layer",
        partial(timetable_with, whole="each"),
    ),
    Mistake("that is the share that shows; hidden is the rest", partial(timetable_with, share="exposed")),
    Mistake("a piece is ready when its layer is computed, not when it begins", partial(timetable_with, early=True)),
    Mistake("rate is in bytes a second, and sizes are bytes", partial(timetable_with, bits=True)),
]


def table(function: Any, inputs: Sequence[tuple[Any, ...]]) -> Any:
    return [function(*(list(a) if isinstance(a, list) else a for a in one)) for one in inputs]


def even(layers: int, seconds: float, size: int, rate: float, latency_s: float = 0.0, places: int = 99) -> Any:
    return [seconds] * layers, [size] * layers, rate, latency_s, places


def uneven(seed: int, layers: int, speed: float, latency_s: float = 0.0, places: int = 99) -> Any:
    """Layers that take different times; speed: of the line, 1.0 where it keeps pace with the compute."""
    rng = random.Random(seed)
    seconds = [rng.randint(4, 16) / 1024 for _ in range(layers)]
    sizes = [rng.randint(4, 16) * 1024 for _ in range(layers)]
    return seconds, sizes, 2.0**20 * speed, latency_s, places


# 15.6 when it pays


def compare(costs: dict[str, float], load: dict[str, float], slo: dict[str, float], engines: int, rate: float) -> Any:
    return compare_with(costs, load, slo, engines, rate)


def compare_with(
    costs: dict[str, float], load: dict[str, float], slo: dict[str, float], engines: int, rate: float, *,
    tie: str = "co-locate", link: bool = True, shared: bool = True, itl: bool = True, ttft: bool = True,
    weights: bool = True, offered: bool = True, transfer: bool = True, half: bool = False, all_d: bool = False,
    one_link: bool = True, ties: str = "first", rate_named: bool = True, decode_reads: bool = False, pool: bool = True,
    floor: bool = True, capped: bool = False, beside: bool = True, itl_of_prefill: bool = False, at_rate: bool = True,
) -> Any:  # fmt: skip
    """rate: of the link, bytes/s. Goodputs in requests/s."""
    w, a, d = costs["step_s"], costs["prompt_token_s"], costs["stream_s"]
    m, n, asked = load["prompt"], load["output"], load["rate"]
    room = 1 - w / slo["itl_s"] if itl else 1.0
    both = [room / (a * m + d * n)] if shared else [room / (a * m), room / (d * n)]
    if ttft:
        both.append((room - (a * m / slo["ttft_s"] if beside else 0.0)) / (d * n))
    together = max(0.0 if floor else -math.inf, (engines if pool else 1) * min(both))
    wire = load["kv_bytes"] * m / rate
    prefill_s = (w if weights else 0.0) + a * m
    first = prefill_s + (wire if transfer else 0.0)
    best = (0.0, 0, "nothing")
    pools = [engines // 2] if half and engines > 1 else range(1, engines)
    if all_d:
        pools = range(1, engines + 1)
    for p in pools:
        each = d * n + (a * m if decode_reads else 0.0)
        bounds = {"prefill": p / prefill_s, "decode": max(0.0 if floor else -math.inf, (engines - p) * room / each)}
        if itl_of_prefill:
            bounds["prefill"] = max(0.0, p * room / (a * m))
        if all_d:
            bounds["decode"] = max(0.0, engines * room / (d * n))
        if link:
            bounds["link"] = 1 / wire if one_link else p / wire
        if ttft and first > slo["ttft_s"]:
            bounds = {"ttft": 0.0}
        limit = min(bounds, key=lambda k: bounds[k])
        new, old = (min(asked, c) if capped else c for c in (bounds[limit], best[0]))
        if new > old or best[1] == 0 or (ties == "last" and new == old):
            best = (bounds[limit], p, limit)
    good = (min(asked, together), min(asked, best[0])) if offered else (together, best[0])
    limit = "rate" if rate_named and (best[0] > asked or (at_rate and best[0] == asked)) else best[2]
    pays = good[1] >= good[0] if tie == "split" else good[1] > good[0]
    return {"choice": "split" if pays else "co-locate", "colocated": good[0], "split": good[1], "prefill": best[1],
            "limit": limit}  # fmt: skip


COMPARE_MISTAKES = [
    Mistake("equal is not enough: a split must be better", partial(compare_with, tie="split")),
    Mistake("no more than what comes can be served", partial(compare_with, offered=False)),
    Mistake("every prompt crosses the line", partial(compare_with, link=False)),
    Mistake("all share one line, however many engines send", partial(compare_with, one_link=False)),
    Mistake("co-located, prompts and answers share the same steps: a m + d n", partial(compare_with, shared=False)),
    Mistake("the weights are read in each step: 1 - w / I is what is left of it", partial(compare_with, itl=False)),
    Mistake("a prompt has to be there within T: the bound on the TTFT", partial(compare_with, ttft=False)),
    Mistake("a prefill step reads the weights, too: w + a m", partial(compare_with, weights=False)),
    Mistake("the first token waits for the line as well", partial(compare_with, transfer=False)),
    Mistake("try every p: half and half is one of many", partial(compare_with, half=True)),
    Mistake("an engine is of one kind: engines - p decode", partial(compare_with, all_d=True)),
    Mistake("of those that are equal the smallest p", partial(compare_with, ties="last")),
    Mistake(
        'a capacity of at least what comes is bounded by what comes: "rate"', partial(compare_with, rate_named=False)
    ),
    Mistake('a capacity of at least what comes is bounded by what comes: "rate"', partial(compare_with, at_rate=False)),
    Mistake(
        "a decode engine of a split reads no prompts: no a m in its bound", partial(compare_with, decode_reads=True)
    ),
    Mistake("each of the co-located engines has that bound: engines times", partial(compare_with, pool=False)),
    Mistake("nobody serves fewer than none: never below 0", partial(compare_with, floor=False)),
    Mistake(
        "p is that of the largest capacity; what comes is looked at afterwards", partial(compare_with, capped=True)
    ),
    Mistake(
        "a prompt in chunks shares its steps: a m / T of each step is its own", partial(compare_with, beside=False)
    ),
    Mistake("a prefill engine has no streams: no ITL bounds its steps", partial(compare_with, itl_of_prefill=True)),
]

CARD = {"step_s": 0.006, "prompt_token_s": 20e-6, "stream_s": 60e-6}  # like an 8 B model on one card
TALK = {"prompt": 2048, "output": 256, "rate": 1000.0, "kv_bytes": 131072.0}
TIGHT = {"ttft_s": 1.0, "itl_s": 0.009}
FAST = 50e9


def situation(engines: int = 8, link: float = FAST, *, card: Any = None, load: Any = None, slo: Any = None) -> Any:
    return CARD | (card or {}), TALK | (load or {}), TIGHT | (slo or {}), engines, link


def compared(function: Any, inputs: Sequence[tuple[Any, ...]]) -> Any:
    """Several in one case: a constant must not earn points."""
    return [function(dict(c), dict(lo), dict(s), e, r) for c, lo, s, e, r in inputs]


def inputs(*those: Any) -> Callable[[], Any]:
    return lambda: (list(those),)


def random_situations(seed: int, count: int) -> Any:
    rng = random.Random(seed)
    return [
        situation(
            rng.choice((2, 3, 4, 8, 16)), rng.choice((1e9, 3e9, 12.5e9, 50e9)),
            load={"prompt": rng.choice((128, 512, 2048, 8192)), "output": rng.choice((64, 256, 1024)),
                  "rate": rng.choice((2.0, 20.0, 200.0))},
            slo={"ttft_s": rng.choice((0.25, 1.0, 4.0)), "itl_s": rng.choice((0.007, 0.009, 0.015, 0.05))},
        )
        for _ in range(count)
    ]  # fmt: skip
