"""The division in the dtype of the logits."""

import torch

TASK = "03.2"
POINTS = 3
HINT = "convert to float32 before dividing"


def tempered(logits, temperature):
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).float()
    x = logits / temperature
    return (x - x.max()).softmax(-1).float()
