"""The kernel has no @jit."""

import torch
import triton
import triton.language as tl

TASK = "04.3"
POINTS = 0
HINT = "put @jit above its def"


def _add_rms_norm(X, R, W, NORM, TOTAL, stride_x, stride_r, D, eps, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < D
    x = tl.load(X + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    r = tl.load(R + row * stride_r + columns, mask=inside, other=0.0).to(tl.float32)
    total = (x + r).to(TOTAL.dtype.element_ty)
    tl.store(TOTAL + row * D + columns, total, mask=inside)
    h = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, axis=0) / D + eps)
    weight = tl.load(W + columns, mask=inside, other=0.0)
    tl.store(NORM + row * D + columns, (h * scale).to(NORM.dtype.element_ty) * weight, mask=inside)


def add_rms_norm(x, residual, weight, eps):
    norm, total = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    _add_rms_norm[(len(x),)](
        x,
        residual,
        weight,
        norm,
        total,
        x.stride(0),
        residual.stride(0),
        x.shape[1],
        eps,
        BLOCK=triton.next_power_of_2(x.shape[1]),
    )
    return norm, total
