"""The mask of a whole prompt, used after a cached part."""

import torch

TASK = "02.3"
POINTS = 1
HINT = "the mask is not shifted"


def attend(q, k_cache, v_cache, start):
    n, heads, dim = q.shape
    total = start + n
    group = heads // k_cache.shape[0]
    k = k_cache[:, :total].repeat_interleave(group, dim=0)
    v = v_cache[:, :total].repeat_interleave(group, dim=0)
    scores = torch.einsum("nhd,htd->hnt", q, k) / dim**0.5
    visible = torch.ones(n, total).tril().bool()
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hnt,htd->nhd", weights, v)
