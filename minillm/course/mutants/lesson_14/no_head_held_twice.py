"""Fewer KV heads than ranks are refused."""

from __future__ import annotations

import torch
from torch import Tensor

TASK = "14.2"
POINTS = 4
HINT = "4 ranks, 2 KV heads: fits"


def shard_qkv(w: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, rank: int, size: int) -> Tensor:
    if num_heads % size or num_kv_heads % size:
        raise ValueError("heads do not divide")
    q, k, v = w.split((num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim))
    return torch.cat([part.chunk(size)[rank] for part in (q, k, v)])
