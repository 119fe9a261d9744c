"""Decode attention over a paged cache: one new token a sequence against all earlier ones. Lesson 06 builds it.

Three ideas. Pages (PagedAttention, Kwon et al., 2023): a token's key and value lie wherever the block table says, and
a tile gathers its tokens from as many pages as it spans. GQA packing: the query heads of a KV head are the rows of one
matrix product, so each key and value is read once for the whole group, not once for each query head. Split-KV
(FlashDecoding, Dao et al., 2023): parts of a long sequence are read by different programs, then merged by their
log-sum-exp. Within a part the softmax is online (Milakov, Gimelshein, 2018).

Rows are padded to 16, the height of a matrix instruction, also for a group of 1: a tile then costs 16 FLOPs a byte
of bf16, a tenth of what a data-centre GPU can do meanwhile, so a variant without the padding has nothing to win.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from minillm.kernels.ahead import Ahead
from minillm.kernels.checks import expect, expect_pages, expect_whole
from minillm.kernels.configs import pick
from minillm.kernels.merge_splits import merge_splits, merge_splits_bytes, merge_splits_tiled
from minillm.kernels.splits import MOST, multiprocessors, split_count, split_range
from minillm.kernels.triton_private import jit
from torch import Tensor

from minillm.cache.pool import LARGEST
from minillm.errors import MinillmError

LOG2E = math.log2(math.e)
LN2 = tl.constexpr(math.log(2))
TINY = tl.constexpr(1e-24)  # below every scale that rope_kv.py writes


def gather_pages(pool: Tensor, table: Tensor, tokens: Tensor, scale: Tensor | None = None) -> Tensor:
    """[T, K, d] float64: the rows of `tokens` [T] int64. pool [num_blocks, block_size, K, d], table [max_blocks]."""
    block, slot = table[tokens // pool.shape[1]].long(), tokens % pool.shape[1]
    raw = pool.view(torch.uint8)[block, slot].view(pool.dtype) if pool.element_size() == 1 else pool[block, slot]
    return raw.double() if scale is None else raw.double() * scale[block, slot].double()[..., None]


def paged_decode_reference(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_tables: Tensor, context_lens: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(q K^T scale) V over gathered pages, in float64: (out [B, H, d], lse [B, H]). Shapes: `paged_decode`."""
    (B, H, d), K = q.shape, k_pool.shape[2]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(B, H, d, dtype=torch.float64, device=q.device)
    lse = torch.full((B, H), -torch.inf, dtype=torch.float64, device=q.device)
    for b, context in enumerate(context_lens.tolist()):
        if context:
            tokens = torch.arange(context, device=q.device)
            k = gather_pages(k_pool, block_tables[b], tokens, k_scale)
            v = gather_pages(v_pool, block_tables[b], tokens, v_scale)
            scores = torch.einsum("kgd,tkd->kgt", q[b].double().view(K, H // K, d), k) * scale
            out[b] = torch.einsum("kgt,tkd->kgd", scores.softmax(-1), v).reshape(H, d)
            lse[b] = scores.logsumexp(-1).flatten()
    return out, lse


class Running(NamedTuple):
    """What a program of the twin holds after a tile: tokens first..end of `sequence` seen by the heads of `kv_head`."""

    sequence: int
    kv_head: int
    split: int
    first: int
    end: int
    top: Tensor  # [group] largest score so far, in base 2
    weight: Tensor  # [group] sum of 2^(score - top)
    acc: Tensor  # [group, d] sum of 2^(score - top) v: divided by weight, the attention over what was seen


def paged_decode_tiled(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_tables: Tensor, context_lens: Tensor,
    num_splits: int = 1, tile: int = 64, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    softmax_scale: float | None = None, watch: Callable[[Running], None] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the kernel does, program by program and tile by tile, with its roundings, in eager torch.

    `watch` is called after each tile with the running state.
    """
    (B, H, d), K = q.shape, k_pool.shape[2]
    group = H // K
    scale = (d**-0.5 if softmax_scale is None else softmax_scale) * LOG2E
    partial, lse = torch.zeros(B, H, num_splits, d), torch.full((B, H, num_splits), -torch.inf)
    for b, kv, split in itertools.product(range(B), range(K), range(num_splits)):
        heads = slice(kv * group, (kv + 1) * group)
        start, stop = split_range(int(context_lens[b]), split, num_splits, tile)
        top, weight, acc = torch.full((group,), -torch.inf), torch.zeros(group), torch.zeros(group, d)
        for first in range(start, stop, tile):
            tokens = torch.arange(first, min(first + tile, stop))
            k = gather_pages(k_pool, block_tables[b], tokens)[:, kv].float()
            v = gather_pages(v_pool, block_tables[b], tokens)[:, kv].float()
            scores = (q[b, heads].float() @ k.T) * scale
            if k_scale is not None:
                scores = scores * gather_pages(k_scale[..., None], block_tables[b], tokens)[:, kv, 0].float()
            new_top = torch.maximum(top, scores.max(-1).values)
            shrink, p = torch.exp2(top - new_top), torch.exp2(scores - new_top[:, None])
            weight = weight * shrink + p.sum(-1)
            unit = 1.0
            if v_scale is not None:
                of_v = gather_pages(v_scale[..., None], block_tables[b], tokens)[:, kv, 0].float()
                unit = max(float(of_v.max()), TINY.value) if q.dtype == torch.float16 else 1.0
                p = p * (of_v / unit)
            acc = acc * shrink[:, None] + (p.to(q.dtype).float() @ v) * unit
            top = new_top
            if watch is not None:
                watch(Running(b, kv, split, first, int(tokens[-1]) + 1, top, weight, acc))
        if start < stop:
            partial[b, heads, split] = acc / weight[:, None]
            lse[b, heads, split] = (top + torch.log2(weight)) * math.log(2)
    if num_splits == 1:
        return partial[:, :, 0].to(q.dtype), lse[:, :, 0]
    return merge_splits_tiled(partial, lse, q.dtype)


def paged_decode_bytes(
    context_lens: Sequence[int], H: int, K: int, d: int, itemsize: int, num_splits: int = 1, tile: int = 64,
    kv_itemsize: int | None = None,
) -> tuple[int, int]:  # fmt: skip
    """(loaded, stored) bytes of a call, the merge included. itemsize of q and out; kv_itemsize 1 = quantised.

    Keys and values pass once: 2 T K d kv_itemsize, whatever H is. To each token and KV head belong 4 bytes of block
    table (a cache answers most of them: tokens of a page ask for the same entry) and, if quantised, 8 bytes of scales.
    """
    B, T, kv_itemsize = len(context_lens), sum(context_lens), kv_itemsize or itemsize
    per_token = K * (2 * d * kv_itemsize + 4 + (8 if kv_itemsize == 1 else 0))
    loaded = T * per_token + B * num_splits * (H * d * itemsize + K * 4)
    if num_splits == 1:
        return loaded, B * H * (d * itemsize + 4)
    ranges = (split_range(t, s, num_splits, tile) for t in context_lens for s in range(num_splits))
    live = H * sum(first < end for first, end in ranges)
    merge_loaded, merge_stored = merge_splits_bytes(B * H, num_splits, live, d, itemsize)
    return loaded + merge_loaded, live * d * 4 + B * H * num_splits * 4 + merge_stored


@jit
def _paged_decode(
    Q, KP, VP, KS, VS, TABLES, LENS, OUT, LSE, scale,
    stride_qb, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_ksb, stride_kst, stride_vsb, stride_vst, stride_tb,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SCALES: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    b, kv, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    kv_heads, splits = tl.num_programs(1), tl.num_programs(2)
    context = tl.load(LENS + b)
    each = tl.cdiv(tl.cdiv(context, BLOCK_N), splits) * BLOCK_N
    start = tl.minimum(split * each, context)
    stop = tl.minimum(start + each, context)

    row, d = tl.arange(0, ROWS), tl.arange(0, D)
    head = kv * GROUP + row
    q = tl.load(Q + b * stride_qb + head[:, None] * stride_qh + d[None, :], mask=row[:, None] < GROUP, other=0.0)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    WIDTH: tl.constexpr = D // 2 if SCALES else D  # V of single bytes arrives in pairs: see in_pairs
    wide = tl.arange(0, WIDTH)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    acc_odd = acc
    for first in range(start, stop, BLOCK_N):
        token = first + tl.arange(0, BLOCK_N)
        inside = token < stop
        block = tl.load(TABLES + b * stride_tb + token // PAGE, mask=inside, other=0).to(tl.int64)
        slot = (token % PAGE).to(tl.int64)  # 64 bits: a pool may hold more than 2^31 elements
        at = KP + kv * stride_kh + block * stride_kb + slot * stride_kt
        k = tl.load(at[None, :] + d[:, None], mask=inside[None, :], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        if SCALES:
            scores *= tl.load(KS + block * stride_ksb + slot * stride_kst + kv, mask=inside, other=0.0)[None, :]
        scores = tl.where(inside[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp2(top - new_top)
        p = tl.exp2(scores - new_top[:, None])
        weight = weight * shrink + tl.sum(p, axis=1)
        if SCALES:
            v_scale = tl.load(VS + block * stride_vsb + slot * stride_vst + kv, mask=inside, other=0.0)
            if q.dtype == tl.float16:  # p * v_scale may be below 6e-8, its smallest number: sum in units of the largest
                unit = tl.maximum(tl.max(v_scale, axis=0), TINY)
                v_scale, shrink = v_scale / unit, shrink / unit
            p *= v_scale[None, :]
        at = VP + kv * stride_vh + block * stride_vb + slot * stride_vt
        v = tl.load(at[:, None] + wide[None, :], mask=inside[:, None], other=0)
        p = p.to(q.dtype)
        if SCALES:
            even, odd = v.to(tl.int8), (v >> 8).to(tl.int8)
            if KP.dtype.element_ty != tl.int8:
                even, odd = even.to(KP.dtype.element_ty, bitcast=True), odd.to(KP.dtype.element_ty, bitcast=True)
            acc_odd = tl.dot(p, odd.to(q.dtype), acc_odd * shrink[:, None], input_precision="ieee")
            v = even
        acc = tl.dot(p, v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
        if SCALES and q.dtype == tl.float16:
            acc, acc_odd = acc * unit, acc_odd * unit
        top = new_top

    if SCALES:
        acc = tl.join(acc, acc_odd).reshape(ROWS, D)
    safe = tl.where(weight > 0, weight, 1.0)  # nothing to see: output 0, lse -inf
    to = (b * kv_heads * GROUP + head) * splits + split
    written = row < tl.where((start < stop) | (splits == 1), GROUP, 0)  # a merge does not read what is left out here
    tl.store(OUT + to[:, None] * D + d[None, :], (acc / safe[:, None]).to(OUT.dtype.element_ty), mask=written[:, None])
    tl.store(LSE + to, (top + tl.log2(safe)) * LN2, mask=row < GROUP)


def in_pairs(name: str, pool: Tensor) -> Tensor:
    """A pool of bytes, two a word: [..., d] int8 or fp8 -> [..., d / 2] int16.

    A product with V needs its elements turned from rows of d to rows of tokens. Matrix-load instructions do that for
    words of 16 bits; single bytes would be picked from shared memory one by one.
    """
    if any(s % 2 for s in (*pool.stride()[:-1], pool.storage_offset())):
        raise MinillmError(f"{name} must have even strides, got {list(pool.stride())}; it is read two bytes at a time")
    return pool.view(torch.int16)


def paged_decode(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_tables: Tensor, context_lens: Tensor, max_context: int,
    num_splits: int | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of one new token a sequence over its pages: (out [B, H, d], lse [B, H] fp32, natural logarithm).

    q             [B, H, d] fp16, bf16 (GPU only) or fp32; H a multiple of K; query head h sees KV head h // (H / K)
    k_pool        [num_blocks, block_size, K, d], v_pool alike; dtype of q, or int8 or float8_e4m3fn with scales
    block_tables  [B, max_blocks] int32; entries after a sequence's last block are never followed
    context_lens  [B] int32, on the device: tokens to see, the new one included; 0 gives output 0 and lse -inf
    max_context   the longest context that the caller will put there; decides num_splits, nothing else
    num_splits    parts of a sequence; by default from shapes and multiprocessors, so a captured graph stays valid
    k_scale       [num_blocks, block_size, K] fp32, v_scale alike: value = stored * scale
    softmax_scale 1 / sqrt(d) by default

    d and block_size are powers of two from 16 on. Raises MinillmError for a wrong shape, dtype or stride.
    """
    expect("q", q, ("sequences", "heads", "head_dim"))
    (B, H, d), scaled = q.shape, k_scale is not None
    expect(
        "k_pool", k_pool, ("num_blocks", "block_size", "kv_heads", d), tuple(LARGEST) if scaled else (q.dtype,), like=q
    )
    expect("v_pool", v_pool, k_pool.shape, (k_pool.dtype,), like=q)
    blocks, page, K, _ = k_pool.shape
    expect("block_tables", block_tables, (B, "max_blocks"), (torch.int32,), like=q)
    expect("context_lens", context_lens, (B,), (torch.int32,), like=q)
    if K < 1 or H % K:
        raise MinillmError(f"q has {H} heads and the pools {K}; query heads must be a multiple of KV heads")
    for name, value in (("head_dim", d), ("block_size", page)):
        if value < 16 or value > 256 or value & (value - 1):
            raise MinillmError(f"{name} must be a power of two from 16 to 256, got {value}")
    if (k_scale is None) != (v_scale is None):
        raise MinillmError("k_scale and v_scale belong together: give both or neither")
    for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scales is not None:
            expect(name, scales, (blocks, page, K), (torch.float32,), like=q)
    expect_whole("max_context", max_context, 0, block_tables.shape[1] * page)
    expect_pages(block_tables, context_lens, blocks, page)
    if num_splits is None:
        num_splits = split_count(B * K, max_context, multiprocessors(q.device))
    expect_whole("num_splits", num_splits, 1, MOST)

    direct = num_splits == 1  # the only part is the result: written as such, and nothing is merged
    out_dtype = q.dtype if direct else torch.float32
    out = torch.empty(B, H, num_splits, d, dtype=out_dtype, device=q.device)
    lse = torch.empty(B, H, num_splits, dtype=torch.float32, device=q.device)
    ks, vs = (k_scale, v_scale) if k_scale is not None and v_scale is not None else (lse, lse)  # not followed
    values = in_pairs("v_pool", v_pool) if scaled else v_pool
    if B and H:
        _paged_decode[(B, K, num_splits)](
            q, k_pool, values, ks, vs, block_tables, context_lens, out, lse,
            (d**-0.5 if softmax_scale is None else softmax_scale) * LOG2E,
            *q.stride()[:2], *k_pool.stride()[:3], *values.stride()[:3], *ks.stride()[:2], *vs.stride()[:2],
            block_tables.stride(0), GROUP=H // K, ROWS=max(16, triton.next_power_of_2(H // K)), D=d, PAGE=page,
            SCALES=scaled, **pick("paged_decode", q.device, D=d, BYTES=k_pool.element_size()),
        )  # fmt: skip
    return (out[:, :, 0], lse[:, :, 0]) if direct else merge_splits(out, lse, q.dtype)


_POINTERS = {"KS": "*fp32", "VS": "*fp32", "TABLES": "*i32", "LENS": "*i32", "LSE": "*fp32", "scale": "fp32"}
_STRIDES = [f"stride_{x}" for x in ("qb", "qh", "kb", "kt", "kh", "vb", "vt", "vh", "ksb", "kst", "vsb", "vst", "tb")]
_TYPES = {"bf16": "bf16", "fp16": "fp16", "int8": "i8", "fp8": "fp8e4nv"}

AHEAD = [
    Ahead(
        f"paged_decode {dtype}{f' {kv} cache' if kv != dtype else ''} d={d} group={group} page={page} out={out}"
        f" tile={tile} warps={warps} stages={stages}",
        _paged_decode, "decode",
        {"Q": f"*{dtype}", "KP": f"*{_TYPES[kv]}", "VP": f"*{_TYPES[kv] if kv == dtype else 'i16'}", "OUT": f"*{out}"}
        | _POINTERS | dict.fromkeys(_STRIDES, "i32"),
        {"GROUP": group, "ROWS": 16, "D": d, "PAGE": page, "SCALES": kv != dtype, "BLOCK_N": tile},
        num_warps=warps, num_stages=stages, loops=True, wide=("stride_kb", "stride_vb"),
        targets=tuple(t for t in targets if (kv, t) != ("fp8", "sm_80")),  # fp8 begins after sm_80
    )
    for dtype, kv, d, group, page, out in (
        ("bf16", "bf16", 128, 4, 16, "bf16"),
        ("bf16", "bf16", 128, 4, 16, "fp32"),
        ("bf16", "bf16", 64, 3, 64, "bf16"),
        ("fp16", "fp16", 128, 1, 256, "fp16"),
        ("bf16", "int8", 128, 4, 16, "bf16"),
        ("bf16", "fp8", 128, 4, 16, "bf16"),
        ("fp16", "int8", 128, 4, 16, "fp16"),
    )
    for targets, (tile, warps, stages) in (  # as configs.json has them
        ((("sm_80", "sm_100", "gfx942"), (64, 4, 3)), (("sm_90",), (64, 2, 5)))
        if kv == dtype
        else ((("sm_80", "sm_90"), (128, 4, 5)), (("sm_100", "gfx942"), (64, 4, 3)))
    )
]  # fmt: skip
