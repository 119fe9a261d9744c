"""Static batching as if no place were ever empty."""

import heapq

TASK = "09.1"
POINTS = 4.5
HINT = "then no place would ever be empty"


def predict() -> dict[str, float]:
    lengths, free = [9, 2, 3, 2, 2, 8, 3, 2, 3, 2, 2, 10], [0] * 4
    static = sum(lengths) // 4
    for n in lengths:
        heapq.heappush(free, heapq.heappop(free) + n)
    continuous = max(free)
    times = [588, 428]
    return {
        "static_steps": static,
        "empty_percent": 100 * (1 - 48 / 108),
        "continuous_steps": continuous,
        "time_ratio": times[0] / times[1],
        "overtaken_until_s": 100 + 3 * 20,
    }
