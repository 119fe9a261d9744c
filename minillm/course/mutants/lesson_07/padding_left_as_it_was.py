"""Rows beyond the batch are not touched."""

import torch

TASK = "07.4"
POINTS = 1
HINT = "somebody's slot is overwritten"


def fill(token_ids, positions, slots, context_lens, block_tables, rows, block_size):
    for i, (token, position, table) in enumerate(rows):
        token_ids[i], positions[i], context_lens[i] = token, position, position + 1
        slots[i] = table[position // block_size] * block_size + position % block_size
        block_tables[i] = 0
        block_tables[i, : len(table)] = torch.tensor(table, dtype=torch.int32)
