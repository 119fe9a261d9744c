"""A row that saw nothing becomes NaN."""

import torch

TASK = "05.2"
POINTS = 7
HINT = "needs a finite number to subtract"


def fold(m, l, acc, scores, v):
    m_new = torch.maximum(m, scores.max(-1).values)
    top = m_new
    rescale = (m - top).exp()
    p = (scores - top[:, None]).exp()
    return (m_new, l * rescale + p.sum(-1), acc * rescale[:, None] + p @ v)
