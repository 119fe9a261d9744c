"""RoPE position reset: every chunk of the prompt begins at 0."""

TASK = "02.4"
POINTS = 3.5
HINT = "the second chunk starts where"


def generate(model, prompt, max_new_tokens, eos_id, chunk):
    for start in range(0, len(prompt), chunk):
        logits = model(prompt[start : start + chunk], 0)
    cached = len(prompt)
    new = [int(logits[-1].argmax())]
    while len(new) < max_new_tokens and new[-1] != eos_id:
        logits = model([new[-1]], cached)
        cached += 1
        new.append(int(logits[-1].argmax()))
    return new
