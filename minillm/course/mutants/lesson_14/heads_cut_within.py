"""Each rank gets a part of every head."""

from __future__ import annotations

import torch
from torch import Tensor

TASK = "14.2"
POINTS = 0
HINT = "a rank with a part of each head can compute no score"


def shard_qkv(w: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, rank: int, size: int) -> Tensor:
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        raise ValueError(f"{num_heads} query heads and {num_kv_heads} KV heads do not divide over {size} ranks")
    return torch.cat([head.chunk(size)[rank] for head in w.split(head_dim)])
