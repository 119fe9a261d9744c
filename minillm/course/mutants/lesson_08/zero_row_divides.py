"""A row of zeros has a scale of 0."""

import torch
from torch import Tensor

TASK = "08.2"
POINTS = 7
HINT = "a row of zeros has a scale of 0"


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    amax = weight.abs().amax(1)
    scale = amax / 127
    codes = (weight / scale[:, None]).nan_to_num().round().to(torch.int8)
    return codes, scale
