"""The key is turned round: the youngest leaves."""

TASK = "11.5"
POINTS = 0
HINT = "the smallest key leaves first"


def eviction_key(last_used: int, uses: int, credit: int, most: int) -> float:
    return -(last_used + credit * min(uses, most))
