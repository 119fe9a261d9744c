"""x W^T with int4 weights in groups, two codes a byte, made whole again in registers. Lesson 08 builds it.

weight = (code - 8) * scale + zero, a scale and a zero for each group of inputs (minillm/quant.py chooses them). Half a
byte a weight crosses the memory bus, and 4 bytes a group: at groups of 32, five bits a weight. Input 2j of a row is the
low half of byte j, 2j+1 the high half.

Two kernels as for int8. A few rows: in fp32, nothing is rounded. More rows: the weight is rounded to x's dtype, as
tl.dot wants it, which in bf16 is a sixteenth of an int4 step or less.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from minillm.kernels.ahead import Ahead
from minillm.kernels.checks import FLOATS, expect
from minillm.kernels.configs import pick
from minillm.kernels.triton_private import TARGETS, jit
from torch import Tensor

from minillm.errors import MinillmError

GROUPS = (32, 64, 128)
FEW = 4  # rows without matrix instructions, see configs.json


def int4_linear_reference(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x [N, in], packed uint8 [out, in/2], scale and zero [out, in/group] -> [N, out] in x's dtype."""
    return x @ _weight(packed, scale.to(x.dtype), zero.to(x.dtype)).t()


def _weight(packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    codes = torch.stack((packed & 15, packed >> 4), -1).view(*scale.shape, -1)
    return ((codes.to(scale.dtype) - 8) * scale[..., None] + zero[..., None]).flatten(1)


def int4_linear_tiled(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor, block_n: int = 32, block_groups: int = 2,
    rounded: bool = False,
) -> Tensor:  # fmt: skip
    """What the kernels do, tile by tile, in eager torch. rounded: as the one for more rows, weights in x's dtype."""
    out = x.new_empty(len(x), len(packed))
    groups = scale.shape[1]
    group = x.shape[1] // groups
    for n in range(0, len(packed), block_n):
        total = torch.zeros(len(x), len(packed[n : n + block_n]), device=x.device)
        for g in range(0, groups, block_groups):
            tile = (slice(n, n + block_n), slice(g, g + block_groups))
            bytes_of_tile = packed[n : n + block_n, g * group // 2 : (g + block_groups) * group // 2]
            w = _weight(bytes_of_tile, scale[tile].float(), zero[tile].float())
            w = w.to(x.dtype).float() if rounded else w
            total += x[:, g * group : (g + block_groups) * group].float() @ w.t()
        out[:, n : n + block_n] = total.to(x.dtype)
    return out


def int4_linear_bytes(
    rows: int, n_out: int, n_in: int, group: int, itemsize: int, scale_itemsize: int = 2, device: str = "cpu"
) -> tuple[int, int]:
    """(loaded, stored) bytes of a launch. Every tile of outputs reads x, every tile of rows the weights."""
    config = pick("int4_linear", torch.device(device), N=rows)
    row_tiles = -(-rows // config.get("BLOCK_M", rows)) if rows else 0
    out_tiles = -(-n_out // config["BLOCK_N"])
    weights = n_out * n_in // 2 + 2 * n_out * (n_in // group) * scale_itemsize
    return out_tiles * rows * n_in * itemsize + row_tiles * weights, rows * n_out * itemsize


@jit
def _weight_tile(
    W, SCALE, ZERO, n, start, n_out, n_in, stride_w, stride_s, stride_z,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_N, BLOCK_G * GROUP]: weights of the outputs n and the inputs from `start`, a multiple of GROUP."""
    byte = start // 2 + tl.arange(0, BLOCK_G * GROUP // 2)
    end = n_in // GROUP * (GROUP // 2)  # n_in // 2, and known to be a multiple of 16: loads of 16 bytes are allowed
    inside = (n < n_out)[:, None] & (byte < end)[None, :]
    packed = tl.load(W + n.to(tl.int64)[:, None] * stride_w + byte[None, :], mask=inside, other=0)
    codes = tl.interleave(packed & 15, packed >> 4).to(tl.float32)
    g = start // GROUP + tl.arange(0, BLOCK_G)
    inside = (n < n_out)[:, None] & (g < n_in // GROUP)[None, :]
    scale = tl.load(SCALE + n.to(tl.int64)[:, None] * stride_s + g[None, :], mask=inside, other=0.0).to(tl.float32)
    zero = tl.load(ZERO + n.to(tl.int64)[:, None] * stride_z + g[None, :], mask=inside, other=0.0).to(tl.float32)
    grouped = tl.reshape(codes, [BLOCK_N, BLOCK_G, GROUP])
    return tl.reshape((grouped - 8.0) * scale[:, :, None] + zero[:, :, None], [BLOCK_N, BLOCK_G * GROUP])


@jit
def _int4_matvec(
    X, W, SCALE, ZERO, OUT, N, n_out, n_in, stride_x, stride_w, stride_s, stride_z,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    partial = tl.zeros([ROWS, BLOCK_N, BLOCK_G * GROUP], tl.float32)  # summed over k once, at the end
    for start in range(0, n_in, BLOCK_G * GROUP):
        k = start + tl.arange(0, BLOCK_G * GROUP)
        inside = (row < N)[:, None] & (k < n_in)[None, :]
        x = tl.load(X + row.to(tl.int64)[:, None] * stride_x + k[None, :], mask=inside, other=0.0).to(tl.float32)
        w = _weight_tile(W, SCALE, ZERO, n, start, n_out, n_in, stride_w, stride_s, stride_z, GROUP, BLOCK_N, BLOCK_G)
        partial += x[:, None, :] * w[None, :, :]
    where = OUT + row.to(tl.int64)[:, None] * n_out + n[None, :]
    total = tl.sum(partial, axis=2).to(OUT.dtype.element_ty)
    tl.store(where, total, mask=(row < N)[:, None] & (n < n_out)[None, :])


@jit
def _int4_matmul(
    X, W, SCALE, ZERO, OUT, N, n_out, n_in, stride_x, stride_w, stride_s, stride_z,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, n_in, BLOCK_G * GROUP):
        k = start + tl.arange(0, BLOCK_G * GROUP)
        inside = (row < N)[:, None] & (k < n_in)[None, :]
        x = tl.load(X + row.to(tl.int64)[:, None] * stride_x + k[None, :], mask=inside, other=0.0)
        w = _weight_tile(W, SCALE, ZERO, n, start, n_out, n_in, stride_w, stride_s, stride_z, GROUP, BLOCK_N, BLOCK_G)
        total = tl.dot(x, tl.trans(w.to(x.dtype)), total, input_precision="ieee")
    where = OUT + row.to(tl.int64)[:, None] * n_out + n[None, :]
    tl.store(where, total.to(OUT.dtype.element_ty), mask=(row < N)[:, None] & (n < n_out)[None, :])


def _config(rows: int, group: int, device: torch.device | str) -> dict[str, int]:
    """What `pick` says, its inputs counted in whole groups."""
    config = pick("int4_linear", device, N=rows)
    config["BLOCK_G"] = max(1, config.pop("BLOCK_K") // group)
    return config


def int4_linear(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x [N, in] times the weights of packed codes uint8 [out, in/2] -> [N, out] in x's dtype, summed in fp32.

    scale and zero [out, in/group], groups of 32, 64 or 128 inputs. x in fp16, bf16 (GPU only) or fp32, scale and zero
    in any of these. Rows of every argument may have gaps between them. Raises MinillmError for a wrong shape, dtype
    or stride.
    """
    expect("x", x, ("rows", "in"))
    rows, n_in = x.shape
    if n_in % 2:
        raise MinillmError(f"x must have an even number of inputs, two a byte of the weight, got {n_in}")
    expect("packed", packed, ("out", n_in // 2), (torch.uint8,), like=x)
    n_out = len(packed)
    expect("scale", scale, (n_out, "groups"), FLOATS, like=x)
    group = n_in // scale.shape[1] if scale.shape[1] else 0
    if group not in GROUPS or group * scale.shape[1] != n_in:
        raise MinillmError(
            f"scale has {scale.shape[1]} groups for {n_in} inputs; groups must be of {', '.join(map(str, GROUPS))}"
        )
    expect("zero", zero, scale.shape, (scale.dtype,), like=x)
    out = torch.empty((rows, n_out), dtype=x.dtype, device=x.device)
    if rows and n_out:
        config = _config(rows, group, x.device)
        few = "ROWS" in config
        tiles = triton.cdiv(n_out, config["BLOCK_N"])
        kernel, grid = (
            (_int4_matvec, (tiles,)) if few else (_int4_matmul, (triton.cdiv(rows, config["BLOCK_M"]), tiles))
        )
        kernel[grid](
            x, packed, scale, zero, out, rows, n_out, n_in, x.stride(0), packed.stride(0), scale.stride(0),
            zero.stride(0), GROUP=group, **config,
        )  # fmt: skip
    return out


_SIZES = dict.fromkeys(("N", "n_out", "n_in", "stride_x", "stride_w", "stride_s", "stride_z"), "i32")

AHEAD = [
    Ahead(
        f"int4_{'matvec' if rows <= FEW else 'matmul'} {dtype} rows={rows} group={group}",
        _int4_matvec if rows <= FEW else _int4_matmul, "matvec" if rows <= FEW else "matmul",
        {"X": f"*{dtype}", "W": "*u8", "SCALE": "*bf16", "ZERO": "*bf16", "OUT": f"*{dtype}"} | _SIZES,
        {"GROUP": group}, loops=rows > FEW, wide=("stride_x", "stride_w", "stride_s", "stride_z"),
        targets=(these := tuple(t for t in TARGETS if ("ROWS" in _config(rows, group, t)) == (rows <= FEW))),
        by_target={t: _config(rows, group, t) for t in these},
    )
    for dtype, group, counts in (("bf16", 32, (1, 4, 16, 64, 512)), ("fp16", 64, (1, 64)), ("bf16", 128, (1, 512)))
    for rows in counts
]  # fmt: skip
