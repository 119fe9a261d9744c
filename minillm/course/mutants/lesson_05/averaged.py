"""The mean of both sums."""

import torch

TASK = "05.3"
POINTS = 0
HINT = "the sums add"


def merge(a, b):
    m = torch.maximum(a[0], b[0])
    top = m.masked_fill(m == float("-inf"), 0.0)
    of_a, of_b = ((a[0] - top).exp(), (b[0] - top).exp())
    return (m, (a[1] * of_a + b[1] * of_b) / 2, (a[2] * of_a[:, None] + b[2] * of_b[:, None]) / 2)
