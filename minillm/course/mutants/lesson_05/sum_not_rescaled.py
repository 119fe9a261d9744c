"""l keeps the old maximum."""

import torch

TASK = "05.2"
POINTS = 2
HINT = "l was summed with the old maximum"


def fold(m, l, acc, scores, v):
    m_new = torch.maximum(m, scores.max(-1).values)
    top = m_new.masked_fill(m_new == float("-inf"), 0.0)
    rescale = (m - top).exp()
    p = (scores - top[:, None]).exp()
    return (m_new, l + p.sum(-1), acc * rescale[:, None] + p @ v)
