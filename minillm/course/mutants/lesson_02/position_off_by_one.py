"""Positions counted from 1: slot start stays empty."""

TASK = "02.2"
POINTS = 0
HINT = "position off by one: the first new token"


def append(cache, new, plan):
    first = 0
    for row, start, num_new in plan:
        if start + num_new > cache.shape[2]:
            raise ValueError("full")
        cache[row, :, start + 1 : start + num_new + 1] = new[first : first + num_new].transpose(0, 1)
        first += num_new
