"""Padding rows have a context of one."""

import torch

TASK = "07.4"
POINTS = 1
HINT = "it reads nothing"


def fill(token_ids, positions, slots, context_lens, block_tables, rows, block_size):
    for buffer, padding in ((token_ids, 0), (positions, 0), (slots, -1), (context_lens, 1), (block_tables, 0)):
        buffer.fill_(padding)
    for i, (token, position, table) in enumerate(rows):
        token_ids[i], positions[i], context_lens[i] = token, position, position + 1
        slots[i] = table[position // block_size] * block_size + position % block_size
        block_tables[i, : len(table)] = torch.tensor(table, dtype=torch.int32)
