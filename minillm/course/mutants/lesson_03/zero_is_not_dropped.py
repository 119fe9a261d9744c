"""Dropped tokens get the logit 0, which is a fair chance."""

TASK = "03.4"
POINTS = 0
HINT = "0 is a logit like any other"


def min_p(logits, temperature, min_p):
    ratio = ((logits - logits.max()) / temperature).exp()
    return logits * (ratio >= min_p)
