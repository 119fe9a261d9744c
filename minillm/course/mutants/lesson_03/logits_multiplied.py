"""The temperature the wrong way round."""

import torch

TASK = "03.2"
POINTS = 2
HINT = "divide the logits by the temperature"


def tempered(logits, temperature):
    x = logits.float()
    if temperature == 0:
        return torch.nn.functional.one_hot(x.argmax(), len(x)).float()
    return ((x - x.max()) * temperature).softmax(-1)
