"""The tile's maximum stands for all."""

TASK = "05.2"
POINTS = 5
HINT = "larger of the old one"


def fold(m, l, acc, scores, v):
    m_new = scores.max(-1).values
    top = m_new.masked_fill(m_new == float("-inf"), 0.0)
    rescale = (m - top).exp()
    p = (scores - top[:, None]).exp()
    return (m_new, l * rescale + p.sum(-1), acc * rescale[:, None] + p @ v)
