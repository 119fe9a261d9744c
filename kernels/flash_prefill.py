"""Flash attention for prefill: new tokens over their paged history and over themselves, without an S x S matrix.

A program takes BLOCK_M query rows of one head, walks over the keys BLOCK_N at a time and keeps the state of an online
softmax in registers (online_softmax.py). Scores never leave the chip. Dao, 2023 (FlashAttention-2). Lesson 05.

The keys come in four runs, so that only tiles at an edge, half as wide, pay for a mask:

    history, whole tiles  |  history, the rest   |  own tokens before this tile's rows  |  own tokens on the diagonal
    from pages, no mask   |  from pages, masked  |  from k and v, no mask               |  from k and v, causal mask
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from minillm.kernels.ahead import Ahead
from minillm.kernels.checks import expect, expect_pages, expect_whole
from minillm.kernels.configs import pick
from minillm.kernels.flash_prefill_eager import (
    LOG2_E,
    attention_flops,
    flash_prefill_bytes,
    flash_prefill_reference,
    flash_prefill_tiled,
)
from minillm.kernels.triton_private import TARGETS, jit
from torch import Tensor

from minillm.cache.pool import LARGEST
from minillm.errors import MinillmError

__all__ = [
    "attention_flops", "flash_prefill", "flash_prefill_bytes", "flash_prefill_reference", "flash_prefill_tiled",
]  # fmt: skip

HEAD_DIMS = (16, 32, 64, 128)
BLOCK_SIZES = (16, 32, 64, 128, 256)


@jit
def _fold(scores, v, m, l, acc, scale):
    """One tile into the state. scores are raw q k^T, so that scaling and subtracting m are one multiply-add."""
    m_new = tl.maximum(m, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * scale - m_new[:, None])
    rescale = tl.exp2(m - m_new)
    l = l * rescale + tl.sum(p, 1)
    acc = acc * rescale[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return m_new, l, acc


@jit
def _blocks(table, start, stop, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block ids of the keys start to start + BLOCK_N: one where a tile is in one page. None from `stop` on is read."""
    if PAGE >= BLOCK_N:
        block = tl.load(table + start // PAGE, mask=start < stop, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)
        block = tl.load(table + keys // PAGE, mask=keys < stop, other=0)  # what follows in a table is garbage
    return block


@jit
def _history_tile(
    q, m, l, acc, scale, K_POOL, V_POOL, K_SCALE, V_SCALE, block, start, history,
    kp_b, kp_s, vp_b, vp_s, ks_b, ks_s, vs_b, vs_s,
    PAGE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, SCALED: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Keys start to start + BLOCK_N from pages. Only where EDGE, some of them lie past the end of the history."""
    keys, dims = start + tl.arange(0, BLOCK_N), tl.arange(0, D)
    inside = keys < history
    block = block.to(tl.int64)
    offset = (keys % PAGE).to(tl.int64)
    k_row, v_row = block * kp_b + offset * kp_s, block * vp_b + offset * vp_s
    if EDGE:
        k = tl.load(K_POOL + k_row[:, None] + dims[None, :], mask=inside[:, None], other=0.0)
        v = tl.load(V_POOL + v_row[:, None] + dims[None, :], mask=inside[:, None], other=0.0)
    else:
        k = tl.load(K_POOL + k_row[:, None] + dims[None, :])
        v = tl.load(V_POOL + v_row[:, None] + dims[None, :])
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if SCALED:  # a column of scores shares its key's scale; p * scale would underflow in fp16, so v takes its own
        scores *= tl.load(K_SCALE + block * ks_b + offset * ks_s, mask=inside, other=0.0)[None, :]
        v_scale = tl.load(V_SCALE + block * vs_b + offset * vs_s, mask=inside, other=0.0)
        v = v.to(tl.float32) * v_scale[:, None]
    if EDGE:
        scores = tl.where(inside[None, :], scores, float("-inf"))
    return _fold(scores, v.to(q.dtype), m, l, acc, scale)


@jit
def _own_tile(
    q, m, l, acc, scale, K, V, begin, start, stop, rows, k_t, v_t,
    D: tl.constexpr, BLOCK_N: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """New tokens start to start + BLOCK_N from k and v. Only where EDGE, the tile crosses the diagonal."""
    keys, dims = start + tl.arange(0, BLOCK_N), tl.arange(0, D)
    token, step = (begin + start).to(tl.int64), tl.arange(0, BLOCK_N).to(tl.int64)  # step * k_t is hoisted out of loops
    k_at = K + token * k_t + ((step * k_t)[:, None] + dims[None, :])
    v_at = V + token * v_t + ((step * v_t)[:, None] + dims[None, :])
    if EDGE:
        k = tl.load(k_at, mask=(keys < stop)[:, None], other=0.0)
        v = tl.load(v_at, mask=(keys < stop)[:, None], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if EDGE:
        scores = tl.where(keys[None, :] <= rows[:, None], scores, float("-inf"))
    return _fold(scores, v, m, l, acc, scale)


@jit
def _flash_prefill(
    Q, K, V, K_POOL, V_POOL, TABLES, CU, HISTORY, K_SCALE, V_SCALE, OUT, scale,
    q_t, q_h, k_t, k_h, v_t, v_h, kp_b, kp_s, kp_h, vp_b, vp_s, vp_h, table_b, ks_b, ks_s, ks_h, vs_b, vs_s, vs_h,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) // H
    h = (tl.program_id(0) % H).to(tl.int64)  # 64 bits, as everything that a stride multiplies: pools pass 2^31 elements
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M  # late rows see most keys: the longest work first
    begin = tl.load(CU + b)
    new = tl.load(CU + b + 1) - begin
    if first >= new:
        return
    history = tl.load(HISTORY + b)
    rows, dims = first + tl.arange(0, BLOCK_M), tl.arange(0, D)
    token = (begin + rows).to(tl.int64)
    q = tl.load(Q + (token * q_t)[:, None] + h * q_h + dims[None, :], mask=(rows < new)[:, None], other=0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)

    kv = h // GROUP
    table = TABLES + b.to(tl.int64) * table_b
    K_POOL, V_POOL = K_POOL + kv * kp_h, V_POOL + kv * vp_h
    K_SCALE, V_SCALE = K_SCALE + kv * ks_h, V_SCALE + kv * vs_h
    whole = history // BLOCK_N * BLOCK_N
    block = _blocks(table, 0, whole, PAGE, BLOCK_N)
    for start in range(0, whole, BLOCK_N):
        following = _blocks(table, start + BLOCK_N, whole, PAGE, BLOCK_N)  # a tile ahead: an address waits for it
        m, l, acc = _history_tile(
            q, m, l, acc, scale, K_POOL, V_POOL, K_SCALE, V_SCALE, block, start, history,
            kp_b, kp_s, vp_b, vp_s, ks_b, ks_s, vs_b, vs_s, PAGE, D, BLOCK_N, SCALED, False,
        )  # fmt: skip
        block = following
    EDGE_N: tl.constexpr = BLOCK_N // 2 if BLOCK_N > 16 else 16  # a mask costs registers, and half a tile wastes less
    for start in range(whole, history, EDGE_N):  # a loop even for one: its loads pass by the registers
        edge = _blocks(table, start, history, PAGE, EDGE_N)
        m, l, acc = _history_tile(
            q, m, l, acc, scale, K_POOL, V_POOL, K_SCALE, V_SCALE, edge, start, history,
            kp_b, kp_s, vp_b, vp_s, ks_b, ks_s, vs_b, vs_s, PAGE, D, EDGE_N, SCALED, True,
        )  # fmt: skip

    K, V = K + kv * k_h, V + kv * v_h
    whole = first // BLOCK_N * BLOCK_N
    for start in range(0, whole, BLOCK_N):
        m, l, acc = _own_tile(q, m, l, acc, scale, K, V, begin, start, new, rows, k_t, v_t, D, BLOCK_N, False)
    stop = tl.minimum(first + BLOCK_M, new)
    for start in range(whole, stop, EDGE_N):
        m, l, acc = _own_tile(q, m, l, acc, scale, K, V, begin, start, stop, rows, k_t, v_t, D, EDGE_N, True)

    out = acc / l[:, None]  # each row saw at least itself
    at = OUT + (token * H + h)[:, None] * D + dims[None, :]
    tl.store(at, out.to(OUT.dtype.element_ty), mask=(rows < new)[:, None])


def flash_prefill(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, block_tables: Tensor, cu_seqlens: Tensor,
    history_lens: Tensor, max_new: int, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    softmax_scale: float | None = None, *, config: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of each sequence's new tokens over its history in pages and over themselves -> out [N, H, d].

    q [N, H, d], k, v [N, K, d]: the new tokens of all sequences, one after the other; views of a fused qkv are fine
    k_pool, v_pool  [num_blocks, block_size, K, d], the dtype of q, or int8 or float8_e4m3fn with scales
    block_tables    [B, max_blocks] int32; only the entries that history_lens reaches are followed
    cu_seqlens      [B + 1] int32: sequence b has the new tokens cu_seqlens[b] to cu_seqlens[b + 1]
    history_lens    [B] int32: tokens before them, in pages. The new tokens themselves are not read from pages
    max_new         at least the largest number of new tokens of a sequence: it sizes the grid, which reads no data
    k_scale, v_scale  [num_blocks, block_size, K] float32: value = stored * scale
    softmax_scale   1 / sqrt(d) if None
    config          BLOCK_M, BLOCK_N, num_warps, num_stages other than those of configs.json: to tune, to test

    fp16, bf16 (GPU only) or fp32, accumulated in fp32; fp32 is multiplied as such, not as TF32. Rows of `out` past
    cu_seqlens[-1] are not written. Raises MinillmError for a wrong shape, dtype, stride, device or size.
    """
    _expect(q, k, v, k_pool, v_pool, block_tables, cu_seqlens, history_lens, max_new, k_scale, v_scale, softmax_scale)
    N, H, d = q.shape
    B, page = len(block_tables), k_pool.shape[1]
    out = torch.empty((N, H, d), dtype=q.dtype, device=q.device)
    config = config or pick("flash_prefill", q.device, **sizes(q.dtype, k_pool.dtype, d))
    ks, vs = (k_scale, v_scale) if k_scale is not None and v_scale is not None else (cu_seqlens, cu_seqlens)
    tiles = triton.cdiv(max_new, config["BLOCK_M"])
    if N and B and tiles:
        _flash_prefill[(B * H, tiles)](
            q, k, v, k_pool, v_pool, block_tables, cu_seqlens, history_lens, ks, vs, out,
            (d**-0.5 if softmax_scale is None else softmax_scale) * LOG2_E,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *k_pool.stride()[:3], *v_pool.stride()[:3],
            block_tables.stride(0), *(ks.stride() if k_scale is not None else (0, 0, 0)),
            *(vs.stride() if k_scale is not None else (0, 0, 0)),
            H=H, GROUP=H // k.shape[1], D=d, PAGE=page, SCALED=k_scale is not None, **config,
        )  # fmt: skip
    return out


def sizes(dtype: torch.dtype, kv_dtype: torch.dtype, d: int) -> dict[str, int]:
    """What configs.json chooses by: head_dim, and the bytes of an element of q and of the pools."""
    return {"D": d, "itemsize": dtype.itemsize, "kv_itemsize": kv_dtype.itemsize}


def _expect(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, block_tables: Tensor, cu_seqlens: Tensor,
    history_lens: Tensor, max_new: int, k_scale: Tensor | None, v_scale: Tensor | None, softmax_scale: float | None,
) -> None:  # fmt: skip
    expect("q", q, ("tokens", "heads", "head_dim"))
    N, H, d = q.shape
    expect("k", k, (N, "kv_heads", d), (q.dtype,), like=q)
    K = k.shape[1]
    expect("v", v, (N, K, d), (q.dtype,), like=q)
    if d not in HEAD_DIMS:
        raise MinillmError(f"head_dim must be one of {', '.join(map(str, HEAD_DIMS))}, got {d}")
    if K < 1 or H % K:
        raise MinillmError(f"query heads must be a multiple of KV heads, got {H} and {K}")
    if (k_scale is None) != (v_scale is None):
        raise MinillmError("k_scale and v_scale belong together: give both, or neither")
    expect("k_pool", k_pool, ("blocks", "block_size", K, d), (q.dtype,) if k_scale is None else tuple(LARGEST), like=q)
    blocks, page = k_pool.shape[:2]
    expect("v_pool", v_pool, (blocks, page, K, d), (k_pool.dtype,), like=q)
    if page not in BLOCK_SIZES:
        raise MinillmError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {page}")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            expect(name, scale, (blocks, page, K), (torch.float32,), like=q, last_stride=False)
    expect("block_tables", block_tables, ("sequences", "max_blocks"), (torch.int32,), like=q)
    B = len(block_tables)
    expect("cu_seqlens", cu_seqlens, (B + 1,), (torch.int32,), like=q)
    expect("history_lens", history_lens, (B,), (torch.int32,), like=q)
    expect_whole("max_new", max_new, 0)
    if softmax_scale is not None and not softmax_scale > 0:  # the largest score is found before it is scaled
        raise MinillmError(f"softmax_scale must be above 0, got {softmax_scale}")
    expect_pages(block_tables, history_lens, blocks, page, "history_lens")
    if q.device.type == "cpu" and B:  # a GPU would have to wait
        counts = cu_seqlens.diff()
        if int(cu_seqlens[0]) != 0 or int(counts.min()) < 0 or int(cu_seqlens[-1]) > N:
            raise MinillmError(f"cu_seqlens must rise from 0 to at most {N} tokens, got {cu_seqlens.tolist()!r:.80}")
        if max_new < (longest := int(counts.max())):
            raise MinillmError(f"max_new is {max_new}, but a sequence has {longest} new tokens")


_STRIDES = (
    "q_t", "q_h", "k_t", "k_h", "v_t", "v_h", "kp_b", "kp_s", "kp_h", "vp_b", "vp_s", "vp_h", "table_b",
    "ks_b", "ks_s", "ks_h", "vs_b", "vs_s", "vs_h",
)  # fmt: skip


def _ahead(dtype: str, kv: str, d: int, page: int) -> Ahead:
    types = dict.fromkeys(("Q", "K", "V", "OUT"), f"*{dtype}") | dict.fromkeys(("K_POOL", "V_POOL"), f"*{kv}")
    types |= dict.fromkeys(("TABLES", "CU", "HISTORY"), "*i32") | dict.fromkeys(("K_SCALE", "V_SCALE"), "*fp32")
    targets = [t for t in TARGETS if (kv, t) not in UNSUPPORTED]
    size = {"fp32": 4, "fp8e4nv": 1, "i8": 1}
    tuned: dict[str, Any] = {
        t: pick("flash_prefill", t, D=d, itemsize=size.get(dtype, 2), kv_itemsize=size.get(kv, 2)) for t in targets
    }
    return Ahead(
        f"flash_prefill {dtype} D={d} page={page}" + (f" kv={kv}" if kv != dtype else ""), _flash_prefill,
        "prefill" if dtype != "fp32" else "elementwise", types | dict.fromkeys(_STRIDES, "i32") | {"scale": "fp32"},
        {"H": 32, "GROUP": 4, "D": d, "PAGE": page, "SCALED": kv != dtype}, loops=dtype != "fp32",
        targets=tuple(targets), wide=_STRIDES, by_target=tuned,
    )  # fmt: skip


UNSUPPORTED = {("fp8e4nv", "sm_80")}  # Ampere has no instruction that reads this format: use int8 there
AHEAD = [
    _ahead("bf16", "bf16", 128, 16),
    _ahead("fp16", "fp16", 128, 256),
    _ahead("bf16", "bf16", 64, 16),
    _ahead("bf16", "i8", 128, 16),
    _ahead("bf16", "fp8e4nv", 128, 16),
]
