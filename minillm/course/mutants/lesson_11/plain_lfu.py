"""Only uses count: yesterday's favourite stays for ever."""

TASK = "11.5"
POINTS = 0
HINT = "that is LFU"


def eviction_key(last_used: int, uses: int, credit: int, most: int) -> tuple:
    return (uses, last_used)
