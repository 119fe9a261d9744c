"""The parts of the sum are put side by side."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.parallel.group import Group

TASK = "14.3"
POINTS = 0.5
HINT = "not different numbers: add them"


def parallel_mlp(group: Group, x: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor | None) -> Tensor:
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    out = torch.cat(group.all_gather((F.silu(gate) * up) @ down.T), dim=-1)
    return out if bias is None else out + bias
