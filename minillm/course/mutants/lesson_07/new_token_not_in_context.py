"""The context without the new token."""

import torch

TASK = "07.4"
POINTS = 1
HINT = "the context counts the new token"


def fill(token_ids, positions, slots, context_lens, block_tables, rows, block_size):
    for buffer, padding in ((token_ids, 0), (positions, 0), (slots, -1), (context_lens, 0), (block_tables, 0)):
        buffer.fill_(padding)
    for i, (token, position, table) in enumerate(rows):
        token_ids[i], positions[i], context_lens[i] = token, position, position
        slots[i] = table[position // block_size] * block_size + position % block_size
        block_tables[i, : len(table)] = torch.tensor(table, dtype=torch.int32)
