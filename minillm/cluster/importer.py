"""KV into a decode engine: pieces from the wire into reserved blocks, whatever their size. Lesson 15.

A pool of one process takes a piece where it belongs at once. One that is spread over ranks (lesson 14) is written in
whole blocks, for which the pieces of all layers are needed, so they wait here until the last has come.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.cache.pool import KVPool
from minillm.cluster.layout import KVLayout, blocks_from_pieces


def checksum(tensors: Sequence[Tensor]) -> int:
    """CRC-32 over the bytes of CPU tensors, one after the other."""
    value = 0
    for t in tensors:
        flat = t.contiguous().view(-1)
        value = zlib.crc32(flat.view(torch.uint8).numpy().data, value)
    return value


def fits(tensors: Sequence[Tensor], count: int, layout: KVLayout) -> bool:
    """Whether these are the tensors of a piece of `count` tokens in a layout."""
    return [(t.dtype, tuple(t.shape)) for t in tensors] == [(d, (count, *shape)) for d, shape in layout.piece]


class Importer:
    """Of one request. The blocks are given at each call, for a reservation may have ended since the last."""

    def __init__(self, pool: Any, num_layers: int):
        self.pool = pool
        self._pieces: list[list[Sequence[Tensor]]] = [[] for _ in range(num_layers)]

    def write(self, ids: Sequence[int], layer: int, start: int, tensors: Sequence[Tensor]) -> None:
        """The next tokens of a layer. Raises MinillmError if they do not fit."""
        if isinstance(self.pool, KVPool):
            self.pool.write_tokens(layer, ids, start, tensors)
        else:
            self._pieces[layer].append(tensors)

    def finish(self, ids: Sequence[int]) -> None:
        """All layers are complete."""
        if isinstance(self.pool, KVPool):
            return
        whole = [[torch.cat(list(parts)) for parts in zip(*pieces, strict=True)] for pieces in self._pieces]
        blocks = blocks_from_pieces(whole, self.pool.block_size)
        self.pool.write_blocks(ids[: len(blocks)], blocks)
        self._pieces = []
