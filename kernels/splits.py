"""In how many parts one sequence's keys and values are read at once. Lesson 06 builds it.

A decode step has B * K independent programs, one a sequence and KV head. One long conversation then keeps 8 of 132
multiprocessors busy. FlashDecoding (Dao, Haziza, Massa, Sizov, 2023) cuts the sequence as well. The count of parts
follows from shapes alone, so that a captured graph stays valid; where a part begins is computed on the device.
"""

from __future__ import annotations

import functools

import torch

WAVES = 2  # programs for each multiprocessor: while one waits for memory or has ended, the other reads
SHORTEST = 256  # tokens; a shorter part costs more to start and to merge than it saves
MOST = 128  # parts; one program merges them all


def split_count(programs: int, max_context: int, multiprocessors: int) -> int:
    """Parts for each of `programs` (sequences times KV heads) of at most max_context tokens: 1 to MOST.

    Enough to give every multiprocessor WAVES programs, but none shorter than SHORTEST tokens.
    """
    wanted = -(-WAVES * multiprocessors // max(1, programs))
    return max(1, min(wanted, max_context // SHORTEST, MOST))


def split_range(context: int, split: int, splits: int, tile: int) -> tuple[int, int]:
    """(first, end) token of part `split` of `splits`, as the kernel computes it: whole tiles, dealt in order.

    The last parts may be empty: first == end.
    """
    tiles = -(-context // tile)
    each = -(-tiles // splits) * tile
    return min(split * each, context), min((split + 1) * each, context)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at the same time at least. On a CPU they run one after the other: 1."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
