"""A strict mask: the first token sees nothing and becomes NaN."""

import torch

TASK = "01.4"
POINTS = 0
HINT = "numbers are NaN"


def attention(q, k, v):
    (tokens, heads, dim), (length, kv_heads, _) = q.shape, k.shape
    k = k.repeat_interleave(heads // kv_heads, 1)
    v = v.repeat_interleave(heads // kv_heads, 1)
    scores = torch.einsum("thd,shd->hts", q, k) / dim**0.5
    visible = torch.ones(tokens, length).tril(length - tokens - 1).bool()
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)
