"""In the second round an unfinished chunk leaves first."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.parallel.group import Group

TASK = "14.4"
POINTS = 0.5
HINT = "off by one in the second round"


def ring_all_reduce(group: Group, x: Tensor) -> Tensor:
    n, r = group.size, group.rank
    total = x.reshape(-1).clone()
    chunks = [total[len(total) * i // n : len(total) * (i + 1) // n] for i in range(n)]
    for step in range(2 * (n - 1)):
        late = 1 if step >= n - 1 else 0
        group.send(chunks[(r - step + late) % n], (r + 1) % n)
        mine = chunks[(r - step - 1 + late) % n]
        got = group.recv(torch.empty_like(mine), (r - 1) % n)
        mine.copy_(mine + got if step < n - 1 else got)
    return total.view(x.shape)
