"""The naive loop: the right text at the old price."""

TASK = "02.4"
POINTS = 1.5
HINT = "feed only what the cache does not hold"


def generate(model, prompt, max_new_tokens, eos_id, chunk):
    for start in range(0, len(prompt), chunk):
        logits = model(prompt[start : start + chunk], start)
    cached = len(prompt)
    new = [int(logits[-1].argmax())]
    while len(new) < max_new_tokens and new[-1] != eos_id:
        logits = model(prompt + new, 0)
        cached += 1
        new.append(int(logits[-1].argmax()))
    return new
