"""q, k and v are taken for equally large."""

from __future__ import annotations

import torch
from torch import Tensor

TASK = "14.2"
POINTS = 0
HINT = "equal thirds are not q, k and v"


def shard_qkv(w: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, rank: int, size: int) -> Tensor:
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        raise ValueError("heads do not divide")
    return torch.cat([part.chunk(size)[rank] for part in w.chunk(3)])
