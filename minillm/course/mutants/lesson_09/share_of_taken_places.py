"""The places that are taken in place of the empty ones."""

import heapq

TASK = "09.1"
POINTS = 4.5
HINT = "places that are taken"


def predict() -> dict[str, float]:
    lengths, free = [9, 2, 3, 2, 2, 8, 3, 2, 3, 2, 2, 10], [0] * 4
    static = sum(max(lengths[i : i + 4]) for i in (0, 4, 8))
    for n in lengths:
        heapq.heappush(free, heapq.heappop(free) + n)
    continuous = max(free)
    times = [20 * steps + sum(lengths) for steps in (static, continuous)]
    return {
        "static_steps": static,
        "empty_percent": 100 * sum(lengths) / (4 * static),
        "continuous_steps": continuous,
        "time_ratio": times[0] / times[1],
        "overtaken_until_s": 100 + 3 * 20,
    }
