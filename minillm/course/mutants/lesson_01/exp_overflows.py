"""Softmax written out without subtracting the maximum."""

import torch

TASK = "01.4"
POINTS = 5
HINT = "subtract the maximum"


def attention(q, k, v):
    (tokens, heads, dim), (length, kv_heads, _) = q.shape, k.shape
    k = k.repeat_interleave(heads // kv_heads, 1)
    v = v.repeat_interleave(heads // kv_heads, 1)
    scores = torch.einsum("thd,shd->hts", q, k) / dim**0.5
    visible = torch.ones(tokens, length).tril(length - tokens).bool()
    e = scores.exp() * visible
    weights = e / e.sum(-1, keepdim=True)
    return torch.einsum("hts,shd->thd", weights, v)
