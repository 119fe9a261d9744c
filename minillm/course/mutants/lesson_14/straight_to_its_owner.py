"""The right bytes, over links between all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.parallel.group import Group

TASK = "14.4"
POINTS = 7.5
HINT = "a ring needs a link to one neighbour"


def ring_all_reduce(group: Group, x: Tensor) -> Tensor:
    n, r = group.size, group.rank
    total = x.reshape(-1).clone()
    chunks = [total[len(total) * i // n : len(total) * (i + 1) // n] for i in range(n)]
    others = [rank for rank in range(n) if rank != r]
    for other in others:
        group.send(chunks[other], other)
    for other in others:
        chunks[r] += group.recv(torch.empty_like(chunks[r]), other)
    for other in others:
        group.send(chunks[r], other)
    for other in others:
        group.recv(chunks[other], other)
    return total.view(x.shape)
