"""The rows of the stacked matrix are shared out."""

from __future__ import annotations

from torch import Tensor

TASK = "14.2"
POINTS = 0
HINT = "cut each of the three, not the stack"


def shard_qkv(w: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, rank: int, size: int) -> Tensor:
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        raise ValueError(f"{num_heads} query heads and {num_kv_heads} KV heads do not divide over {size} ranks")
    each = len(w) // size
    return w[rank * each : (rank + 1) * each]
