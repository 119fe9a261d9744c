"""The whole tensor goes round, and each rank adds for itself."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.parallel.group import Group

TASK = "14.4"
POINTS = 5.5
HINT = "cut x into chunks"


def ring_all_reduce(group: Group, x: Tensor) -> Tensor:
    n, r = group.size, group.rank
    total, passing = x.clone(), x
    for _ in range(n - 1):
        group.send(passing, (r + 1) % n)
        passing = group.recv(torch.empty_like(x), (r - 1) % n)
        total += passing
    return total
