"""What is left does not sum to 1."""

import torch

TASK = "03.3"
POINTS = 0
HINT = "must sum to 1 again"


def nucleus(logits, temperature, top_k, top_p):
    values, ids = logits.sort(descending=True, stable=True)
    p = ((values - values[0]) / temperature).softmax(-1)
    if top_k:
        p[top_k:] = 0
    if top_p < 1:
        before = p.cumsum(-1) - p
        p[before >= top_p * p.sum()] = 0
    kept = torch.zeros_like(p)
    kept[ids] = p
    return kept
