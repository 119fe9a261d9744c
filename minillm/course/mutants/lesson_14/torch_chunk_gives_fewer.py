"""torch.chunk cuts three numbers in three, not in five."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.parallel.group import Group

TASK = "14.4"
POINTS = 8.5
HINT = "torch.chunk may give fewer than N pieces"


def ring_all_reduce(group: Group, x: Tensor) -> Tensor:
    n, r = group.size, group.rank
    total = x.reshape(-1).clone()
    chunks = total.chunk(n)
    for step in range(2 * (n - 1)):
        group.send(chunks[(r - step) % n], (r + 1) % n)
        mine = chunks[(r - step - 1) % n]
        got = group.recv(torch.empty_like(mine), (r - 1) % n)
        mine.copy_(mine + got if step < n - 1 else got)
    return total.view(x.shape)
