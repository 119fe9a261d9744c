"""LayerNorm's habit: the mean is subtracted."""

import torch

TASK = "01.2"
POINTS = 0
HINT = "does not subtract the mean"


def rms_norm(x, weight, eps):
    h = x.float()
    h = h - h.mean(-1, keepdim=True)
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
