"""Neighbours paired, as in the paper; checkpoints of these families pair halves."""

import torch

TASK = "01.3"
POINTS = 0
HINT = "rotate-half"


def rope(x, offset, theta):
    half = x.shape[-1] // 2
    positions = torch.arange(offset, offset + len(x), dtype=torch.float32)
    angles = (positions[:, None] * theta ** (-torch.arange(half) / half))[:, None]
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
