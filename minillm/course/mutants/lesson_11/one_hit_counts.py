"""Whether a block was hit counts, not how often."""

TASK = "11.5"
POINTS = 0
HINT = "each hit counts"


def eviction_key(last_used: int, uses: int, credit: int, most: int) -> float:
    return last_used + credit * (uses > 0)
