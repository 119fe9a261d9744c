"""Join the partial attention of several parts of a sequence into one. Lesson 06 builds it.

Each part s hands over its output o_s, normalised by itself, and the logarithm of its normaliser, lse_s. Together
they are sum(w_s o_s) / sum(w_s) with w_s = exp(lse_s - max lse): the maximum keeps the exponentials in range, as
within a part (Milakov, Gimelshein, 2018). A part without tokens has lse = -inf and its output is not even read.
"""

from __future__ import annotations

import torch
import triton.language as tl
from minillm.kernels.ahead import Ahead
from minillm.kernels.checks import FLOATS, expect
from minillm.kernels.configs import pick
from minillm.kernels.triton_private import jit
from torch import Tensor

from minillm.errors import MinillmError

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


def merge_splits_reference(partial: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(out [B, H, d], lse [B, H]) in float64. partial [B, H, S, d], lse [B, H, S]; NaN in an empty part is ignored."""
    lse = lse.double()
    total = torch.logsumexp(lse, -1)
    weight = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0)[..., None])
    read = partial.double().masked_fill((lse == -torch.inf)[..., None], 0.0)
    return (weight[..., None] * read).sum(-2), total


def merge_splits_tiled(partial: Tensor, lse: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """What the kernel does in eager torch, program by program and part by part: a debugger can step here."""
    B, H, S, d = partial.shape
    out, total = torch.zeros(B, H, d, dtype=dtype), torch.full((B, H), -torch.inf)
    for b in range(B):
        for h in range(H):
            top, weight, acc = -torch.inf, torch.zeros(()), torch.zeros(d)
            for s in range(S):
                if lse[b, h, s] > -torch.inf:
                    new_top = max(top, float(lse[b, h, s]))
                    shrink, w = torch.exp(torch.tensor(top - new_top)), torch.exp(lse[b, h, s] - new_top)
                    acc = acc * shrink + w * partial[b, h, s]
                    weight, top = weight * shrink + w, new_top
            if weight > 0:
                out[b, h], total[b, h] = (acc / weight).to(dtype), top + torch.log(weight)
    return out, total


def merge_splits_bytes(rows: int, splits: int, live: int, d: int, itemsize: int) -> tuple[int, int]:
    """(loaded, stored) bytes of a launch: rows = B * H; live = parts with tokens, over all rows; itemsize of out."""
    return rows * splits * 4 + live * d * 4, rows * (d * itemsize + 4)


@jit
def _merge_splits(PARTIAL, LSE, OUT, TOTAL, S, D: tl.constexpr, BLOCK_S: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    top = -float("inf")
    weight = 0.0
    acc = tl.zeros([D], tl.float32)
    for first in range(0, S, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        lse = tl.load(LSE + row * S + s, mask=s < S, other=-float("inf"))
        live = lse > -float("inf")
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        finite_top = tl.where(new_top > -float("inf"), new_top, 0.0)  # -inf minus -inf would be NaN
        w = tl.exp2((lse - finite_top) * LOG2E)
        shrink = tl.exp2((top - finite_top) * LOG2E)
        part = tl.load(PARTIAL + (row * S + s[:, None]) * D + d[None, :], mask=live[:, None], other=0.0)
        acc = acc * shrink + tl.sum(w[:, None] * part, axis=0)
        weight = weight * shrink + tl.sum(w, axis=0)
        top = new_top
    safe = tl.where(weight > 0, weight, 1.0)  # nothing to see: output 0, lse -inf
    tl.store(OUT + row * D + d, (acc / safe).to(OUT.dtype.element_ty))
    tl.store(TOTAL + row, top + tl.log2(safe) * LN2)


def merge_splits(partial: Tensor, lse: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(out [B, H, d] of dtype, lse [B, H] fp32) from partial [B, H, S, d] and lse [B, H, S], both fp32, contiguous.

    lse is a natural logarithm; -inf marks a part without tokens, whose output may be anything. d is a power of two.
    Raises MinillmError for a wrong shape, dtype or stride.
    """
    expect("partial", partial, ("sequences", "heads", "splits", "head_dim"), (torch.float32,))
    B, H, S, d = partial.shape
    expect("lse", lse, (B, H, S), (torch.float32,), like=partial)
    if dtype not in FLOATS:
        raise MinillmError(f"dtype must be float16, bfloat16, float32, got {str(dtype).removeprefix('torch.')}")
    if S < 1 or d < 1 or d & (d - 1):
        raise MinillmError(f"partial must have at least one split and a power of two as head_dim, got {S} and {d}")
    if not (partial.is_contiguous() and lse.is_contiguous()):
        raise MinillmError("partial and lse must be contiguous, as paged_decode makes them; call .contiguous() first")
    out = torch.empty(B, H, d, dtype=dtype, device=partial.device)
    total = torch.empty(B, H, dtype=torch.float32, device=partial.device)
    if B * H:
        _merge_splits[(B * H,)](partial, lse, out, total, S, D=d, **pick("merge_splits", partial.device, S=S))
    return out, total


AHEAD = [
    Ahead(
        f"merge_splits {dtype} d={d}", _merge_splits, "reduction",
        {"PARTIAL": "*fp32", "LSE": "*fp32", "OUT": f"*{dtype}", "TOTAL": "*fp32", "S": "i32"},
        {"D": d, "BLOCK_S": 16}, num_warps=4, num_stages=1,
    )
    for dtype, d in (("bf16", 64), ("bf16", 128), ("fp16", 128))
]  # fmt: skip
