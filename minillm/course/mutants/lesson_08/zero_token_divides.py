"""A head of zeros is divided by 0."""

import torch
from torch import Tensor

TASK = "08.6"
POINTS = 6
HINT = "its scales are 1"


def write_kv(x: Tensor, slots: list[int], pool: Tensor, scales: Tensor) -> None:
    amax = x.abs().amax(-1)
    scale = amax / 127
    codes = (x / scale[..., None]).nan_to_num().round().to(torch.int8)
    for i, slot in enumerate(slots):
        if slot >= 0:
            pool[slot], scales[slot] = codes[i], scale[i]
