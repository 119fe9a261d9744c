"""The token that crosses the boundary is dropped."""

import torch

TASK = "03.3"
POINTS = 2
HINT = "the token that crosses the boundary stays"


def nucleus(logits, temperature, top_k, top_p):
    values, ids = logits.sort(descending=True, stable=True)
    p = ((values - values[0]) / temperature).softmax(-1)
    if top_k:
        p[top_k:] = 0
    if top_p < 1:
        dropped = p.cumsum(-1) >= top_p * p.sum()
        dropped[0] = False
        p[dropped] = 0
    kept = torch.zeros_like(p)
    kept[ids] = p / p.sum()
    return kept
