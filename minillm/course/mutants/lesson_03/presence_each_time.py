"""Presence counted like frequency, and frequency like presence."""

TASK = "03.5"
POINTS = 3
HINT = "presence is once a token"


def penalties(logits, prompt, output, repetition, presence, frequency):
    x = logits.clone()
    for token in {*prompt, *output}:
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(output):
        x[token] -= presence * output.count(token) + frequency
    return x
