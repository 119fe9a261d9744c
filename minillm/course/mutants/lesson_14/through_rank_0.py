"""All send to rank 0, which adds and answers."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.parallel.group import Group

TASK = "14.4"
POINTS = 7.5
HINT = "through one rank all the traffic"


def ring_all_reduce(group: Group, x: Tensor) -> Tensor:
    if group.rank:
        group.send(x, 0)
        return group.recv(torch.empty_like(x), 0)
    total = x.clone()
    for other in range(1, group.size):
        total += group.recv(torch.empty_like(x), other)
    for other in range(1, group.size):
        group.send(total, other)
    return total
