"""All of x goes to all; each adds its own first, so the last bits differ."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.parallel.group import Group

TASK = "14.4"
POINTS = 5.5
HINT = "each adds in an order of its own"


def ring_all_reduce(group: Group, x: Tensor) -> Tensor:
    n, r = group.size, group.rank
    others = [rank for rank in range(n) if rank != r]
    for other in others:
        group.send(x, other)
    total = x.clone()
    for other in others:
        total += group.recv(torch.empty_like(x), other)
    return total
