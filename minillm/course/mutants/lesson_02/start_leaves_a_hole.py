"""start counts the token that is about to be fed."""

TASK = "02.4"
POINTS = 0.5
HINT = "start off by one: it is the number"


def generate(model, prompt, max_new_tokens, eos_id, chunk):
    for start in range(0, len(prompt), chunk):
        logits = model(prompt[start : start + chunk], start)
    cached = len(prompt) + 1
    new = [int(logits[-1].argmax())]
    while len(new) < max_new_tokens and new[-1] != eos_id:
        logits = model([new[-1]], cached)
        cached += 1
        new.append(int(logits[-1].argmax()))
    return new
