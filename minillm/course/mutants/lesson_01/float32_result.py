"""Computed in float32 and left there."""

import torch

TASK = "01.2"
POINTS = 3
HINT = "expected dtype float16, got float32"


def rms_norm(x, weight, eps):
    h = x.float()
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
