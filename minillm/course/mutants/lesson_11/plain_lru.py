"""Uses do not count: a scan empties the cache."""

TASK = "11.5"
POINTS = 0
HINT = "that is LRU"


def eviction_key(last_used: int, uses: int, credit: int, most: int) -> float:
    return last_used
