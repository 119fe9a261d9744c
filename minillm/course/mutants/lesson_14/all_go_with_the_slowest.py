"""A common clock, as slow as the slowest stage."""

from __future__ import annotations

TASK = "14.5"
POINTS = 3
HINT = "no common clock"


def pipeline(stage_s: list[float], micro_batches: int, hop_s: float) -> dict:
    tick = max(stage_s) + hop_s
    start = [[(s + m) * tick for m in range(micro_batches)] for s in range(len(stage_s))]
    seconds = start[-1][-1] + stage_s[-1]
    return {"start": start, "seconds": seconds, "bubble": 1 - micro_batches * sum(stage_s) / (len(stage_s) * seconds)}
