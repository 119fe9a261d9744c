"""Neither sum is repaired."""

import torch

TASK = "05.2"
POINTS = 2
HINT = "l and acc were summed"


def fold(m, l, acc, scores, v):
    m_new = torch.maximum(m, scores.max(-1).values)
    top = m_new.masked_fill(m_new == float("-inf"), 0.0)
    p = (scores - top[:, None]).exp()
    return (m_new, l + p.sum(-1), acc + p @ v)
