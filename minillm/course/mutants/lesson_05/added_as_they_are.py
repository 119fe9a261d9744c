"""Sums of different maxima added."""

import torch

TASK = "05.3"
POINTS = 0
HINT = "same maximum before adding"


def merge(a, b):
    m = torch.maximum(a[0], b[0])
    return (m, a[1] + b[1], a[2] + b[2])
