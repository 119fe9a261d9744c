"""A step that costs the same whoever is in it."""

import heapq

TASK = "09.1"
POINTS = 4.5
HINT = "ratio of the steps"


def predict() -> dict[str, float]:
    lengths, free = [9, 2, 3, 2, 2, 8, 3, 2, 3, 2, 2, 10], [0] * 4
    static = sum(max(lengths[i : i + 4]) for i in (0, 4, 8))
    for n in lengths:
        heapq.heappush(free, heapq.heappop(free) + n)
    continuous = max(free)
    return {
        "static_steps": static,
        "empty_percent": 100 * (1 - sum(lengths) / (4 * static)),
        "continuous_steps": continuous,
        "time_ratio": static / continuous,
        "overtaken_until_s": 100 + 3 * 20,
    }
