"""KV heads repeated as a block: query head h reads h mod K."""

import torch

TASK = "02.3"
POINTS = 3
HINT = "repeat_interleave, not repeat"


def attend(q, k_cache, v_cache, start):
    n, heads, dim = q.shape
    total = start + n
    group = heads // k_cache.shape[0]
    k = k_cache[:, :total].repeat(group, 1, 1)
    v = v_cache[:, :total].repeat(group, 1, 1)
    scores = torch.einsum("nhd,htd->hnt", q, k) / dim**0.5
    visible = torch.ones(n, total).tril(start).bool()
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hnt,htd->nhd", weights, v)
