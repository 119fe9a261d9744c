"""The names are bound to new tensors; the buffers stay as they were."""

import torch

TASK = "07.4"
POINTS = 0
HINT = "the buffers themselves must change"


def fill(token_ids, positions, slots, context_lens, block_tables, rows, block_size):
    token_ids = torch.tensor([t for t, _, _ in rows])
    positions = torch.tensor([p for _, p, _ in rows])
    slots = torch.tensor([b[p // block_size] * block_size + p % block_size for _, p, b in rows])
    return token_ids, positions, slots, positions + 1
