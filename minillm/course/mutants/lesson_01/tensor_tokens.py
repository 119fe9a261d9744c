"""Tokens left inside tensors."""

TASK = "01.6"
POINTS = 0
HINT = "the tokens are not plain ints"


def generate(model, prompt, max_new_tokens, eos_id):
    new = []
    while len(new) < max_new_tokens:
        new.append(model([int(t) for t in prompt + new])[-1].argmax())
        if new[-1] == eos_id:
            break
    return new
