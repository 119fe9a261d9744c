"""Works on a copy and returns it."""

TASK = "02.2"
POINTS = 1
HINT = "no copy"


def append(cache, new, plan):
    first = 0
    cache = cache.clone()
    for row, start, num_new in plan:
        if start + num_new > cache.shape[2]:
            raise ValueError("full")
        cache[row, :, start : start + num_new] = new[first : first + num_new].transpose(0, 1)
        first += num_new
    return cache
