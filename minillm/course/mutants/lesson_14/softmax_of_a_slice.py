"""Each rank takes the softmax of its own slice."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.parallel.group import Group
from minillm.rng import gumbel, keys

TASK = "14.6"
POINTS = 0
HINT = "two ranks' cannot be compared"


def next_tokens(group: Group, logits: Tensor, temperatures: list[float], draws: list[tuple[int, int]]) -> list[int]:
    width = logits.shape[1]
    ids = torch.arange(group.rank * width, (group.rank + 1) * width)
    mine = torch.empty(len(logits), 2)
    for b, (row, temperature, draw) in enumerate(zip(logits, temperatures, draws)):
        score = (row / (temperature or 1)).log_softmax(-1)
        if temperature:
            score = score + gumbel(keys([draw]), ids)[0]
        at = int(score.argmax())
        mine[b, 0], mine[b, 1] = score[at], ids[at]
    everybody = torch.stack(group.all_gather(mine))  # [N, B, 2]
    best = everybody[:, :, 0].argmax(0)
    return [int(everybody[rank, b, 1]) for b, rank in enumerate(best.tolist())]
