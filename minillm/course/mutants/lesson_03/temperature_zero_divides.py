"""Greedy is forgotten: 0 / 0 for the best token."""

TASK = "03.2"
POINTS = 3
HINT = "do not divide by 0"


def tempered(logits, temperature):
    x = logits.float()
    return ((x - x.max()) / temperature).softmax(-1)
