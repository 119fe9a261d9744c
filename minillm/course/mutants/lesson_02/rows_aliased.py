"""The rows of the cache share one memory: a write to one is a write to all."""

TASK = "02.2"
POINTS = 1
HINT = "the others were overwritten"


def append(cache, new, plan):
    first = 0
    for _, start, num_new in plan:
        if start + num_new > cache.shape[2]:
            raise ValueError("full")
        cache[:, :, start : start + num_new] = new[first : first + num_new].transpose(0, 1)
        first += num_new
