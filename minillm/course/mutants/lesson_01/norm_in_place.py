"""The input is scaled in place; the residual stream that needs it is gone."""

import torch

TASK = "01.2"
POINTS = 0
HINT = "changed its input in place (argument 1)"


def rms_norm(x, weight, eps):
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return x.mul_((scale * weight.float()).to(x.dtype))
