"""All logits are gathered, everywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.parallel.group import Group
from minillm.rng import gumbel, keys

TASK = "14.6"
POINTS = 7
HINT = "all logits need not travel"


def next_tokens(group: Group, logits: Tensor, temperatures: list[float], draws: list[tuple[int, int]]) -> list[int]:
    whole = torch.cat(group.all_gather(logits), 1)
    ids, chosen = torch.arange(whole.shape[1]), []
    for row, temperature, draw in zip(whole, temperatures, draws):
        score = row if temperature == 0 else row / temperature + gumbel(keys([draw]), ids)[0]
        chosen.append(int(score.argmax()))
    return chosen
