"""A sum behind each matrix, the first of features that do not belong together."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from minillm.parallel.group import Group

TASK = "14.3"
POINTS = 0.5
HINT = "gate and up are finished features"


def parallel_mlp(group: Group, x: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = group.all_reduce(x @ gate_up.T).chunk(2, dim=-1)
    out = group.all_reduce((F.silu(gate) * up) @ down.T)
    return out if bias is None else out + bias
