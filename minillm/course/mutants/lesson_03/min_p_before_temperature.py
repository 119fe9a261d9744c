"""The ratio of the model's probabilities, whatever the temperature."""

TASK = "03.4"
POINTS = 4
HINT = "temperature comes before the filter"


def min_p(logits, temperature, min_p):
    ratio = (logits - logits.max()).exp()
    return logits.masked_fill(ratio < min_p, float("-inf"))
