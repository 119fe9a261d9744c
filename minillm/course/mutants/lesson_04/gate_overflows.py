"""gate * exp(gate) / (1 + exp(gate)) is inf / inf for a large gate."""

import torch
import triton
import triton.language as tl
from minillm.kernels import jit

TASK = "04.4"
POINTS = 5
HINT = "exp(gate) overflows"


@jit
def _swiglu(X, OUT, stride, I, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < I
    gate = tl.load(X + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + row * stride + I + columns, mask=inside, other=0.0).to(tl.float32)
    silu = gate * tl.exp(gate) / (1 + tl.exp(gate))
    tl.store(OUT + row * I + columns, (silu * up).to(OUT.dtype.element_ty), mask=inside)


def swiglu(gate_up):
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype)
    _swiglu[(rows, triton.cdiv(width, 128))](gate_up, out, gate_up.stride(0), width, BLOCK=128)
    return out
