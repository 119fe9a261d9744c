"""The third sequence of the batch written to row 2, whichever row it owns."""

TASK = "02.2"
POINTS = 1
HINT = "not the place of the sequence"


def append(cache, new, plan):
    first = 0
    for row, (_, start, num_new) in enumerate(plan):
        if start + num_new > cache.shape[2]:
            raise ValueError("full")
        cache[row, :, start : start + num_new] = new[first : first + num_new].transpose(0, 1)
        first += num_new
