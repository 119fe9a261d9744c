"""Padding rows keep slot 0."""

import torch

TASK = "07.4"
POINTS = 1
HINT = "its slot is -1, not 0"


def fill(token_ids, positions, slots, context_lens, block_tables, rows, block_size):
    for buffer, padding in ((token_ids, 0), (positions, 0), (slots, 0), (context_lens, 0), (block_tables, 0)):
        buffer.fill_(padding)
    for i, (token, position, table) in enumerate(rows):
        token_ids[i], positions[i], context_lens[i] = token, position, position + 1
        slots[i] = table[position // block_size] * block_size + position % block_size
        block_tables[i, : len(table)] = torch.tensor(table, dtype=torch.int32)
