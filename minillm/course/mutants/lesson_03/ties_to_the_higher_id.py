"""A flipped ascending sort: among equals the higher id comes first."""

import torch

TASK = "03.3"
POINTS = 5
HINT = "among equals the lower id stays"


def nucleus(logits, temperature, top_k, top_p):
    values, ids = (x.flip(0) for x in logits.sort(stable=True))
    p = ((values - values[0]) / temperature).softmax(-1)
    if top_k:
        p[top_k:] = 0
    if top_p < 1:
        before = p.cumsum(-1) - p
        p[before >= top_p * p.sum()] = 0
    kept = torch.zeros_like(p)
    kept[ids] = p / p.sum()
    return kept
