"""max in place of min."""

TASK = "11.5"
POINTS = 0
HINT = "at most: min, not max"


def eviction_key(last_used: int, uses: int, credit: int, most: int) -> float:
    return last_used + credit * max(uses, most)
