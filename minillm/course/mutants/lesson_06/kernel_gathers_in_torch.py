"""The pages are copied into order by torch, and the kernel reads the copy."""

import torch
import triton.language as tl
from minillm.kernels import jit

TASK = "06.5"
POINTS = 0
HINT = "bytes that torch prepared"


@jit
def _decode(
    Q, KP, VP, TABLES, LENS, OUT, scale, max_blocks,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    # Q and OUT [B, KV_HEADS * GROUP, D], KP and VP [num_blocks, PAGE, KV_HEADS, D], TABLES [B, max_blocks], LENS [B]
    b, kv = tl.program_id(0), tl.program_id(1)
    row, d, slot = tl.arange(0, 16), tl.arange(0, D), tl.arange(0, PAGE)
    context = tl.load(LENS + b)
    head = (b * KV_HEADS + kv) * GROUP + row
    mine = row[:, None] < GROUP
    q = tl.load(Q + head[:, None] * D + d[None, :], mask=mine, other=0.0)
    top = tl.full([16], -float("inf"), tl.float32)
    weight = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    for i in range(tl.cdiv(context, PAGE)):
        block = tl.load(TABLES + b * max_blocks + i).to(tl.int64)
        inside = i * PAGE + slot < context
        at = ((block * PAGE + slot) * KV_HEADS + kv)[:, None] * D + d[None, :]
        k = tl.load(KP + at, mask=inside[:, None], other=0.0)
        v = tl.load(VP + at, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shrink = tl.exp(top - new_top)
        p = tl.exp(scores - new_top[:, None])
        weight = weight * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None] + tl.dot(p, v, input_precision="ieee")
        top = new_top
    tl.store(OUT + head[:, None] * D + d[None, :], acc / weight[:, None], mask=mine)


def paged_decode(q, k_pool, v_pool, block_tables, context_lens):
    (B, H, d), (_, page, K, _) = q.shape, k_pool.shape
    out = torch.empty(B, H, d, dtype=q.dtype)
    k_pool, v_pool = k_pool.clone(), v_pool.clone()
    _decode[(B, K)](
        q, k_pool, v_pool, block_tables, context_lens, out, d**-0.5, block_tables.shape[1],
        KV_HEADS=K, GROUP=H // K, D=d, PAGE=page,
    )  # fmt: skip
    return out
