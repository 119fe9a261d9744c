"""Every budget is priced, one after the other."""

from collections.abc import Callable

TASK = "10.5"
POINTS = 4
HINT = "halve the range"


def choose_budget(seconds: Callable[[int, int], float], streams: int, target: float, most: int) -> int:
    best = streams + 1
    for budget in range(streams + 1, most + 1):
        if seconds(streams, budget - streams) <= target:
            best = budget
    return best
