"""The caller's prompt list is extended in place."""

TASK = "01.6"
POINTS = 0
HINT = "changed its input in place (argument 2)"


def generate(model, prompt, max_new_tokens, eos_id):
    length = len(prompt)
    while len(prompt) - length < max_new_tokens:
        prompt.append(int(model(prompt)[-1].argmax()))
        if prompt[-1] == eos_id:
            break
    return prompt[length:]
