"""Only powers of two are tried."""

from collections.abc import Callable

TASK = "10.5"
POINTS = 1
HINT = "powers of two"


def choose_budget(seconds: Callable[[int, int], float], streams: int, target: float, most: int) -> int:
    budget = 1
    while 2 * budget <= most and (2 * budget <= streams + 1 or seconds(streams, 2 * budget - streams) <= target):
        budget *= 2
    return budget
