"""Only rank 0 asks for the sum, and waits for ever."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from minillm.parallel.group import Group

TASK = "14.3"
POINTS = 0.5
HINT = "rank 0 is in all_reduce, rank 1 has returned"


def parallel_mlp(group: Group, x: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    out = (F.silu(gate) * up) @ down.T
    if group.rank == 0:
        out = group.all_reduce(out)
    return out if bias is None else out + bias
