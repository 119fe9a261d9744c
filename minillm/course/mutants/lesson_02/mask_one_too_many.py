"""A mask off by one: each token sees the next. Decode hides it."""

import torch

TASK = "02.3"
POINTS = 2
HINT = "one key too many"


def attend(q, k_cache, v_cache, start):
    n, heads, dim = q.shape
    total = start + n
    group = heads // k_cache.shape[0]
    k = k_cache[:, :total].repeat_interleave(group, dim=0)
    v = v_cache[:, :total].repeat_interleave(group, dim=0)
    scores = torch.einsum("nhd,htd->hnt", q, k) / dim**0.5
    visible = torch.ones(n, total).tril(start + 1).bool()
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hnt,htd->nhd", weights, v)
