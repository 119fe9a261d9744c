"""The whole budget is given to the chunk."""

from collections.abc import Callable

TASK = "10.5"
POINTS = 3
HINT = "the chunk is what they leave"


def choose_budget(seconds: Callable[[int, int], float], streams: int, target: float, most: int) -> int:
    low, high = streams + 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if seconds(streams, middle) <= target:
            low = middle
        else:
            high = middle - 1
    return low
