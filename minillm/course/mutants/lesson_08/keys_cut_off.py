"""Keys are cut off, not rounded."""

import torch
from torch import Tensor

TASK = "08.6"
POINTS = 0
HINT = "conversion to int8 cuts off"


def write_kv(x: Tensor, slots: list[int], pool: Tensor, scales: Tensor) -> None:
    amax = x.abs().amax(-1)
    scale = torch.where(amax == 0, 1.0, amax / 127)
    codes = (x / scale[..., None]).to(torch.int8)
    for i, slot in enumerate(slots):
        if slot >= 0:
            pool[slot], scales[slot] = codes[i], scale[i]
