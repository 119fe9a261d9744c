"""The loop of a cached engine, without a cache."""

TASK = "01.6"
POINTS = 0.5
HINT = "feed the whole text at every step"


def generate(model, prompt, max_new_tokens, eos_id):
    new = []
    while len(new) < max_new_tokens:
        new.append(int(model((prompt + new)[-1:] if new else prompt)[-1].argmax()))
        if new[-1] == eos_id:
            break
    return new
