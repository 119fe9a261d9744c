"""torch's own generator: the draw depends on what was drawn before."""

import torch

TASK = "03.6"
POINTS = 0
HINT = "must not change because another joins or leaves"

GENERATOR = torch.Generator().manual_seed(0)


def draw(probabilities, seeds, positions, uniform):
    return torch.multinomial(probabilities, 1, generator=GENERATOR).flatten().tolist()
