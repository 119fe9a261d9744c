"""SwiGLU in one pass: silu(gate) * up, read once and written once. Lesson 04 builds it.

Plain torch reads the gate, writes silu(gate), reads it again beside `up`, and writes the product: 5 I elements of a
row. Fused it is 3 I: gate and up in, the product out. The grid has a program a row and block of columns, so that
one row of a decode step is spread over many multiprocessors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from minillm.kernels.ahead import Ahead
from minillm.kernels.checks import expect
from minillm.kernels.configs import pick
from minillm.kernels.triton_private import jit
from torch import Tensor

from minillm.errors import MinillmError


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """silu(gate) * up in the dtype given, float64 for an oracle. [N, 2 I], gate first -> [N, I] (Shazeer, 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_tiled(gate_up: Tensor, block: int = 1024) -> Tensor:
    """What the kernel does, program by program, with its one rounding, in eager torch: a debugger can step here."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    for row in range(rows):
        for start in range(0, width, block):
            stop = min(start + block, width)
            gate = gate_up[row, start:stop].float()
            up = gate_up[row, width + start : width + stop].float()
            out[row, start:stop] = (gate / (1 + torch.exp(-gate)) * up).to(out.dtype)
    return out


def swiglu_bytes(rows: int, width: int, itemsize: int) -> tuple[int, int]:
    """(loaded, stored) bytes of a launch on [rows, 2 width]."""
    return 2 * rows * width * itemsize, rows * width * itemsize


@jit
def _swiglu(X, OUT, stride_x, I, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # 64 bits: row * stride passes 2^31 elements in a large activation
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < I
    gate = tl.load(X + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(X + row * stride_x + I + columns, mask=inside, other=0.0).to(tl.float32)
    # exp of a large -gate is inf and gate / inf is 0, as it should be; gate * exp(gate) / (1 + exp(gate)) is NaN there
    silu = gate / (1 + tl.exp(-gate))
    tl.store(OUT + row * I + columns, (silu * up).to(OUT.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. gate_up [N, 2 I], gate in the first half of a row, rows may have gaps between them -> [N, I].

    fp16, bf16 (GPU only) or fp32; computed in fp32 and rounded once, where torch rounds silu(gate) as well.
    Raises MinillmError for a wrong shape, dtype or stride.
    """
    expect("gate_up", gate_up, ("rows", "2 * width"))
    if gate_up.shape[1] % 2:
        raise MinillmError(f"gate_up holds a gate and an up of one width, so it must be even; got {gate_up.shape[1]}")
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows and width:
        config = pick("swiglu", gate_up.device)
        _swiglu[(rows, triton.cdiv(width, config["BLOCK"]))](gate_up, out, gate_up.stride(0), width, **config)
    return out


AHEAD = [
    Ahead(
        f"swiglu {dtype}", _swiglu, "elementwise",
        {"X": f"*{dtype}", "OUT": f"*{dtype}", "stride_x": "i32", "I": "i32"}, {"BLOCK": 1024},
        num_warps=4, num_stages=1, wide=("stride_x",),
        by_target={"gfx942": {"num_warps": 2}},
    )
    for dtype in ("bf16", "fp16")
]  # fmt: skip
