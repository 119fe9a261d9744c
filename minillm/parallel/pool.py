"""The KV of a model that is spread over ranks, as one pool: each block whole again. Lesson 14.

A tier, a prefix cache on disk or another engine need a block with all its layers and heads, whoever holds them. So rank
0 asks every rank for its part of a block, and joins them: the payload is the same as that of one process, whatever the
grid. What stays in the pool never moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.cache.pool import BlockLayout, KVPool
from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.parallel import messages
from minillm.parallel.group import Group
from minillm.parallel.shard import Place, kv_heads, owns_kv, stage_layers
from minillm.parallel.turn import Turns


class ShardedPool:
    """Rank 0's view of all ranks' pools: `KVPool`'s num_blocks, block_size, read_blocks and write_blocks."""

    def __init__(self, pool: KVPool, config: ModelConfig, world: Group, place: Place, turns: Turns):
        """config: of the whole model. pool: rank 0's own."""
        self.pool, self.config, self.world, self.place, self.turns = pool, config, world, place, turns
        self.num_blocks, self.block_size, self.dtype = pool.num_blocks, pool.block_size, pool.dtype

    @property
    def block_layout(self) -> BlockLayout:
        """dtype and shape of each tensor of a whole block's payload: as if one rank had everything."""
        c = self.config
        return tuple(
            (dtype, (c.num_layers, self.block_size, c.num_kv_heads, *shape[3:]))
            for dtype, shape in self.pool.block_layout
        )

    def _parts(self) -> list[tuple[Place, slice, slice]]:
        """Who holds which layers and heads; of replicas, the first."""
        places = [Place.of_rank(r, self.place.tp, self.place.pp) for r in range(self.place.world)]
        parts = []
        for p in places:
            layers = stage_layers(self.config.num_layers, p.pp, p.stage)
            heads = kv_heads(self.config, p)
            parts.append((p, slice(layers.start, layers.stop), slice(heads.start, heads.stop)))
        return parts

    def read_blocks(self, ids: Sequence[int]) -> list[list[Tensor]]:
        if not ids:
            return []
        self.pool._check_ids(ids)  # before anybody is told
        with self.turns():
            return self._read(ids)

    def _read(self, ids: Sequence[int]) -> list[list[Tensor]]:
        messages.tell(self.world, [messages.READ, *ids])
        whole = [torch.empty((len(ids), *shape), dtype=dtype) for dtype, shape in self.block_layout]
        for p, layers, heads in self._parts():
            if not owns_kv(self.config, p):
                continue
            own = stacked(self.pool, ids) if p.rank == 0 else None
            for n, tensor in enumerate(whole):
                part = tensor[:, layers, :, heads]
                if own is not None:
                    part.copy_(own[n])
                else:
                    part.copy_(self.world.recv(torch.empty(part.shape, dtype=part.dtype), p.rank))
        return [[tensor[i] for tensor in whole] for i in range(len(ids))]

    def write_blocks(self, ids: Sequence[int], payloads: Sequence[Sequence[Tensor]]) -> None:
        if len(ids) != len(payloads) or len(set(ids)) != len(ids):
            raise MinillmError(f"{len(payloads)} payloads for the blocks {list(ids)!r:.80}: each block needs its own")
        self.pool._check_ids(ids)
        for payload in payloads:
            if (given := tuple((t.dtype, tuple(t.shape)) for t in payload)) != self.block_layout:
                raise MinillmError(f"this is no block of this pool: {given}, the pool has {self.block_layout}")
        if not ids:
            return
        whole = [torch.stack(list(parts)) for parts in zip(*payloads, strict=True)]
        with self.turns():
            self._write(ids, whole)

    def _write(self, ids: Sequence[int], whole: Sequence[Tensor]) -> None:
        messages.tell(self.world, [messages.WRITE, *ids])
        for p, layers, heads in self._parts():
            cut = [tensor[:, layers, :, heads].contiguous() for tensor in whole]
            if p.rank == 0:
                unstack(self.pool, ids, cut)
            else:
                for tensor in cut:
                    self.world.send(tensor, p.rank)


def stacked(pool: KVPool, ids: Sequence[int]) -> list[Tensor]:
    """`read_blocks` with the blocks along the first dimension: a tensor for k, v and the scales there are."""
    return [torch.stack(list(parts)) for parts in zip(*pool.read_blocks(ids), strict=True)]


def unstack(pool: KVPool, ids: Sequence[int], tensors: Sequence[Tensor]) -> None:
    pool.write_blocks(ids, [[t[i] for t in tensors] for i in range(len(ids))])


def obey(numbers: Sequence[int], pool: KVPool, config: ModelConfig, world: Group, place: Place) -> None:
    """A worker's side of a READ or WRITE of rank 0. config: of the whole model."""
    kind, ids = numbers[0], list(numbers[1:])
    if kind == messages.READ:
        if owns_kv(config, place):
            for tensor in stacked(pool, ids):
                world.send(tensor, 0)
        return
    tensors = []
    for dtype, shape in pool.block_layout:
        tensors.append(world.recv(torch.empty((len(ids), *shape), dtype=dtype), 0))
    unstack(pool, ids, tensors)
