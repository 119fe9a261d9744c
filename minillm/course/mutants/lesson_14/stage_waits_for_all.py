"""A stage begins when the one before has done all micro-batches."""

from __future__ import annotations

TASK = "14.5"
POINTS = 0
HINT = "it does not wait for all of them"


def pipeline(stage_s: list[float], micro_batches: int, hop_s: float) -> dict:
    start, begin = [], 0.0
    for seconds in stage_s:
        start.append([begin + m * seconds for m in range(micro_batches)])
        begin = start[-1][-1] + seconds + hop_s
    seconds = start[-1][-1] + stage_s[-1]
    busy = micro_batches * sum(stage_s)
    return {"start": start, "seconds": seconds, "bubble": 1 - busy / (len(stage_s) * seconds)}
