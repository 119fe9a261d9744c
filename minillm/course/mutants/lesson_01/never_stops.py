"""eos_id is ignored."""

TASK = "01.6"
POINTS = 2.5
HINT = "stop when eos_id comes up"


def generate(model, prompt, max_new_tokens, eos_id):
    new = []
    while len(new) < max_new_tokens:
        new.append(int(model(prompt + new)[-1].argmax()))
    return new
