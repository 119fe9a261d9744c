"""acc keeps the old maximum."""

import torch

TASK = "05.2"
POINTS = 2
HINT = "multiply it by exp(m - m_new)"


def fold(m, l, acc, scores, v):
    m_new = torch.maximum(m, scores.max(-1).values)
    top = m_new.masked_fill(m_new == float("-inf"), 0.0)
    rescale = (m - top).exp()
    p = (scores - top[:, None]).exp()
    return (m_new, l * rescale + p.sum(-1), acc + p @ v)
