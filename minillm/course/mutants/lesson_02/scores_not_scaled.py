"""The scale is missing."""

import torch

TASK = "02.3"
POINTS = 0
HINT = "divide the scores by sqrt(d)"


def attend(q, k_cache, v_cache, start):
    n, heads, _ = q.shape
    total = start + n
    group = heads // k_cache.shape[0]
    k = k_cache[:, :total].repeat_interleave(group, dim=0)
    v = v_cache[:, :total].repeat_interleave(group, dim=0)
    scores = torch.einsum("nhd,htd->hnt", q, k)
    visible = torch.ones(n, total).tril(start).bool()
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hnt,htd->nhd", weights, v)
