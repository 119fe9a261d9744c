"""Every sequence gets the tokens of the first one."""

TASK = "02.2"
POINTS = 2
HINT = "go on where the one before it ended"


def append(cache, new, plan):
    first = 0
    for row, start, num_new in plan:
        if start + num_new > cache.shape[2]:
            raise ValueError("full")
        cache[row, :, start : start + num_new] = new[first : first + num_new].transpose(0, 1)
        first = 0
