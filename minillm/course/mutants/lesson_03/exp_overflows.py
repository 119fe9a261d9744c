"""Softmax without subtracting the maximum."""

import torch

TASK = "03.2"
POINTS = 2
HINT = "subtract the maximum before exp"


def tempered(logits, temperature):
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).float()
    weights = (logits.float() / temperature).exp()
    return weights / weights.sum()
