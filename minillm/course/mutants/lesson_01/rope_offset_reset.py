"""Every chunk starts at position 0 again."""

import torch

TASK = "01.3"
POINTS = 1
HINT = "positions start at `offset`"


def rope(x, offset, theta):
    half = x.shape[-1] // 2
    positions = torch.arange(len(x), dtype=torch.float32)
    angles = (positions[:, None] * theta ** (-torch.arange(half) / half))[:, None]
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
