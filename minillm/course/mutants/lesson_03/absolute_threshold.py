"""min-p read as a probability."""

TASK = "03.4"
POINTS = 2
HINT = "a share of the best token's probability"


def min_p(logits, temperature, min_p):
    p = (logits / temperature).softmax(-1)
    return logits.masked_fill(p < min_p, float("-inf"))
