"""In how many parts one sequence's keys and values are read at once. Lesson 06 builds it.

A decode step has B * K independent programs, one a sequence and KV head. One long conversation then keeps 8 of 132
multiprocessors busy. FlashDecoding (Dao, Haziza, Massa, Sizov, 2023) cuts the sequence as well. The count of parts
follows from shapes alone, so that a captured graph stays valid; where a part begins is computed on the device.
"""

from __future__ import annotations

import functools

import torch

LEAST = 1.5  # programs for each multiprocessor: one alone has too few reads under way to fill the memory bus
RESIDENT = 3  # programs that a multiprocessor holds at once: the shared memory of the tiles in configs.json
WAVES = 4  # rounds of resident programs; more parts would only add to the merge
SHORTEST = 256  # tokens; a shorter part costs more to start and to merge than it saves
MOST = 128  # parts; one program merges them all


def split_count(programs: int, max_context: int, multiprocessors: int) -> int:
    """Parts for each of `programs` (sequences times KV heads) of at most max_context tokens: 1 to MOST.

    Enough to give every multiprocessor LEAST programs, but none shorter than SHORTEST tokens. Among those, the
    smallest count that `evenness` hardly improves on: at 512 programs over 396 places a second round runs almost empty.
    """
    longest = max(1, min(max_context // SHORTEST, MOST))
    if multiprocessors == 1 or programs < 1:
        return 1
    enough = [s for s in range(1, longest + 1) if programs * s >= LEAST * multiprocessors]
    if not enough:
        return longest
    few = [s for s in enough if programs * s <= WAVES * RESIDENT * multiprocessors] or enough[:1]
    even = [evenness(programs * s, multiprocessors) for s in few]
    return next(s for s, e in zip(few, even) if e >= 0.95 * max(even))


def evenness(programs: int, multiprocessors: int) -> float:
    """Mean over largest number of programs that a multiprocessor gets: 1 if all end together, all programs alike.

    Programs that are resident together are dealt one multiprocessor at a time; more come in full rounds.
    """
    at_once = multiprocessors if programs <= RESIDENT * multiprocessors else RESIDENT * multiprocessors
    return programs / (at_once * -(-programs // at_once))


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
