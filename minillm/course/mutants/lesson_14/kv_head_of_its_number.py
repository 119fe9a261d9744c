"""Rank r takes KV head r, and the last ranks none."""

from __future__ import annotations

import torch
from torch import Tensor

TASK = "14.2"
POINTS = 4
HINT = "there is no KV head number `rank`"


def shard_qkv(w: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, rank: int, size: int) -> Tensor:
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        raise ValueError("heads do not divide")
    q, k, v = w.split((num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim))
    heads, kv = num_heads // size * head_dim, max(1, num_kv_heads // size) * head_dim
    mine = slice(rank * kv, (rank + 1) * kv)
    return torch.cat([q[rank * heads : (rank + 1) * heads], k[mine], v[mine]])
