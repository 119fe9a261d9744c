"""eos_id is ignored."""

TASK = "02.4"
POINTS = 5.5
HINT = "stop when eos_id comes up"


def generate(model, prompt, max_new_tokens, eos_id, chunk):
    for start in range(0, len(prompt), chunk):
        logits = model(prompt[start : start + chunk], start)
    cached = len(prompt)
    new = [int(logits[-1].argmax())]
    while len(new) < max_new_tokens:
        logits = model([new[-1]], cached)
        cached += 1
        new.append(int(logits[-1].argmax()))
    return new
