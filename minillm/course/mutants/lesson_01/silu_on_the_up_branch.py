"""Gate and up swapped."""

import torch

TASK = "01.5"
POINTS = 0
HINT = "silu goes on the gate branch"


def swiglu(x, gate, up, down):
    return (x @ gate.T * torch.nn.functional.silu(x @ up.T)) @ down.T
