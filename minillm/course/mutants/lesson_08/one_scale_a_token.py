"""All heads of a token share a scale."""

import torch
from torch import Tensor

TASK = "08.6"
POINTS = 0
HINT = "the maximum goes over d alone"


def write_kv(x: Tensor, slots: list[int], pool: Tensor, scales: Tensor) -> None:
    amax = x.abs().amax((1, 2))[:, None].expand(x.shape[:2])
    scale = torch.where(amax == 0, 1.0, amax / 127)
    codes = (x / scale[..., None]).round().to(torch.int8)
    for i, slot in enumerate(slots):
        if slot >= 0:
            pool[slot], scales[slot] = codes[i], scale[i]
