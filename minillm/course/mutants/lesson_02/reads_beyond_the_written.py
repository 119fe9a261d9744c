"""All slots of the row are read."""

import torch

TASK = "02.3"
POINTS = 0
HINT = "reads beyond what is written"


def attend(q, k_cache, v_cache, start):
    _, heads, dim = q.shape
    group = heads // k_cache.shape[0]
    k, v = k_cache.repeat_interleave(group, dim=0), v_cache.repeat_interleave(group, dim=0)
    weights = (torch.einsum("nhd,htd->hnt", q, k) / dim**0.5).softmax(-1)
    return torch.einsum("hnt,htd->nhd", weights, v)
