"""The cut at start + n taken for a mask: tokens of a chunk see later ones."""

import torch

TASK = "02.3"
POINTS = 2
HINT = "must not see the new tokens after it"


def attend(q, k_cache, v_cache, start):
    n, heads, dim = q.shape
    total = start + n
    group = heads // k_cache.shape[0]
    k = k_cache[:, :total].repeat_interleave(group, dim=0)
    v = v_cache[:, :total].repeat_interleave(group, dim=0)
    scores = torch.einsum("nhd,htd->hnt", q, k) / dim**0.5
    visible = torch.ones(n, total).bool()
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hnt,htd->nhd", weights, v)
