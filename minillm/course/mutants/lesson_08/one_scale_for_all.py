"""One scale for the whole matrix."""

import torch
from torch import Tensor

TASK = "08.2"
POINTS = 0
HINT = "one scale for the whole matrix"


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    amax = weight.abs().amax().expand(len(weight))
    scale = torch.where(amax == 0, 1.0, amax / 127)
    codes = (weight / scale[:, None]).round().to(torch.int8)
    return codes, scale
