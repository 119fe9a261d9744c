"""Unwritten slots masked, not cut off: right until one of them holds NaN."""

import torch

TASK = "02.3"
POINTS = 5
HINT = "0 times NaN is NaN"


def attend(q, k_cache, v_cache, start):
    n, heads, dim = q.shape
    total = k_cache.shape[1]
    group = heads // k_cache.shape[0]
    k = k_cache[:, :total].repeat_interleave(group, dim=0)
    v = v_cache[:, :total].repeat_interleave(group, dim=0)
    scores = torch.einsum("nhd,htd->hnt", q, k) / dim**0.5
    visible = torch.ones(n, total).tril(start).bool()
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hnt,htd->nhd", weights, v)
