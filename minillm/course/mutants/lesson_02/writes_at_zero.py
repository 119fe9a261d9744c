"""Every step begins at the start of the row."""

TASK = "02.2"
POINTS = 1
HINT = "not at 0"


def append(cache, new, plan):
    first = 0
    for row, start, num_new in plan:
        if start + num_new > cache.shape[2]:
            raise ValueError("full")
        cache[row, :, :num_new] = new[first : first + num_new].transpose(0, 1)
        first += num_new
