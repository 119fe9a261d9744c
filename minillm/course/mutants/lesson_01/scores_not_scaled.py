"""The division by sqrt(D) is missing; only scores that saturate the softmax hide it."""

import torch

TASK = "01.4"
POINTS = 1
HINT = "divide the scores by sqrt(D)"


def attention(q, k, v):
    (tokens, heads, _), (length, kv_heads, _) = q.shape, k.shape
    k = k.repeat_interleave(heads // kv_heads, 1)
    v = v.repeat_interleave(heads // kv_heads, 1)
    scores = torch.einsum("thd,shd->hts", q, k)
    visible = torch.ones(tokens, length).tril(length - tokens).bool()
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)
