"""All-reduce by hand: a ring of ranks, each speaking only to the next one. Lesson 14 builds this.

Cut x into N chunks. In N - 1 rounds each rank sends one chunk on and adds the one that comes to its own: then rank r
holds the sum of chunk r + 1 (reduce-scatter). In N - 1 more rounds the sums go round (all-gather). A rank sends
2 (N - 1) / N of x whatever N is: that is the bandwidth term of the cost model, and 2 (N - 1) messages are its latency.

The engine calls `group.all_reduce`, where gloo and NCCL do this and better; this one shows what it costs.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.parallel.group import Group


def chunks(count: int, size: int) -> list[tuple[int, int]]:
    """[start, end) of the `size` parts of `count` elements, as even as possible; empty ones where count < size."""
    return [(count * i // size, count * (i + 1) // size) for i in range(size)]


def ring_bytes(nbytes: int, size: int) -> float:
    """Bytes that a rank sends for an x of `nbytes` bytes, where the ranks divide it: 2 (N - 1) / N * nbytes."""
    return 2 * (size - 1) / size * nbytes


def ring_all_reduce(group: Group, x: Tensor) -> Tensor:
    """The sum of x over all ranks, with x's shape and dtype; x itself stays as it is.

    Every rank gets the same bits: each chunk is summed once, along the ring, and then copied. Called by all ranks with
    one shape and dtype. Every rank sends before it receives, so a send must not wait for its receiver: gloo's does not,
    NCCL's does. Raises RankLost when a neighbour is gone.
    """
    total = x.reshape(-1).clone()
    parts = [total[start:end] for start, end in chunks(total.numel(), group.size)]
    to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for step in range(group.size - 1):
        _send(group, parts[(group.rank - step) % group.size], to)
        mine = parts[(group.rank - step - 1) % group.size]
        mine += _recv(group, torch.empty_like(mine), source)
    for step in range(group.size - 1):
        _send(group, parts[(group.rank + 1 - step) % group.size], to)
        _recv(group, parts[(group.rank - step) % group.size], source)
    return total.view(x.shape)


# A send may still read its chunk when it returns. No chunk changes too early all the same: the one sent in a round is
# next written when its sum has come round the ring, so the neighbour has had it long before.
def _send(group: Group, part: Tensor, to: int) -> None:
    if part.numel():  # fewer elements than ranks: both sides know that this chunk is empty
        group.send(part, to)


def _recv(group: Group, part: Tensor, source: int) -> Tensor:
    return group.recv(part, source) if part.numel() else part
