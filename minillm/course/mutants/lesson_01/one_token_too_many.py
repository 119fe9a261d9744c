"""The bound is inclusive."""

TASK = "01.6"
POINTS = 1
HINT = "one token too many"


def generate(model, prompt, max_new_tokens, eos_id):
    new = []
    while len(new) <= max_new_tokens:
        new.append(int(model(prompt + new)[-1].argmax()))
        if new[-1] == eos_id:
            break
    return new
