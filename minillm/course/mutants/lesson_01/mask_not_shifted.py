"""The mask of a whole prompt, used for a chunk."""

import torch

TASK = "01.4"
POINTS = 4
HINT = "shift the mask by S - T"


def attention(q, k, v):
    (tokens, heads, dim), (length, kv_heads, _) = q.shape, k.shape
    k = k.repeat_interleave(heads // kv_heads, 1)
    v = v.repeat_interleave(heads // kv_heads, 1)
    scores = torch.einsum("thd,shd->hts", q, k) / dim**0.5
    visible = torch.ones(tokens, length).tril().bool()
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)
