"""exp of the scores as they are."""

import torch

TASK = "05.2"
POINTS = 2
HINT = "or it overflows"


def fold(m, l, acc, scores, v):
    m_new = torch.maximum(m, scores.max(-1).values)
    rescale = torch.ones_like(m)
    p = scores.exp()
    return (m_new, l * rescale + p.sum(-1), acc * rescale[:, None] + p @ v)
