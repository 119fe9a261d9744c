"""Probabilities divided by the temperature and normalised again: nothing happens."""

import torch

TASK = "03.2"
POINTS = 2
HINT = "the temperature is missing"


def tempered(logits, temperature):
    x = logits.float()
    if temperature == 0:
        return torch.nn.functional.one_hot(x.argmax(), len(x)).float()
    p = x.softmax(-1) / temperature
    return p / p.sum()
