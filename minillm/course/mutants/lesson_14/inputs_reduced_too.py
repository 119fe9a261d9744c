"""The input is all-reduced, and the mean of equal ones taken."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from minillm.parallel.group import Group

TASK = "14.3"
POINTS = 3.5
HINT = "an all-reduce of it tells nothing"


def parallel_mlp(group: Group, x: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor | None) -> Tensor:
    x = group.all_reduce(x) / group.size
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    out = group.all_reduce((F.silu(gate) * up) @ down.T)
    return out if bias is None else out + bias
