"""Repetition looks at the output only."""

TASK = "03.5"
POINTS = 2
HINT = "repetition sees the prompt too"


def penalties(logits, prompt, output, repetition, presence, frequency):
    x = logits.clone()
    for token in set(output):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(output):
        x[token] -= presence + frequency * output.count(token)
    return x
