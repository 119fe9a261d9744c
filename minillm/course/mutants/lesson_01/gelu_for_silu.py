"""The activation of another family."""

import torch

TASK = "01.5"
POINTS = 0
HINT = "silu, not gelu"


def swiglu(x, gate, up, down):
    return (torch.nn.functional.gelu(x @ gate.T) * (x @ up.T)) @ down.T
