"""(-inf, 0, 0) and itself give NaN."""

import torch

TASK = "05.3"
POINTS = 5
HINT = "where neither saw a key"


def merge(a, b):
    m = torch.maximum(a[0], b[0])
    top = m
    of_a, of_b = ((a[0] - top).exp(), (b[0] - top).exp())
    return (m, a[1] * of_a + b[1] * of_b, a[2] * of_a[:, None] + b[2] * of_b[:, None])
