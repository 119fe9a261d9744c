"""One slot too early: the last cached token is lost."""

TASK = "02.2"
POINTS = 1
HINT = "it would be overwritten"


def append(cache, new, plan):
    first = 0
    for row, start, num_new in plan:
        if start + num_new > cache.shape[2]:
            raise ValueError("full")
        for i in range(num_new):
            cache[row, :, start - 1 + i] = new[first + i]
        first += num_new
