"""RoPE and the KV write in one pass: new keys are rotated on their way into pages. Lesson 04 builds it.

In plain torch a new token's heads are read and written to rotate them, then keys and values are read and written
again to store them. Here a program takes a few heads of one token, be they queries, keys or values: it reads them
once, rotates in registers, and stores a key twice, in its page for later steps and beside the queries for this step's
own attention. A slot says where a token lives: block * block_size + offset; -1 is padding and is never written.
A pool passes 2^31 elements soon, so offsets into it have 64 bits. Quantised pools: see kv_quant.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from minillm.kernels.ahead import Ahead
from minillm.kernels.checks import expect, expect_whole
from minillm.kernels.configs import pick
from minillm.kernels.kv_quant import LARGEST, expect_pool_dtype, quantize_heads, quantize_kv
from minillm.kernels.triton_private import jit
from torch import Tensor

from minillm.errors import MinillmError


def rope_kv_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor,
    num_heads: int, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `rope_kv_write`, in plain torch and in qkv's dtype, float64 for an oracle (RoPE; Su et al., 2021)."""
    qk, v = qkv.split(((qkv.shape[1] + num_heads) // 2, (qkv.shape[1] - num_heads) // 2), dim=1)
    first, second = qk.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    q, k = (qk * cos[positions].unsqueeze(1) + turned * sin[positions].unsqueeze(1)).split(
        (num_heads, v.shape[1]), dim=1
    )
    for x, pool, scale in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
        real = slots[slots >= 0]
        at = (real // pool.shape[1], real % pool.shape[1])
        if scale is None:
            pool[at] = x[slots >= 0].to(pool.dtype)
        else:
            pool[at], scale[at] = quantize_kv(x[slots >= 0], pool.dtype)
    return q, k


def rope_kv_tiled(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor,
    num_heads: int, k_scale: Tensor | None = None, v_scale: Tensor | None = None, block_heads: int = 8,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the kernel does, a program (token, block of heads) at a time, with its roundings, in eager torch."""
    tokens, heads, d = qkv.shape
    kv_heads = (heads - num_heads) // 2
    q, k = qkv.new_empty(tokens, num_heads, d), qkv.new_empty(tokens, kv_heads, d)
    for token in range(tokens):
        slot = int(slots[token])
        c, s = (table[positions[token], : d // 2].float() for table in (cos, sin))
        for start in range(0, heads, block_heads):
            first, second = qkv[token, start : start + block_heads].float().chunk(2, dim=-1)
            turned = torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(qkv.dtype)
            for head in range(start, min(start + block_heads, heads)):
                is_value = head >= num_heads + kv_heads
                kv = head - num_heads - (kv_heads if is_value else 0)
                x = qkv[token, head] if is_value else turned[head - start]
                if head < num_heads:
                    q[token, head] = x
                    continue
                if not is_value:
                    k[token, kv] = x
                pool, scale = (v_pool, v_scale) if is_value else (k_pool, k_scale)
                at = (slot // pool.shape[1], slot % pool.shape[1], kv)
                if slot >= 0 and scale is not None:
                    pool[at], scale[at] = quantize_kv(x, pool.dtype)
                elif slot >= 0:
                    pool[at] = x
    return q, k


def rope_kv_bytes(
    tokens: int, written: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int,
    table_itemsize: int, pool_itemsize: int, quantised: bool = False, block_heads: int = 8,
) -> tuple[int, int]:  # fmt: skip
    """(loaded, stored) bytes of a launch on `tokens` tokens, `written` of them not padding.

    A token's angles, position and slot are asked for by each of its programs; a cache answers all but the first.
    """
    heads = num_heads + 2 * num_kv_heads
    programs = -(-heads // block_heads)
    loaded = tokens * (heads * head_dim * itemsize + programs * (head_dim * table_itemsize + 16))
    rotated = tokens * (num_heads + num_kv_heads) * head_dim * itemsize
    return loaded, rotated + written * num_kv_heads * 2 * (head_dim * pool_itemsize + (4 if quantised else 0))


@jit
def _rope_kv(
    QKV, COS, SIN, POSITIONS, SLOTS, Q, K, K_POOL, V_POOL, K_SCALE, V_SCALE, num_heads, kv_heads,
    qkv_token, qkv_head, table_row, pool_block, pool_slot, pool_head, scale_block, scale_slot, scale_head,
    HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)  # 64 bits: an index times a stride may pass 2^31 elements
    head = tl.program_id(1).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, BLOCK_HALF)
    is_query = head < num_heads
    is_value = head >= num_heads + kv_heads
    is_key = (head >= num_heads) & (head < num_heads + kv_heads)
    inside = (head < num_heads + 2 * kv_heads)[:, None] & (pair < HALF)[None, :]

    position = tl.load(POSITIONS + token)
    slot = tl.load(SLOTS + token)
    cos = tl.load(COS + position * table_row + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(SIN + position * table_row + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
    at = QKV + token * qkv_token + head[:, None] * qkv_head + pair[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    first = tl.where(is_value[:, None], x, x * cos - y * sin).to(Q.dtype.element_ty)
    second = tl.where(is_value[:, None], y, y * cos + x * sin).to(Q.dtype.element_ty)

    out = Q + (token * num_heads + head[:, None]) * (2 * HALF) + pair[None, :]
    tl.store(out, first, mask=inside & is_query[:, None])
    tl.store(out + HALF, second, mask=inside & is_query[:, None])
    kv = head - num_heads - tl.where(is_value, kv_heads, 0)
    out = K + (token * kv_heads + kv[:, None]) * (2 * HALF) + pair[None, :]
    tl.store(out, first, mask=inside & is_key[:, None])
    tl.store(out + HALF, second, mask=inside & is_key[:, None])

    real = slot >= 0
    is_key, is_value = is_key & real, is_value & (head < num_heads + 2 * kv_heads) & real
    block = slot // BLOCK_SIZE
    place = slot % BLOCK_SIZE
    page = block * pool_block + place * pool_slot + kv[:, None] * pool_head + pair[None, :]
    if LARGEST:  # of the rounded key, the one that this step's attention reads
        first, second, scale = quantize_heads(first.to(tl.float32), second.to(tl.float32), LARGEST)
        scales = block * scale_block + place * scale_slot + kv * scale_head
        tl.store(K_SCALE + scales, scale, mask=is_key)
        tl.store(V_SCALE + scales, scale, mask=is_value)
    first, second = first.to(K_POOL.dtype.element_ty), second.to(K_POOL.dtype.element_ty)
    tl.store(K_POOL + page, first, mask=inside & is_key[:, None])
    tl.store(K_POOL + page + HALF, second, mask=inside & is_key[:, None])
    tl.store(V_POOL + page, first, mask=inside & is_value[:, None])
    tl.store(V_POOL + page + HALF, second, mask=inside & is_value[:, None])


def rope_kv_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor,
    num_heads: int, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate the queries and keys of N new tokens, and write keys and values into their pages.

    qkv               [N, H + 2 K, d] fp16, bf16 (GPU only) or fp32: H = num_heads query heads, then keys, then values
    cos, sin          [T, d] of `rope_table`. Only the first d/2 columns are read: the others repeat them
    positions         [N] int64, 0 to T - 1, of padding tokens too
    slots             [N] int64, block * block_size + offset, no two the same; -1 for padding, whose pages stay as
                      they are
    k_pool, v_pool    [num_blocks, block_size, K, d], of the same strides; changed. qkv's dtype, or int8 or
                      float8_e4m3fn with scales
    k_scale, v_scale  [num_blocks, block_size, K] fp32, of the same strides; changed. None: not quantised

    Returns q [N, H, d] and k [N, K, d], rotated, in qkv's dtype. Products and sums are fp32, rounded once.
    Raises MinillmError for wrong shapes, dtypes or strides; for positions and slots outside their tables only on a
    CPU, since looking at them would make a GPU wait.
    """
    tokens, heads, d = _expect(qkv, cos, sin, positions, slots, k_pool, v_pool, num_heads, k_scale, v_scale)
    kv_heads = (heads - num_heads) // 2
    q = torch.empty((tokens, num_heads, d), dtype=qkv.dtype, device=qkv.device)
    k = torch.empty((tokens, kv_heads, d), dtype=qkv.dtype, device=qkv.device)
    if tokens:
        scales = (k_pool, v_pool) if k_scale is None else (k_scale, v_scale)  # pointers that are not followed
        config = pick("rope_kv", qkv.device, heads=heads)
        _rope_kv[(tokens, triton.cdiv(heads, config["BLOCK_HEADS"]))](
            qkv, cos, sin, positions, slots, q, k, k_pool, v_pool, *scales, num_heads, kv_heads,
            qkv.stride(0), qkv.stride(1), cos.stride(0), *k_pool.stride()[:3],
            *((0, 0, 0) if k_scale is None else k_scale.stride()),
            HALF=d // 2, BLOCK_SIZE=k_pool.shape[1], LARGEST=0 if k_scale is None else int(LARGEST[k_pool.dtype]),
            BLOCK_HALF=triton.next_power_of_2(d // 2), **config,
        )  # fmt: skip
    return q, k


def _expect(qkv, cos, sin, positions, slots, k_pool, v_pool, num_heads, k_scale, v_scale) -> tuple[int, int, int]:
    expect("qkv", qkv, ("tokens", "heads", "head_dim"))
    tokens, heads, d = qkv.shape
    expect_whole("num_heads", num_heads, 1, heads - 2)
    kv_heads = (heads - num_heads) // 2
    if (heads - num_heads) % 2 or num_heads % kv_heads or d % 2 or not 2 <= d <= 512:
        raise MinillmError(
            f"qkv must hold {num_heads} query heads, then as many keys as values, a divisor of {num_heads}, each an "
            f"even number up to 512 wide; got {heads} heads, {d} wide"
        )
    expect("k_pool", k_pool, ("blocks", "block_size", kv_heads, d), (qkv.dtype, *LARGEST), like=qkv)
    expect("v_pool", v_pool, k_pool.shape, (k_pool.dtype,), like=qkv)
    blocks, block_size = k_pool.shape[:2]
    if block_size != triton.next_power_of_2(block_size):
        raise MinillmError(f"k_pool's block_size must be a power of two, got {block_size}")
    if (k_scale is None) != (v_scale is None) or (k_scale is None) != (k_pool.dtype == qkv.dtype):
        raise MinillmError("pools of int8 or float8_e4m3fn need both k_scale and v_scale, and other pools neither")
    if k_scale is not None:
        expect_pool_dtype(k_pool.dtype, qkv.device)
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            expect(name, scale, k_pool.shape[:3], (torch.float32,), like=qkv, last_stride=False)
    for name, one, other in (("pool", k_pool, v_pool), ("scale", k_scale, v_scale)):
        if one is not None and one.stride() != other.stride():
            raise MinillmError(
                f"k_{name} and v_{name} must have the same strides, as halves of one allocation have; got "
                f"{one.stride()} and {other.stride()}"
            )
    expect("cos", cos, ("positions", d), like=qkv)
    expect("sin", sin, cos.shape, (cos.dtype,), like=qkv)
    if cos.stride() != sin.stride():
        raise MinillmError(f"cos and sin must have the same strides, got {cos.stride()} and {sin.stride()}")
    for name, ids, low, high in (
        ("positions", positions, 0, len(cos) - 1),
        ("slots", slots, -1, blocks * block_size - 1),
    ):
        expect(name, ids, (tokens,), (torch.int64,), like=qkv)
        if ids.device.type == "cpu" and tokens and not low <= int(ids.min()) <= int(ids.max()) <= high:
            raise MinillmError(f"{name} must be {low} to {high}, got {int(ids.min())} to {int(ids.max())}")
    return tokens, heads, d


def _ahead(dtype: str, pool: str, d: int, quantised: int = 0, heads: int = 32) -> Ahead:
    pointers = dict.fromkeys(("QKV", "COS", "SIN", "Q", "K"), f"*{dtype}") | {"POSITIONS": "*i64", "SLOTS": "*i64"}
    pools = dict.fromkeys(("K_POOL", "V_POOL"), f"*{pool}") | dict.fromkeys(("K_SCALE", "V_SCALE"), "*fp32")
    integers = dict.fromkeys(
        ("num_heads", "kv_heads", "qkv_token", "qkv_head", "table_row", "pool_block", "pool_slot", "pool_head",
         "scale_block", "scale_slot", "scale_head"), "i32",
    )  # fmt: skip
    constants = {"HALF": d // 2, "BLOCK_SIZE": 16, "LARGEST": quantised, "BLOCK_HEADS": 8, "BLOCK_HALF": d // 2}
    targets = ("sm_90", "sm_100", "gfx942") if pool == "fp8e4nv" else ("sm_80", "sm_90", "sm_100", "gfx942")
    return Ahead(
        f"rope_kv {dtype} pool={pool} d={d} heads={heads}", _rope_kv, "elementwise", pointers | pools | integers,
        constants, num_warps=1, num_stages=1, targets=targets, wide=("pool_block",),
        by_target={target: pick("rope_kv", target, heads=heads) for target in targets},
    )  # fmt: skip


AHEAD = [
    _ahead("bf16", "bf16", 64),
    _ahead("bf16", "bf16", 128),
    _ahead("bf16", "bf16", 128, heads=48),
    _ahead("fp16", "fp16", 128),
    _ahead("bf16", "i8", 128, 127),
    _ahead("bf16", "fp8e4nv", 128, 448),
]
