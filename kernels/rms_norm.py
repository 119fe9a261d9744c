"""RMSNorm, alone or with the residual addition before it, in one pass over memory. Lesson 04 builds it.

Plain torch writes the sum, reads it for the squares, reads it again to scale. Fused, a row is read once, kept in
registers, and written once: 2 D elements of a row without a residual, 4 D with one (x, residual in; sum, norm out).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from minillm.kernels.ahead import Ahead
from minillm.kernels.checks import expect
from minillm.kernels.configs import pick
from minillm.kernels.triton_private import jit
from torch import Tensor

from minillm.errors import MinillmError

MAX_WIDTH = 65536  # one program holds a whole row in registers


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(norm, sum) in the dtype given, float64 for an oracle. x, residual [N, D], weight [D] (Zhang, Sennrich, 2019)."""
    total = x if residual is None else x + residual
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight, total


def rms_norm_tiled(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What the kernel does, program by program, with its roundings, in eager torch: a debugger can step here."""
    norm, total = torch.empty_like(x), torch.empty_like(x)
    for row in range(len(x)):
        h = x[row].float()
        if residual is not None:
            h = h + residual[row].float()
        total[row] = h.to(x.dtype)
        h = total[row].float()  # the norm is of what the next layer will see, the rounded sum
        norm[row] = (h * torch.rsqrt((h * h).sum() / len(h) + eps)).to(x.dtype) * weight
    return norm, total


def rms_norm_bytes(rows: int, width: int, itemsize: int, residual: bool = False) -> tuple[int, int]:
    """(loaded, stored) bytes of a launch. Every program asks for the weight; a cache answers all but the first."""
    each = rows * width * itemsize
    return each * (3 if residual else 2), each * (2 if residual else 1)


@jit
def _rms_norm(X, R, W, OUT, SUM, stride_x, stride_r, D, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # 64 bits: row * stride passes 2^31 elements in a large activation
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    h = tl.load(X + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        h += tl.load(R + row * stride_r + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = h.to(SUM.dtype.element_ty)
        tl.store(SUM + row * D + columns, rounded, mask=inside)
        h = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, axis=0) / D + eps)
    weight = tl.load(W + columns, mask=inside, other=0.0)
    tl.store(OUT + row * D + columns, (h * scale).to(OUT.dtype.element_ty) * weight, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight. x [N, D], rows may have gaps between them; weight [D] -> [N, D].

    fp16, bf16 (GPU only) or fp32, squares summed in fp32. Raises MinillmError for a wrong shape, dtype or stride.
    """
    _expect(x, weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, None, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of x + residual, x + residual), each [N, D]: the sum is what the next residual addition needs."""
    _expect(x, weight)
    expect("residual", residual, x.shape, (x.dtype,), like=x)
    out, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, residual, weight, out, total, eps)
    return out, total


def _expect(x: Tensor, weight: Tensor) -> None:
    expect("x", x, ("rows", "width"))
    expect("weight", weight, (x.shape[1],), (x.dtype,), like=x)
    if not 1 <= x.shape[1] <= MAX_WIDTH:
        raise MinillmError(f"x must be 1 to {MAX_WIDTH} wide, since a program holds a whole row; got {x.shape[1]}")


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, total: Tensor | None, eps: float) -> None:
    rows, width = x.shape
    if rows:
        r, s = (
            (x if residual is None else residual),
            (out if total is None else total),
        )  # a pointer that is not followed
        _rms_norm[(rows,)](
            x, r, weight, out, s, x.stride(0), r.stride(0), width, eps,
            HAS_RESIDUAL=residual is not None, BLOCK=triton.next_power_of_2(width),
            **pick("rms_norm", x.device, D=width),
        )  # fmt: skip


AHEAD = [
    Ahead(
        f"{'add_' if residual else ''}rms_norm {dtype} D={width}", _rms_norm, "elementwise",
        dict.fromkeys(("X", "R", "W", "OUT", "SUM"), f"*{dtype}")
        | {"stride_x": "i32", "stride_r": "i32", "D": "i32", "eps": "fp32"},
        {"HAS_RESIDUAL": residual, "BLOCK": triton.next_power_of_2(width)},
        num_warps=4 if width <= 2048 else 8, num_stages=1, wide=("stride_x", "stride_r", "D"),
        by_target={"gfx942": {"num_warps": 2}} if width <= 1024 else {},  # its warps have 64 lanes: 8 elements each
    )
    for residual in (False, True)
    for dtype, width in (("bf16", 576), ("bf16", 4096), ("fp16", 1024))
]  # fmt: skip
