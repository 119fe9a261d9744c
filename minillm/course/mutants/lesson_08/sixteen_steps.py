"""Sixteen steps between sixteen codes."""

import torch
from torch import Tensor

TASK = "08.3"
POINTS = 0
HINT = "16 codes have 15 steps"


def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    w = weight.view(len(weight), -1, group)
    low, high = w.amin(-1), w.amax(-1)
    scale = torch.where(high == low, 1.0, (high - low) / 16)
    codes = ((w - low[..., None]) / scale[..., None]).round().clamp(0, 15).to(torch.uint8)
    return codes.flatten(1), scale, low
