"""Where there are fewer KV heads than ranks, their rows are shared out."""

from __future__ import annotations

import torch
from torch import Tensor

TASK = "14.2"
POINTS = 4
HINT = "each rank holds a whole one, not some of its rows"


def shard_qkv(w: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, rank: int, size: int) -> Tensor:
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        raise ValueError("heads do not divide")
    q, k, v = w.split((num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim))
    part = lambda t: t[rank * len(t) // size : (rank + 1) * len(t) // size]
    return torch.cat([part(q), part(k), part(v)])
