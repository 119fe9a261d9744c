"""References and typical mistakes of exercise 07 for what is counted: calls, buckets, and when a graph pays."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from minillm.course.checks.tiny import randn

# 07.2 counting: what the blocks of the exercise's `step` call. The reference needs no dispatcher.

WORK = {
    "norm": ["mul", "mean", "add", "rsqrt", "mul"],
    "mlp": ["mm", "silu", "mul", "add"],
    "turn": [],
    "shift": ["clone", "add_"],
}
VIEWS = {"norm": [], "mlp": ["split"], "turn": ["t", "t"], "shift": []}


def count_calls(x: Tensor, weight: Tensor, program: Sequence[str]) -> dict[str, int]:
    return count_with(x, weight, program)


def count_with(
    x: Tensor, weight: Tensor, program: Sequence[str], *, views: bool = False, in_place: bool = True, once: bool = False
) -> dict[str, int]:
    names = [n for block in program for n in (WORK[block] + (VIEWS[block] if views else []))]
    counts = Counter(n for n in names if in_place or not n.endswith("_"))
    return {n: 1 if once else k for n, k in counts.items()}


def step_args(*program: str) -> Callable[[], Any]:
    return lambda: (randn(3, 4, 6), randn(5, 6, 12), list(program))


# 07.3 buckets

Plan = tuple[list[int | None], float]


def bucket_plan(batches: Sequence[int], sizes: Sequence[int]) -> Plan:
    return bucket_with(batches, sizes)


def bucket_with(
    batches: Sequence[int], sizes: Sequence[int], *, strict: bool = False, down: bool = False, largest: bool = False,
    of_real: bool = False, clamp: bool = False, mean: bool = False,
) -> Plan:  # fmt: skip
    chosen: list[int | None] = []
    for n in batches:
        fits = [s for s in sizes if (s > n if strict else s >= n)]
        if down:
            fits = [max([s for s in sizes if s <= n], default=sizes[0])] if n <= sizes[-1] else []
        if largest and fits:
            fits = [sizes[-1]]
        chosen.append(fits[0] if fits else sizes[-1] if clamp else None)
    pairs = [(n, c) for n, c in zip(batches, chosen, strict=True) if c is not None]
    rows, real = sum(c for _, c in pairs), sum(n for n, _ in pairs)
    if not pairs:
        return chosen, 0.0
    if mean:
        return chosen, sum((c - n) / c for n, c in pairs) / len(pairs)
    return chosen, (rows - real) / (real if of_real else rows)


def plans(function: Any, jobs: Sequence[Any]) -> list[Any]:
    """Several plans in one case, so that a constant earns nothing."""
    return [function(list(batches), list(sizes)) for batches, sizes in jobs]


# 07.6 when a graph pays


def graph_gain(
    launches: int, host: float, device: float, graph: float, gap: float, capture: float
) -> tuple[float, int | None]:
    return gain_with(launches, host, device, graph, gap, capture)


def gain_with(
    launches: int, host: float, device: float, graph: float, gap: float, capture: float, *, summed: bool = False,
    gaps: str = "between", floor: bool = False, always: bool = False, host_only: bool = False,
) -> tuple[float, int | None]:  # fmt: skip
    eager = launches * host + device if summed else launches * host if host_only else max(launches * host, device)
    replay = graph + device + gap * {"between": launches - 1, "none": 0, "each": launches}[gaps]
    saved = eager - replay
    if saved <= 0 and not always:
        return saved, None
    steps = math.floor(capture / saved) if floor else math.ceil(capture / saved)
    return saved, steps


def gains(function: Any, jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [function(*job) for job in jobs]
