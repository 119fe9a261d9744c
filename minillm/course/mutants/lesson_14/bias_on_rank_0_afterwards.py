"""Rank 0 adds the bias to the sum, the others do not."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from minillm.parallel.group import Group

TASK = "14.3"
POINTS = 3.5
HINT = "or the ranks differ from here on"


def parallel_mlp(group: Group, x: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    out = group.all_reduce((F.silu(gate) * up) @ down.T)
    return out if bias is None or group.rank else out + bias
