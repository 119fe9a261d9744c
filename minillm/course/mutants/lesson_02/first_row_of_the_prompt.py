"""The first token predicted from the prompt's first row."""

TASK = "02.4"
POINTS = 0
HINT = "row -1"


def generate(model, prompt, max_new_tokens, eos_id, chunk):
    for start in range(0, len(prompt), chunk):
        logits = model(prompt[start : start + chunk], start)
    cached = len(prompt)
    new = [int(logits[0].argmax())]
    while len(new) < max_new_tokens and new[-1] != eos_id:
        logits = model([new[-1]], cached)
        cached += 1
        new.append(int(logits[-1].argmax()))
    return new
