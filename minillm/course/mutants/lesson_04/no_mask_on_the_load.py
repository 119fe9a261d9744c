"""Lanes behind the row are loaded as if they were there."""

import torch
import triton
import triton.language as tl
from minillm.kernels import jit

TASK = "04.2"
POINTS = 1
HINT = "elements outside every tensor of the launch"


@jit
def _softmax(X, OUT, stride, D, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < D
    x = tl.load(X + row * stride + columns).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(OUT + row * D + columns, (e / tl.sum(e, axis=0)).to(OUT.dtype.element_ty), mask=inside)


def softmax(x):
    out = torch.empty(x.shape, dtype=x.dtype)
    _softmax[(len(x),)](x, out, x.stride(0), x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
