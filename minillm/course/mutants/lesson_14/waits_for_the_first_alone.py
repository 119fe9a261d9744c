"""Once it has begun, a stage never waits for the one before."""

from __future__ import annotations

TASK = "14.5"
POINTS = 3
HINT = "waits for each micro-batch, not for the first alone"


def pipeline(stage_s: list[float], micro_batches: int, hop_s: float) -> dict:
    begin = [sum(stage_s[:s]) + s * hop_s for s in range(len(stage_s))]
    start = [[begin[s] + m * own for m in range(micro_batches)] for s, own in enumerate(stage_s)]
    seconds = start[-1][-1] + stage_s[-1]
    return {"start": start, "seconds": seconds, "bubble": 1 - micro_batches * sum(stage_s) / (len(stage_s) * seconds)}
