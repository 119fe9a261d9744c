"""acc added without its factor."""

import torch

TASK = "05.3"
POINTS = 0
HINT = "acc needs the same factor"


def merge(a, b):
    m = torch.maximum(a[0], b[0])
    top = m.masked_fill(m == float("-inf"), 0.0)
    of_a, of_b = ((a[0] - top).exp(), (b[0] - top).exp())
    return (m, a[1] * of_a + b[1] * of_b, a[2] + b[2])
