"""All tokens of a call share the head's scale."""

import torch
from torch import Tensor

TASK = "08.6"
POINTS = 2
HINT = "a scale for every token: one that is shared would change"


def write_kv(x: Tensor, slots: list[int], pool: Tensor, scales: Tensor) -> None:
    amax = x.abs().amax((0, 2)).expand(x.shape[:2])
    scale = torch.where(amax == 0, 1.0, amax / 127)
    codes = (x / scale[..., None]).round().to(torch.int8)
    for i, slot in enumerate(slots):
        if slot >= 0:
            pool[slot], scales[slot] = codes[i], scale[i]
