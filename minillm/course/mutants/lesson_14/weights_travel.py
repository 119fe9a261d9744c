"""The weights are gathered instead of the result being summed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.parallel.group import Group

TASK = "14.3"
POINTS = 3.5
HINT = "moves more than it saves"


def parallel_mlp(group: Group, x: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    hidden = torch.cat(group.all_gather(F.silu(gate) * up), 1)
    out = hidden @ torch.cat(group.all_gather(down.contiguous()), 1).T
    return out if bias is None else out + bias
