"""The cache read as it was before the step."""

import torch

TASK = "02.3"
POINTS = 0
HINT = "not start"


def attend(q, k_cache, v_cache, start):
    _, heads, dim = q.shape
    group = heads // k_cache.shape[0]
    k = k_cache[:, :start].repeat_interleave(group, dim=0)
    v = v_cache[:, :start].repeat_interleave(group, dim=0)
    weights = (torch.einsum("nhd,htd->hnt", q, k) / dim**0.5).softmax(-1)
    return torch.einsum("hnt,htd->nhd", weights, v)
