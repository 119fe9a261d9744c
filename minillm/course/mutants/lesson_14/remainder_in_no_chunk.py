"""The numbers that do not divide are left out."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.parallel.group import Group

TASK = "14.4"
POINTS = 6.5
HINT = "the last numbers are in no chunk"


def ring_all_reduce(group: Group, x: Tensor) -> Tensor:
    n, r = group.size, group.rank
    total = x.reshape(-1).clone()
    each = len(total) // n
    chunks = [total[i * each : (i + 1) * each] for i in range(n)]
    for step in range(2 * (n - 1)):
        group.send(chunks[(r - step) % n], (r + 1) % n)
        mine = chunks[(r - step - 1) % n]
        got = group.recv(torch.empty_like(mine), (r - 1) % n)
        mine.copy_(mine + got if step < n - 1 else got)
    return total.view(x.shape)
