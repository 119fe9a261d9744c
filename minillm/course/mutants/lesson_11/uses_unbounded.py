"""Every use counts, however many there were."""

TASK = "11.5"
POINTS = 0
HINT = "at most `most` hits count"


def eviction_key(last_used: int, uses: int, credit: int, most: int) -> float:
    return last_used + credit * uses
