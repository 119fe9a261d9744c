"""127 / amax is kept."""

import torch
from torch import Tensor

TASK = "08.6"
POINTS = 0
HINT = "not 127 / amax"


def write_kv(x: Tensor, slots: list[int], pool: Tensor, scales: Tensor) -> None:
    amax = x.abs().amax(-1)
    scale = torch.where(amax == 0, 1.0, amax / 127)
    codes = (x / scale[..., None]).round().to(torch.int8)
    for i, slot in enumerate(slots):
        if slot >= 0:
            pool[slot], scales[slot] = codes[i], 1 / scale[i]
