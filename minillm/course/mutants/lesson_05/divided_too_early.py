"""acc is divided in every step."""

import torch

TASK = "05.2"
POINTS = 0
HINT = "do not divide yet"


def fold(m, l, acc, scores, v):
    m_new = torch.maximum(m, scores.max(-1).values)
    top = m_new.masked_fill(m_new == float("-inf"), 0.0)
    rescale = (m - top).exp()
    p = (scores - top[:, None]).exp()
    l = l * rescale + p.sum(-1)
    return (m_new, l, (acc * rescale[:, None] + p @ v) / l[:, None])
