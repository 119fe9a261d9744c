"""x W^T with int8 weights, made whole again in registers. Lesson 08 builds it. int4_linear is in quant_int4.py.

What crosses the memory bus is one byte a weight. It becomes a float only in registers, and since every code is exact in
fp16 and bf16 and the scale belongs to the output, the scale is applied once, to the sum: nothing is rounded on the way.

Two kernels. A few rows: each program owns some outputs, streams their weights once, and multiplies without matrix
instructions; memory sets the time. More rows: tiles and tl.dot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from minillm.kernels.ahead import Ahead
from minillm.kernels.checks import FLOATS, expect
from minillm.kernels.configs import pick
from minillm.kernels.quant_int4 import int4_linear
from minillm.kernels.triton_private import TARGETS, jit
from torch import Tensor

FEW = 4  # rows without matrix instructions, see configs.json

__all__ = ["int4_linear", "int8_linear", "int8_linear_bytes", "int8_linear_reference", "int8_linear_tiled"]


def int8_linear_reference(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [N, in], weight int8 [out, in], scale [out] -> [N, out] in x's dtype, float64 for an oracle."""
    return x @ (weight.to(x.dtype) * scale.to(x.dtype)[:, None]).t()


def int8_linear_tiled(x: Tensor, weight: Tensor, scale: Tensor, block_n: int = 32, block_k: int = 64) -> Tensor:
    """What both kernels do, tile by tile, in eager torch: a debugger can step here."""
    out = x.new_empty(len(x), len(weight))
    for n in range(0, len(weight), block_n):
        total = torch.zeros(len(x), len(weight[n : n + block_n]), device=x.device)
        for k in range(0, x.shape[1], block_k):
            codes = weight[n : n + block_n, k : k + block_k].to(x.dtype)  # exact: 8 bits fit any float here
            total += x[:, k : k + block_k].float() @ codes.float().t()
        out[:, n : n + block_n] = (total * scale[n : n + block_n].float()).to(x.dtype)
    return out


def int8_linear_bytes(
    rows: int, n_out: int, n_in: int, itemsize: int, scale_itemsize: int = 4, device: str = "cpu"
) -> tuple[int, int]:
    """(loaded, stored) bytes of a launch. Every tile of outputs reads x, every tile of rows the weights."""
    config = pick("int8_linear", torch.device(device), N=rows)
    row_tiles = -(-rows // config.get("BLOCK_M", rows)) if rows else 0
    out_tiles = -(-n_out // config["BLOCK_N"])
    weights = n_out * n_in + n_out * scale_itemsize
    return out_tiles * rows * n_in * itemsize + row_tiles * weights, rows * n_out * itemsize


@jit
def _int8_matvec(
    X, W, SCALE, OUT, N, n_out, n_in, stride_x, stride_w,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_start = row.to(tl.int64) * stride_x  # 64 bits: weights and activations pass 2^31 elements
    weight_start = n.to(tl.int64) * stride_w
    partial = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)  # summed over k once, at the end
    for start in range(0, n_in, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(X + row_start[:, None] + k[None, :], mask=(row < N)[:, None] & (k < n_in)[None, :], other=0.0)
        w = tl.load(W + weight_start[:, None] + k[None, :], mask=(n < n_out)[:, None] & (k < n_in)[None, :], other=0)
        partial += x.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :]
    total = tl.sum(partial, axis=2) * tl.load(SCALE + n, mask=n < n_out, other=0.0).to(tl.float32)[None, :]
    where = OUT + row.to(tl.int64)[:, None] * n_out + n[None, :]
    tl.store(where, total.to(OUT.dtype.element_ty), mask=(row < N)[:, None] & (n < n_out)[None, :])


@jit
def _int8_matmul(
    X, W, SCALE, OUT, N, n_out, n_in, stride_x, stride_w,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_start = row.to(tl.int64) * stride_x
    weight_start = n.to(tl.int64) * stride_w
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, n_in, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(X + row_start[:, None] + k[None, :], mask=(row < N)[:, None] & (k < n_in)[None, :], other=0.0)
        w = tl.load(W + weight_start[:, None] + k[None, :], mask=(n < n_out)[:, None] & (k < n_in)[None, :], other=0)
        total = tl.dot(x, tl.trans(w.to(x.dtype)), total, input_precision="ieee")
    total *= tl.load(SCALE + n, mask=n < n_out, other=0.0).to(tl.float32)[None, :]
    where = OUT + row.to(tl.int64)[:, None] * n_out + n[None, :]
    tl.store(where, total.to(OUT.dtype.element_ty), mask=(row < N)[:, None] & (n < n_out)[None, :])


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [N, in] times codes int8 [out, in] times scale [out] -> [N, out] in x's dtype, summed in fp32.

    x in fp16, bf16 (GPU only) or fp32; scale in any of these. Rows of x and of the weight may have gaps between them.
    Raises MinillmError for a wrong shape, dtype or stride.
    """
    expect("x", x, ("rows", "in"))
    expect("weight", weight, ("out", x.shape[1]), (torch.int8,), like=x)
    expect("scale", scale, (len(weight),), FLOATS, like=x)
    (rows, n_in), n_out = x.shape, len(weight)
    out = torch.empty((rows, n_out), dtype=x.dtype, device=x.device)
    if rows and n_out:
        config = pick("int8_linear", x.device, N=rows)
        few = "ROWS" in config
        tiles = triton.cdiv(n_out, config["BLOCK_N"])
        kernel, grid = (
            (_int8_matvec, (tiles,)) if few else (_int8_matmul, (triton.cdiv(rows, config["BLOCK_M"]), tiles))
        )
        kernel[grid](x, weight, scale, out, rows, n_out, n_in, x.stride(0), weight.stride(0), **config)
    return out


_SIZES = dict.fromkeys(("N", "n_out", "n_in", "stride_x", "stride_w"), "i32")

AHEAD = [
    Ahead(
        f"int8_{'matvec' if rows <= FEW else 'matmul'} {dtype} rows={rows}",
        _int8_matvec if rows <= FEW else _int8_matmul, "matvec" if rows <= FEW else "matmul",
        {"X": f"*{dtype}", "W": "*i8", "SCALE": f"*{scale}", "OUT": f"*{dtype}"} | _SIZES, {},
        loops=rows > FEW, wide=("stride_x", "stride_w"),
        targets=(these := tuple(t for t in TARGETS if ("ROWS" in pick("int8_linear", t, N=rows)) == (rows <= FEW))),
        by_target={t: pick("int8_linear", t, N=rows) for t in these},
    )
    for dtype, scale, counts in (("bf16", "bf16", (1, 4, 16, 64, 512)), ("fp16", "fp32", (1, 64)))
    for rows in counts
]  # fmt: skip
