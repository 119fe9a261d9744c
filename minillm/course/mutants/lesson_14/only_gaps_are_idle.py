"""Filling and draining are not counted, only gaps between micro-batches."""

from __future__ import annotations

TASK = "14.5"
POINTS = 3
HINT = "before its first micro-batch and after its last"


def pipeline(stage_s: list[float], micro_batches: int, hop_s: float) -> dict:
    start = [[0.0] * micro_batches for _ in stage_s]
    for m in range(micro_batches):
        for s in range(len(stage_s)):
            free = start[s][m - 1] + stage_s[s] if m else 0.0
            there = start[s - 1][m] + stage_s[s - 1] + hop_s if s else 0.0
            start[s][m] = max(free, there)
    seconds = start[-1][-1] + stage_s[-1]
    gaps = sum(row[-1] - row[0] - (micro_batches - 1) * own for row, own in zip(start, stage_s))
    return {"start": start, "seconds": seconds, "bubble": gaps / (len(stage_s) * seconds)}
