"""exp(m_new - m) instead of exp(m - m_new)."""

import torch

TASK = "05.2"
POINTS = 1
HINT = "upside down"


def fold(m, l, acc, scores, v):
    m_new = torch.maximum(m, scores.max(-1).values)
    top = m_new.masked_fill(m_new == float("-inf"), 0.0)
    rescale = (top - m).exp()
    p = (scores - top[:, None]).exp()
    return (m_new, l * rescale + p.sum(-1), acc * rescale[:, None] + p @ v)
