"""Right shape, wrong numbers: heads and tokens mixed. One token alone does not show it."""

TASK = "02.2"
POINTS = 4
HINT = "mixes heads and tokens"


def append(cache, new, plan):
    first = 0
    for row, start, num_new in plan:
        if start + num_new > cache.shape[2]:
            raise ValueError("full")
        cache[row, :, start : start + num_new] = new[first : first + num_new].reshape(new.shape[1], num_new, -1)
        first += num_new
