"""The caller's logits are overwritten."""

TASK = "03.5"
POINTS = 0
HINT = "work on a new tensor"


def penalties(logits, prompt, output, repetition, presence, frequency):
    x = logits
    for token in {*prompt, *output}:
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(output):
        x[token] -= presence + frequency * output.count(token)
    return x
