"""One step more than needed: its logits are thrown away."""

TASK = "02.4"
POINTS = 1
HINT = "nobody reads the answer"


def generate(model, prompt, max_new_tokens, eos_id, chunk):
    for start in range(0, len(prompt), chunk):
        logits = model(prompt[start : start + chunk], start)
    new = []
    while len(new) < max_new_tokens and eos_id not in new:
        new.append(int(logits[-1].argmax()))
        logits = model([new[-1]], len(prompt) + len(new) - 1)
    return new
