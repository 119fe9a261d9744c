"""No check: past the end torch drops one token and stumbles over more."""

TASK = "02.2"
POINTS = 4
HINT = "more than cache.shape[2]"


def append(cache, new, plan):
    first = 0
    for row, start, num_new in plan:
        cache[row, :, start : start + num_new] = new[first : first + num_new].transpose(0, 1)
        first += num_new
