"""KV heads repeated as a block: query head h reads h mod H_kv."""

import torch

TASK = "01.4"
POINTS = 3
HINT = "repeat_interleave, not repeat"


def attention(q, k, v):
    (tokens, heads, dim), (length, kv_heads, _) = q.shape, k.shape
    k = k.repeat(1, heads // kv_heads, 1)
    v = v.repeat(1, heads // kv_heads, 1)
    scores = torch.einsum("thd,shd->hts", q, k) / dim**0.5
    visible = torch.ones(tokens, length).tril(length - tokens).bool()
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)
