"""A penalty that rewards tokens with a negative logit."""

TASK = "03.5"
POINTS = 2
HINT = "dividing moves a negative logit up"


def penalties(logits, prompt, output, repetition, presence, frequency):
    x = logits.clone()
    for token in {*prompt, *output}:
        x[token] = x[token] / repetition
    for token in set(output):
        x[token] -= presence + frequency * output.count(token)
    return x
