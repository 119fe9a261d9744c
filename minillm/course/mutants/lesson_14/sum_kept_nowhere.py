"""The sum gets a name of its own, and the chunk stays as it was."""

import torch

TASK = "14.4"
POINTS = 0.5
HINT = "the sum is kept nowhere"


def ring_all_reduce(group, x):
    n, r, N = x.numel(), group.rank, group.size
    flat = x.reshape(-1).clone()
    parts = [flat[i * n // N : (i + 1) * n // N] for i in range(N)]
    to, source = (r + 1) % N, (r - 1) % N
    for step in range(N - 1):
        group.send(parts[(r - step) % N], to)
        mine = parts[(r - step - 1) % N]
        mine = mine + group.recv(torch.empty_like(mine), source)
    for step in range(N - 1):
        group.send(parts[(r + 1 - step) % N], to)
        got = parts[(r - step) % N]
        got.copy_(group.recv(torch.empty_like(got), source))
    return flat.view(x.shape)
