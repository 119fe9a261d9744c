"""The bias is added before the sum, on every rank."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from minillm.parallel.group import Group

TASK = "14.3"
POINTS = 3.5
HINT = "in the sum once for each rank"


def parallel_mlp(group: Group, x: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    out = (F.silu(gate) * up) @ down.T
    return group.all_reduce(out if bias is None else out + bias)
