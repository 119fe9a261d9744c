"""Squares taken in x's own dtype: 300 squared is infinite in float16."""

import torch

TASK = "01.2"
POINTS = 3
HINT = "overflow float16"


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
