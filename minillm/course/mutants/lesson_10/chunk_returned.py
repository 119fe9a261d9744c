"""The chunk is returned in place of the budget."""

from collections.abc import Callable

TASK = "10.5"
POINTS = 1
HINT = "that is the chunk"


def choose_budget(seconds: Callable[[int, int], float], streams: int, target: float, most: int) -> int:
    low, high = streams + 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if seconds(streams, middle - streams) <= target:
            low = middle
        else:
            high = middle - 1
    return low - streams
