"""128 steps: the largest code wraps or is clamped."""

import torch
from torch import Tensor

TASK = "08.2"
POINTS = 0
HINT = "127 steps on each side"


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    amax = weight.abs().amax(1)
    scale = torch.where(amax == 0, 1.0, amax / 128)
    codes = (weight / scale[:, None]).round().clamp(-128, 127).to(torch.int8)
    return codes, scale
