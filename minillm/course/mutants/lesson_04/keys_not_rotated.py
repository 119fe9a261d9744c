"""Keys are stored as they came."""

import torch
import triton
import triton.language as tl
from minillm.kernels import jit

TASK = "04.5"
POINTS = 0
HINT = "keys are rotated, too"


@jit
def _rope_kv(QKV, COS, SIN, POS, SLOTS, Q, K_POOL, V_POOL, by_token, by_head, T, H, K, HALF, BLOCK: tl.constexpr):
    token, head, i = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    inside = i < HALF
    position, slot = tl.load(POS + token), tl.load(SLOTS + token)
    c = tl.load(COS + position * T + i, mask=inside, other=0.0)
    s = tl.load(SIN + position * T + i, mask=inside, other=0.0)
    at = QKV + token * by_token + head * by_head + i
    x, y = tl.load(at, mask=inside, other=0.0), tl.load(at + HALF, mask=inside, other=0.0)
    first, second = x * c - y * s, y * c + x * s
    is_query, is_value = head < H, head >= H + K
    out = Q + (token * H + head) * 2 * HALF + i
    tl.store(out, first, mask=inside & is_query)
    tl.store(out + HALF, second, mask=inside & is_query)
    is_key = (head >= H) & (head < H + K) & (slot >= 0)
    page = (slot * K + head - H) * 2 * HALF + i
    tl.store(K_POOL + page, x, mask=inside & is_key)
    tl.store(K_POOL + page + HALF, y, mask=inside & is_key)
    page = (slot * K + head - H - K) * 2 * HALF + i
    tl.store(V_POOL + page, x, mask=inside & is_value & (slot >= 0))
    tl.store(V_POOL + page + HALF, y, mask=inside & is_value & (slot >= 0))


def rope_kv_write(
    qkv,
    cos,
    sin,
    positions,
    slots,
    k_pool,
    v_pool,
    num_heads,
):
    tokens, heads, d = qkv.shape
    q = torch.empty(tokens, num_heads, d)
    _rope_kv[(tokens, heads)](
        qkv,
        cos,
        sin,
        positions,
        slots,
        q,
        k_pool,
        v_pool,
        qkv.stride(0),
        qkv.stride(1),
        cos.stride(0),
        num_heads,
        k_pool.shape[2],
        d // 2,
        BLOCK=triton.next_power_of_2(d // 2),
    )
    return q
