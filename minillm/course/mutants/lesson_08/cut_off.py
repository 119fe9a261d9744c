"""Codes are cut off, not rounded."""

import torch
from torch import Tensor

TASK = "08.2"
POINTS = 0
HINT = "conversion to int8 cuts off"


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    amax = weight.abs().amax(1)
    scale = torch.where(amax == 0, 1.0, amax / 127)
    codes = (weight / scale[:, None]).to(torch.int8)
    return codes, scale
