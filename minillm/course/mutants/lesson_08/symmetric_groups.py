"""The range is from -amax to amax."""

import torch
from torch import Tensor

TASK = "08.3"
POINTS = 0
HINT = "not from -amax to amax"


def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    w = weight.view(len(weight), -1, group)
    high = w.abs().amax(-1)
    low = -high
    scale = torch.where(high == low, 1.0, (high - low) / 15)
    codes = ((w - low[..., None]) / scale[..., None]).round().to(torch.uint8)
    return codes.flatten(1), scale, low
