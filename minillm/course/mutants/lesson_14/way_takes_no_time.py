"""hop_s is not read."""

from __future__ import annotations

TASK = "14.5"
POINTS = 7
HINT = "it takes time from stage to stage"


def pipeline(stage_s: list[float], micro_batches: int, hop_s: float) -> dict:
    start = [[0.0] * micro_batches for _ in stage_s]
    for m in range(micro_batches):
        for s in range(len(stage_s)):
            free = start[s][m - 1] + stage_s[s] if m else 0.0
            there = start[s - 1][m] + stage_s[s - 1] if s else 0.0
            start[s][m] = max(free, there)
    seconds = start[-1][-1] + stage_s[-1]
    busy = micro_batches * sum(stage_s)
    return {"start": start, "seconds": seconds, "bubble": 1 - busy / (len(stage_s) * seconds)}
