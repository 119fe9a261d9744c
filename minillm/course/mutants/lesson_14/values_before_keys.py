"""q, v, k."""

from __future__ import annotations

import torch
from torch import Tensor

TASK = "14.2"
POINTS = 2
HINT = "q, then k, then v"


def shard_qkv(w: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, rank: int, size: int) -> Tensor:
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        raise ValueError(f"{num_heads} query heads and {num_kv_heads} KV heads do not divide over {size} ranks")
    q, k, v = w.split([num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim])
    heads, kv = num_heads // size, max(1, num_kv_heads // size)
    first = rank * heads // (num_heads // num_kv_heads)
    rows = slice(first * head_dim, (first + kv) * head_dim)
    return torch.cat([q[rank * heads * head_dim : (rank + 1) * heads * head_dim], v[rows], k[rows]])
