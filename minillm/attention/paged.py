"""Attention over a paged KV cache in plain torch: two backends that gather first. Lesson 06 builds it.

`PagedReference` gathers tokens and attends each sequence the textbook way in fp32: the oracle. `PagedSDPA` gathers
blocks for torch's fused kernel: the fast path of a CPU. `attention/triton.py` is the third, and does not gather at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minillm.attention.causal import attend
from minillm.attention.paged_step import Blocks, Step, as_bytes
from minillm.attention.protocol import Batch, Row
from minillm.cache.pool import KVPool, dequantize_kv, quantize_kv


def block_table(rows: Sequence[Row], device: str | torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """[len(rows), longest table]; short tables are padded with block 0."""
    longest = max(len(row.blocks) for row in rows)
    table = np.zeros((len(rows), longest), dtype=np.int64)  # row by row: lists of lists take thrice as long
    for i, row in enumerate(rows):
        table[i, : len(row.blocks)] = row.blocks
    return torch.from_numpy(table).to(device=device, dtype=dtype)


def slots(table: Tensor, block_size: int) -> Tensor:
    """The slot of each token, in order: block * block_size + offset. table [..., n] -> [..., n * block_size]."""
    offsets = torch.arange(block_size, device=table.device)
    return (table.unsqueeze(-1) * block_size + offsets).flatten(-2)


def write_slots(pool: KVPool, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Put keys and values [N, K, d] into their slots [N], quantised where the pool is. All slots must be real ones."""
    for stored, scales, x in ((pool.k, pool.k_scale, k), (pool.v, pool.v_scale, v)):
        if scales is not None:
            x, scale = quantize_kv(x, stored.dtype)
            scales[layer].flatten(0, 1)[slots] = scale
            stored, x = stored.view(torch.uint8), x.view(torch.uint8)  # torch cannot index fp8
        stored[layer].flatten(0, 1)[slots] = x


def check_table(row: Row, block_size: int) -> None:
    """Raise ValueError unless the row's block table is long enough for its tokens."""
    if row.context > len(row.blocks) * block_size:
        raise ValueError(
            f"a sequence of {row.context} tokens needs {-(-row.context // block_size)} blocks of {block_size}, "
            f"its block table has {len(row.blocks)}"
        )


@dataclass
class GatherPlan:
    """Where new tokens are written, [N] slots, and which slots each sequence reads."""

    new_slots: Tensor
    parts: list[slice]  # which of the step's tokens are a sequence's own
    contexts: list[Tensor]  # [T] slots of each sequence, in order


class PagedAttention:
    """What backends that gather tokens share: where tokens are written, and what is read back."""

    def __init__(self, pool: KVPool):
        self.pool = pool

    def plan(self, batch: Batch) -> GatherPlan:
        for row in batch.rows:
            check_table(row, self.pool.block_size)
        device = batch.token_ids.device
        table = slots(block_table(batch.rows, device), self.pool.block_size)  # [rows, T]: the slot of each token
        contexts = [table[i, : row.context] for i, row in enumerate(batch.rows)]
        new = torch.cat([own[row.start :] for own, row in zip(contexts, batch.rows, strict=True)])
        return GatherPlan(new, batch.slices, contexts)

    def write(self, layer: int, k: Tensor, v: Tensor, plan: GatherPlan) -> None:
        write_slots(self.pool, layer, k, v, plan.new_slots)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values in the model's dtype: slots [T] -> [K, T, d], [B, T] -> [B, K, T, d]."""
        return self._gather(self.pool.k, self.pool.k_scale, layer, slots), self._gather(
            self.pool.v, self.pool.v_scale, layer, slots
        )

    def _gather(self, pool: Tensor, scales: Tensor | None, layer: int, slots: Tensor) -> Tensor:
        flat = pool[layer].flatten(0, 1)  # [slots, K, d]
        x = flat.view(torch.uint8) if scales is not None else flat
        x = x.index_select(0, slots.flatten())
        if scales is not None:
            scale = scales[layer].flatten(0, 1).index_select(0, slots.flatten())
            x = dequantize_kv(x.view(pool.dtype), scale, self.pool.dtype)
        return x.view(*slots.shape, *x.shape[1:]).transpose(-3, -2)


class PagedReference(PagedAttention):
    """Each sequence on its own, scores in fp32, the whole matrix written: slow, and the others' oracle."""

    def forward(self, layer: int, q: Tensor, plan: GatherPlan) -> Tensor:
        return torch.cat([attend(q[s], *self.read(layer, t)) for s, t in zip(plan.parts, plan.contexts, strict=True)])


class PagedSDPA(PagedAttention):
    """torch's fused attention over gathered blocks, in few calls whatever the step is made of: see `Step`."""

    def __init__(self, pool: KVPool):
        super().__init__(pool)
        self.blocks = Blocks(pool)
        self._slots = [x.flatten(1, 2).unbind(0) for x in (pool.k, pool.v)]  # of each layer, [slots, K, d]

    def plan(self, batch: Batch) -> Step:  # type: ignore[override]
        for row in batch.rows:
            check_table(row, self.pool.block_size)
        return Step(self.blocks, batch)

    def write(self, layer: int, k: Tensor, v: Tensor, plan: Step) -> None:  # type: ignore[override]
        pool = self.pool
        if plan.begun is not None:
            for x in (pool.k, pool.v, pool.k_scale, pool.v_scale):
                if x is not None:
                    as_bytes(x)[layer].index_fill_(0, plan.begun, 0)
        if pool.quantized:
            write_slots(pool, layer, k, v, plan.new_slots)
        else:
            for stored, x in zip(self._slots, (k, v), strict=True):
                stored[layer].index_copy_(0, plan.new_slots, x)
        self._new = k, v  # a prompt from its first token on is attended without reading the pool

    def forward(self, layer: int, q: Tensor, plan: Step) -> Tensor:
        k, v = self._new
        if plan.single:
            return plan.groups[0].forward(layer, q) if plan.groups else plan.chunks[0].forward(layer, q, k, v)
        out = q.new_empty(q.shape)
        for group in plan.groups:
            out.index_copy_(0, group.tokens, group.forward(layer, q.index_select(0, group.tokens)))
        for chunk in plan.chunks:
            out[chunk.tokens] = chunk.forward(layer, q, k, v)
        return out
