"""References and mistakes of exercise 14 for a pipeline: when each stage begins each micro-batch, and who stands idle.

Seconds are sums of a few powers of two, so that they are exact in whatever order they are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def pipeline(stage_s: Sequence[float], micro_batches: int, hop_s: float) -> dict[str, Any]:
    return pipeline_with(stage_s, micro_batches, hop_s)


def pipeline_with(
    stage_s: Sequence[float], m: int, hop_s: float, *, waits: str = "own", warm: bool = True, busy: bool = True,
    hop: str = "between", bubble: str = "idle", pace: str = "as they come", shown: str = "begin",
) -> dict[str, Any]:  # fmt: skip
    """The flags make the wrong ones."""
    s = len(stage_s)
    way = 0.0 if hop == "none" else hop_s
    work = [t + (way if hop == "busy" and i + 1 < s else 0.0) for i, t in enumerate(stage_s)]
    start = [[0.0] * m for _ in range(s)]
    for j in range(m):
        for i in range(s):
            free = start[i][j - 1] + work[i] if j and (busy or i == 0) else 0.0
            here = start[i - 1][j] + work[i - 1] + (0.0 if hop == "busy" else way) if i and warm else 0.0
            if waits == "alone" and i == 0 and j:  # for the micro-batch before it to leave the last stage
                here = start[s - 1][j - 1] + work[s - 1]
            start[i][j] = max(free, here)
    if waits == "all":  # a stage begins when the one before it has finished everything
        begin = 0.0
        for i in range(s):
            start[i] = [begin + j * work[i] for j in range(m)]
            begin = start[i][-1] + work[i] + way
    if pace == "own":  # each stage goes at its own pace from its first micro-batch on, and waits for nobody
        start = [[row[0] + j * stage_s[i] for j in range(m)] for i, row in enumerate(start)]
    if pace == "slowest":  # all move on together, when the slowest has done
        start = [[(i + j) * (max(stage_s) + way) for j in range(m)] for i in range(s)]
    if hop == "before":
        start = [[at + way for at in row] for row in start]
    end = max(start[i][j] + stage_s[i] for i in range(s) for j in range(m)) + (way if hop == "after" else 0.0)
    share = {
        "idle": 1 - m * sum(stage_s) / (s * end),
        "formula": (s - 1) / (m + s - 1),
        "busy": m * sum(stage_s) / (s * end),
        "percent": 100 - 100 * m * sum(stage_s) / (s * end),
        "between": sum(row[-1] - row[0] - (m - 1) * stage_s[i] for i, row in enumerate(start)) / (s * end),
        "of work": s * end / (m * sum(stage_s)) - 1,
        "last stage": 1 - m * stage_s[-1] / end,
        "seconds": s * end - m * sum(stage_s),
    }[bubble]
    if shown == "end":
        start = [[at + stage_s[i] for at in row] for i, row in enumerate(start)]
    if shown == "by micro-batch":
        start = [list(column) for column in zip(*start, strict=True)]
    return {"start": start, "seconds": end, "bubble": share}


def pick(*keys: str) -> Any:
    """A scenario that compares these keys for several pipelines, and no others."""

    def run(function: Any, pipelines: list[Any]) -> Any:
        got = [function(*one) for one in pipelines]
        return [{k: (g[k] if isinstance(g, dict) and k in g else f"no {k}") for k in keys} for g in got]

    return run
