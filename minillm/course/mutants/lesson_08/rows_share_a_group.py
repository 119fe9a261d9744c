"""All outputs share the groups' scales."""

import torch
from torch import Tensor

TASK = "08.3"
POINTS = 0
HINT = "a group is of inputs of one output"


def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    w = weight.view(len(weight), -1, group)
    low, high = (x.expand(len(w), -1) for x in (w.amin((0, 2)), w.amax((0, 2))))
    scale = torch.where(high == low, 1.0, (high - low) / 15)
    codes = ((w - low[..., None]) / scale[..., None]).round().to(torch.uint8)
    return codes.flatten(1), scale, low
