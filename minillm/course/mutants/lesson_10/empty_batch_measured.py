"""The step is priced without its streams."""

from collections.abc import Callable

TASK = "10.5"
POINTS = 3
HINT = "streams are in the step, too"


def choose_budget(seconds: Callable[[int, int], float], streams: int, target: float, most: int) -> int:
    low, high = streams + 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if seconds(0, middle) <= target:
            low = middle
        else:
            high = middle - 1
    return low
