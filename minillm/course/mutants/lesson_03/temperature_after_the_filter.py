"""The nucleus of the model's distribution, tempered afterwards."""

import torch

TASK = "03.3"
POINTS = 5
HINT = "temperature comes before the filter"


def nucleus(logits, temperature, top_k, top_p):
    values, ids = logits.sort(descending=True, stable=True)
    p = values.softmax(-1)
    if top_k:
        p[top_k:] = 0
    if top_p < 1:
        before = p.cumsum(-1) - p
        p[before >= top_p * p.sum()] = 0
    kept = torch.zeros_like(p)
    p = torch.where(p > 0, (values / temperature).exp(), 0)
    kept[ids] = p / p.sum()
    return kept
