"""Lanes compared with lanes."""

import torch
import triton
import triton.language as tl
from minillm.kernels import jit

TASK = "05.5"
POINTS = 2
HINT = "not places inside the tile"


@jit
def _flash(Q, K, V, OUT, scale, n, H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    h, first = tl.program_id(0), tl.program_id(1) * BLOCK
    rows, dims = first + tl.arange(0, BLOCK), tl.arange(0, D)
    at = (rows * H + h)[:, None] * D + dims[None, :]
    q = tl.load(Q + at, mask=(rows < n)[:, None], other=0.0)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, D], tl.float32)
    for start in range(0, tl.minimum(first + BLOCK, n), BLOCK):
        keys = start + tl.arange(0, BLOCK)
        there = (keys * (H // GROUP) + h // GROUP)[:, None] * D + dims[None, :]
        k = tl.load(K + there, mask=(keys < n)[:, None], other=0.0)
        v = tl.load(V + there, mask=(keys < n)[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where((keys - start)[None, :] <= (rows - first)[:, None], scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp(scores - m_new[:, None])
        rescale = tl.exp(m - m_new)
        l = l * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None] + tl.dot(p, v, input_precision="ieee")
        m = m_new
    tl.store(OUT + at, acc / l[:, None], mask=(rows < n)[:, None])


def flash_triton(q, k, v):
    S, H, d = q.shape
    out = torch.empty(q.shape)
    _flash[(H, triton.cdiv(S, 16))](q, k, v, out, d**-0.5, S, H=H, GROUP=H // k.shape[1], D=d, BLOCK=16)
    return out
