"""top-p measured on the whole vocabulary although top-k has cut it."""

import torch

TASK = "03.3"
POINTS = 5
HINT = "top-p counts within the k best"


def nucleus(logits, temperature, top_k, top_p):
    values, ids = logits.sort(descending=True, stable=True)
    p = ((values - values[0]) / temperature).softmax(-1)
    if top_k:
        p[top_k:] = 0
    if top_p < 1:
        before = p.cumsum(-1) - p
        p[before >= top_p] = 0
    kept = torch.zeros_like(p)
    kept[ids] = p / p.sum()
    return kept
