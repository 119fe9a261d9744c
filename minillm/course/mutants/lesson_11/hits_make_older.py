"""A hit makes a block older."""

TASK = "11.5"
POINTS = 0
HINT = "a hit makes a block younger"


def eviction_key(last_used: int, uses: int, credit: int, most: int) -> float:
    return last_used - credit * min(uses, most)
