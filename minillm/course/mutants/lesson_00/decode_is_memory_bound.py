"""A fixed label: decode is memory-bound, so everything is."""

TASK = "00.3"
POINTS = 0
HINT = "a label that never changes"


def limiter(batch, n, k, bytes_per_element, peak_flops, bandwidth):
    return "memory"
