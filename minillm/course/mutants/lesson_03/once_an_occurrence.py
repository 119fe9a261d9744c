"""The repetition penalty compounds with every occurrence."""

TASK = "03.5"
POINTS = 4
HINT = "repetition applies once"


def penalties(logits, prompt, output, repetition, presence, frequency):
    x = logits.clone()
    for token in [*prompt, *output]:
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(output):
        x[token] -= presence + frequency * output.count(token)
    return x
