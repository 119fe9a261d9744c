"""all_reduce is called as if it wrote into its argument."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from minillm.parallel.group import Group

TASK = "14.3"
POINTS = 0.5
HINT = "its argument stays a part of it"


def parallel_mlp(group: Group, x: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    out = (F.silu(gate) * up) @ down.T
    group.all_reduce(out)
    return out if bias is None else out + bias
