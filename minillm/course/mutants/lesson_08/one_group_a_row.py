"""The whole row is one group."""

import torch
from torch import Tensor

TASK = "08.3"
POINTS = 1
HINT = "one group for the whole row"


def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    w = weight.view(len(weight), 1, -1)
    low, high = w.amin(-1), w.amax(-1)
    scale = torch.where(high == low, 1.0, (high - low) / 15)
    codes = ((w - low[..., None]) / scale[..., None]).round().to(torch.uint8)
    return codes.flatten(1), scale, low
