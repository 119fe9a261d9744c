"""A constant group is divided by a scale of 0."""

import torch
from torch import Tensor

TASK = "08.3"
POINTS = 6
HINT = "torch.where(high == low"


def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    w = weight.view(len(weight), -1, group)
    low, high = w.amin(-1), w.amax(-1)
    scale = (high - low) / 15
    codes = ((w - low[..., None]) / scale[..., None]).round().to(torch.uint8)
    return codes.flatten(1), scale, low
