"""The whole text instead of the new tokens."""

TASK = "01.6"
POINTS = 0
HINT = "without the prompt"


def generate(model, prompt, max_new_tokens, eos_id):
    new = []
    while len(new) < max_new_tokens:
        new.append(int(model(prompt + new)[-1].argmax()))
        if new[-1] == eos_id:
            break
    return prompt + new
