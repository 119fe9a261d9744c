"""Operators that write into their argument left out."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TASK = "07.2"
POINTS = 2
HINT = "write in place"


def step(x, weight, program):
    for block in program:
        if block == "norm":
            x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
        elif block == "mlp":
            gate, up = torch.mm(x, weight).chunk(2, dim=-1)
            x = x + torch.nn.functional.silu(gate) * up
        elif block == "turn":
            x = x.t().t()
        elif block == "shift":
            x = x.clone().add_(1.0)
    return x


class Mode(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and not func._schema.is_mutable:
            self.calls[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def count_calls(x, weight, program):
    mode = Mode()
    with mode:
        step(x, weight, program)
    return dict(mode.calls)
