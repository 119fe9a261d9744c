"""Query heads that do not divide are rounded down."""

import torch

TASK = "14.2"
POINTS = 8
HINT = "6 query heads on 4 ranks leave 2 to nobody"


def shard_qkv(w, num_heads, num_kv_heads, head_dim, rank, size):
    if num_kv_heads % size and size % num_kv_heads:
        raise ValueError("heads do not divide")
    q, k, v = w.split([num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim])
    n = num_heads // size
    first = rank * n
    group = num_heads // num_kv_heads
    lo, hi = first // group, (first + n - 1) // group + 1
    rows = lambda t, a, b: t[a * head_dim : b * head_dim]
    return torch.cat([rows(q, first, first + n), rows(k, lo, hi), rows(v, lo, hi)])
