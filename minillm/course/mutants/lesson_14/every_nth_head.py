"""Rank r gets the heads r, r + size, ..."""

from __future__ import annotations

import torch
from torch import Tensor

TASK = "14.2"
POINTS = 2
HINT = "heads one after the other"


def shard_qkv(w: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, rank: int, size: int) -> Tensor:
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        raise ValueError(f"{num_heads} query heads and {num_kv_heads} KV heads do not divide over {size} ranks")
    q, k, v = w.split([num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim])
    turns = lambda t: t.view(-1, head_dim, w.shape[1])[rank::size].flatten(0, 1)
    if num_kv_heads % size:
        first = rank * num_kv_heads // size * head_dim
        return torch.cat([turns(q), k[first : first + head_dim], v[first : first + head_dim]])
    return torch.cat([turns(q), turns(k), turns(v)])
