"""Attention over a paged KV cache in plain torch: two backends that gather the tokens first. Lesson 06 builds it.

`PagedReference` attends each sequence the textbook way in fp32: the oracle. `PagedSDPA` gives the gathered tokens to
torch's fused kernel: the fast path of a CPU. `attention/triton.py` is the third, and does not gather at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.attention.causal import attend, attend_sdpa
from minillm.attention.protocol import Batch, Row
from minillm.cache.pool import KVPool, dequantize_kv, quantize_kv


def block_table(rows: Sequence[Row], device: str | torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """[len(rows), longest table]; short tables are padded with block 0."""
    longest = max(len(row.blocks) for row in rows)
    padded = [[*row.blocks, *[0] * (longest - len(row.blocks))] for row in rows]
    return torch.tensor(padded, dtype=dtype).to(device)


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
    decode: Tensor | None = None  # [B, T] the same, padded with slot 0, when each of several rows has one new token
    mask: Tensor | None = None  # [B, 1, 1, T] added to the scores


class PagedAttention:
    """What both backends share: where tokens are written, and what is read back."""

    def __init__(self, pool: KVPool):
        self.pool = pool

    def plan(self, batch: Batch) -> GatherPlan:
        for row in batch.rows:
            check_table(row, self.pool.block_size)
        device = batch.token_ids.device
        table = slots(block_table(batch.rows, device), self.pool.block_size)  # [rows, T]: the slot of each token
        contexts = [table[i, : row.context] for i, row in enumerate(batch.rows)]
        new = torch.cat([own[row.start :] for own, row in zip(contexts, batch.rows, strict=True)])
        plan = GatherPlan(new, batch.slices, contexts)
        if len(batch.rows) > 1 and all(row.num_new == 1 for row in batch.rows):
            lengths = torch.tensor([row.context for row in batch.rows], device=device)
            longest = max(row.context for row in batch.rows)
            hidden = torch.arange(longest, device=device)[None] >= lengths[:, None]
            plan.decode = table[:, :longest].masked_fill(hidden, 0)  # slot 0 is padding and holds zeros
            mask = torch.zeros(hidden.shape, dtype=self.pool.dtype, device=device).masked_fill_(hidden, -torch.inf)
            plan.mask = mask[:, None, None]
        return plan

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
    """torch's fused attention over gathered tokens. One decode token for each of several rows: one call for all."""

    def forward(self, layer: int, q: Tensor, plan: GatherPlan) -> Tensor:
        if plan.decode is not None:
            B, H, d = q.shape
            k, v = self.read(layer, plan.decode)
            K = k.shape[1]
            return F.scaled_dot_product_attention(q.reshape(B, K, H // K, d), k, v, attn_mask=plan.mask).reshape(
                B, H, d
            )
        out = [attend_sdpa(q[s], *self.read(layer, t)) for s, t in zip(plan.parts, plan.contexts, strict=True)]
        return out[0] if len(out) == 1 else torch.cat(out)
