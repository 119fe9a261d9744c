"""Presence and frequency punish the words of the question."""

TASK = "03.5"
POINTS = 3
HINT = "count generated tokens only"


def penalties(logits, prompt, output, repetition, presence, frequency):
    x = logits.clone()
    for token in {*prompt, *output}:
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    text = prompt + output
    for token in set(text):
        x[token] -= presence + frequency * text.count(token)
    return x
