"""The end token is cut off the result."""

TASK = "01.6"
POINTS = 2.5
HINT = "the end token belongs to the output"


def generate(model, prompt, max_new_tokens, eos_id):
    new = []
    while len(new) < max_new_tokens:
        new.append(int(model(prompt + new)[-1].argmax()))
        if new[-1] == eos_id:
            return new[:-1]
    return new
