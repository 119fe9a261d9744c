"""The ridge compared with 2 batch / bytes: the activations are missing near the ridge."""

TASK = "00.3"
POINTS = 1
HINT = "only the weights were counted"


def limiter(batch, n, k, bytes_per_element, peak_flops, bandwidth):
    return "compute" if 2 * batch / bytes_per_element >= peak_flops / bandwidth else "memory"
