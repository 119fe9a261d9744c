"""The whole prompt at once."""

TASK = "02.4"
POINTS = 3.5
HINT = "in pieces of at most"


def generate(model, prompt, max_new_tokens, eos_id, chunk):
    logits = model(prompt, 0)
    cached = len(prompt)
    new = [int(logits[-1].argmax())]
    while len(new) < max_new_tokens and new[-1] != eos_id:
        logits = model([new[-1]], cached)
        cached += 1
        new.append(int(logits[-1].argmax()))
    return new
