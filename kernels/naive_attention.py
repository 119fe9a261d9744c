"""Attention in three kernels, as its formula is written: scores, softmax, product. Lesson 05 counts what that costs.

The n x T matrix of a head goes to memory and back twice: written by the first kernel, read and written by the second,
read by the third. Flash attention does the same multiplications and none of those four passes.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from minillm.kernels.checks import expect
from minillm.kernels.flash_prefill_eager import visited
from minillm.kernels.triton_private import jit
from torch import Tensor

from minillm.errors import MinillmError


def naive_attention_tiled(q: Tensor, k: Tensor, v: Tensor, *, block_m: int = 64) -> Tensor:
    """What the three kernels do, in eager torch. q [n, H, d]: the last n of T tokens; k, v [T, K, d] -> [n, H, d]."""
    n, H, d = q.shape
    T, K, _ = k.shape
    scores = q.new_full((H, n, T), -torch.inf)
    for h in range(H):
        for first, last, stop in _tiles(n, T, block_m):
            tile = q[first:last, h].float() @ k[:stop, h * K // H].float().T / math.sqrt(d)
            hidden = torch.arange(stop) > torch.arange(first, last)[:, None] + T - n
            scores[h, first:last, :stop] = tile.masked_fill(hidden.to(q.device), -torch.inf).to(q.dtype)
    probabilities = scores.float().softmax(-1).to(q.dtype)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for h in range(H):
        for first, last, stop in _tiles(n, T, block_m):
            tile = probabilities[h, first:last, :stop].float() @ v[:stop, h * K // H].float()
            out[first:last, h] = tile.to(q.dtype)
    return out


def _tiles(n: int, T: int, block_m: int) -> list[tuple[int, int, int]]:
    """(first row, past the last row, keys that its last row sees) of each tile of rows."""
    return [(a, min(a + block_m, n), T - n + min(a + block_m, n)) for a in range(0, n, block_m)]


def naive_attention_bytes(
    n: int, T: int, H: int, K: int, d: int, itemsize: int, block_m: int | None = None
) -> tuple[int, int]:
    """(loaded, stored) bytes for the last n of T tokens. The matrix counts four times, n x T elements a head each:

        scores     reads q and k            writes the matrix
        softmax    reads the matrix         writes the matrix
        product    reads the matrix and v   writes out

    block_m None: each operand of a kernel passes once, as with perfect caches, and the whole matrix is used. Given:
    what `naive_attention` asks for. There each tile of block_m rows reads the keys and values that it sees once more,
    for each query head, and leaves out what lies past the diagonal, as flash does.
    """
    if block_m is None:
        keys, matrix = T * K * d, n * T * H
    else:
        keys, matrix = sum(stop for _, _, stop in _tiles(n, T, block_m)) * H * d, visited(n, T, block_m) * H
    tokens = n * H * d
    return itemsize * (tokens + 2 * keys + 2 * matrix), itemsize * (2 * matrix + tokens)


@jit
def _scores(
    Q, K, S, scale, n, T, q_t, q_h, k_t, k_h, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    h, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_M
    rows, dims = first + tl.arange(0, BLOCK_M), tl.arange(0, D)
    token = rows.to(tl.int64)
    q = tl.load(Q + (token * q_t)[:, None] + h * q_h + dims[None, :], mask=(rows < n)[:, None], other=0.0)
    stop = T - n + tl.minimum(first + BLOCK_M, n)
    for start in range(0, stop, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        at = K + (keys.to(tl.int64) * k_t)[:, None] + h // GROUP * k_h + dims[None, :]
        k = tl.load(at, mask=(keys < stop)[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(keys[None, :] <= rows[:, None] + T - n, s, float("-inf"))
        inside = (rows < n)[:, None] & (keys < stop)[None, :]
        tl.store(S + ((h * n + token) * T)[:, None] + keys[None, :], s.to(S.dtype.element_ty), mask=inside)


@jit
def _softmax(S, n, T, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr):
    h, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys = tl.arange(0, BLOCK_T)
    stop = T - n + tl.minimum((row // BLOCK_M + 1) * BLOCK_M, n)  # what the scores kernel wrote
    at = S + (h * n + row) * T + keys
    s = tl.load(at, mask=keys < stop, other=float("-inf")).to(tl.float32)
    p = tl.exp(s - tl.max(s, 0))
    tl.store(at, (p / tl.sum(p, 0)).to(S.dtype.element_ty), mask=keys < stop)


@jit
def _product(
    S, V, OUT, n, T, v_t, v_h, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    h, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_M
    rows, dims = first + tl.arange(0, BLOCK_M), tl.arange(0, D)
    token = rows.to(tl.int64)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    stop = T - n + tl.minimum(first + BLOCK_M, n)
    for start in range(0, stop, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = (rows < n)[:, None] & (keys < stop)[None, :]
        p = tl.load(S + ((h * n + token) * T)[:, None] + keys[None, :], mask=inside, other=0.0)
        at = V + (keys.to(tl.int64) * v_t)[:, None] + h // GROUP * v_h + dims[None, :]
        v = tl.load(at, mask=(keys < stop)[:, None], other=0.0)
        acc = tl.dot(p, v, acc, input_precision="ieee")
    at = OUT + ((token * H + h) * D)[:, None] + dims[None, :]
    tl.store(at, acc.to(OUT.dtype.element_ty), mask=(rows < n)[:, None])


def naive_attention(q: Tensor, k: Tensor, v: Tensor, *, block_m: int = 64, block_n: int = 64) -> Tensor:
    """Causal attention of one sequence, its matrix in memory. q [n, H, d]: the last n of T tokens; k, v [T, K, d].

    Gives [n, H, d]. Takes H n T elements of memory. fp16, bf16 (GPU only), fp32; the matrix has the dtype of q. Raises
    MinillmError for a wrong shape, dtype or stride.
    """
    expect("q", q, ("tokens", "heads", "head_dim"))
    n, H, d = q.shape
    expect("k", k, ("all_tokens", "kv_heads", d), (q.dtype,), like=q)
    T, K, _ = k.shape
    expect("v", v, (T, K, d), (q.dtype,), like=q)
    if n > T or H % K:
        raise MinillmError(f"k has {T} tokens and {K} heads: it needs at least q's {n}, and a divisor of q's {H} heads")
    S = torch.empty((H, n, T), dtype=q.dtype, device=q.device)
    out = torch.empty((n, H, d), dtype=q.dtype, device=q.device)
    if n:
        grid = (H, triton.cdiv(n, block_m))
        shape = {"GROUP": H // K, "D": d, "BLOCK_M": block_m, "BLOCK_N": block_n}
        _scores[grid](q, k, S, d**-0.5, n, T, *q.stride()[:2], *k.stride()[:2], **shape)
        _softmax[(H, n)](S, n, T, BLOCK_M=block_m, BLOCK_T=triton.next_power_of_2(T))
        _product[grid](S, v, out, n, T, *v.stride()[:2], H=H, **shape)
    return out
