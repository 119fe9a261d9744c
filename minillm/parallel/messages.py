"""What rank 0 tells the others before each step: whole numbers in one broadcast. Lesson 14.

Everybody computes exactly these rows in exactly this order, so no rank can be of another opinion. Most steps fit into
one message of `HEAD` numbers; the rest of a longer one follows in a second.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minillm.attention.protocol import Batch, Row
from minillm.parallel.executor import MicroBatch
from minillm.parallel.group import Group

HEAD = 1024  # whole numbers
END, STEP, READ, WRITE = range(4)


def tell(group: Group, numbers: Sequence[int]) -> None:
    """From rank 0 to everybody, between CPUs whatever computes."""
    head = torch.zeros(HEAD, dtype=torch.int64)
    first = numbers[: HEAD - 1]
    head[: len(first) + 1] = torch.tensor([len(numbers), *first], dtype=torch.int64)
    group.broadcast(head)
    if rest := numbers[HEAD - 1 :]:
        group.broadcast(torch.tensor(rest, dtype=torch.int64))


def hear(group: Group) -> list[int]:
    """What rank 0 tells."""
    head: list[int] = group.broadcast(torch.zeros(HEAD, dtype=torch.int64)).tolist()
    count, numbers = head[0], head[1:]
    if count <= len(numbers):
        return numbers[:count]
    rest = torch.zeros(count - len(numbers), dtype=torch.int64)
    return numbers + group.broadcast(rest).tolist()


def encode(micro_batches: Sequence[MicroBatch], tokens: Sequence[Sequence[int]]) -> list[int]:
    """tokens: those of each micro-batch, in the order of its rows."""
    out = [STEP, len(micro_batches)]
    for (batch, ready), ids in zip(micro_batches, tokens, strict=True):
        out += [len(batch.rows), len(ids), len(ready)]
        for row in batch.rows:
            out += [row.start, row.num_new, len(row.blocks), *row.blocks]
        out += [*ids, *ready]
    return out


def decode(numbers: Sequence[int], device: torch.device) -> list[MicroBatch]:
    """The inverse of `encode`, without its first number."""
    at = 1

    def take(n: int) -> list[int]:
        nonlocal at
        at += n
        return list(numbers[at - n : at])

    found = []
    for _ in range(numbers[0]):
        num_rows, num_tokens, num_ready = take(3)
        rows = []
        for i in range(num_rows):
            start, num_new, num_blocks = take(3)
            rows.append(Row(i, start, num_new, take(num_blocks)))
        found.append(MicroBatch(Batch.build(rows, take(num_tokens), device), take(num_ready)))
    return found
