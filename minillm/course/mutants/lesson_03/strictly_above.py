"""At min_p 1 not even the best token stays."""

TASK = "03.4"
POINTS = 4
HINT = "a token exactly at the threshold stays"


def min_p(logits, temperature, min_p):
    ratio = ((logits - logits.max()) / temperature).exp()
    return logits.masked_fill(ratio <= min_p, float("-inf"))
