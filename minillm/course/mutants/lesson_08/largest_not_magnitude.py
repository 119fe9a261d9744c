"""The largest weight, not the largest magnitude."""

import torch
from torch import Tensor

TASK = "08.2"
POINTS = 2
HINT = "the largest magnitude, not the largest weight"


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    amax = weight.amax(1)
    scale = torch.where(amax == 0, 1.0, amax / 127)
    codes = (weight / scale[:, None]).round().clamp(-128, 127).to(torch.int8)
    return codes, scale
