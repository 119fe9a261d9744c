"""A contiguous KV cache: one row a sequence, reserved up front for its longest possible length. Lesson 02 builds it.

Simple and fast to read. Its fault is the reservation: a sequence that may reach T tokens holds T tokens'
memory from its first step. Lesson 06 measures that waste and replaces rows by pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.attention.causal import attend_sdpa
from minillm.attention.protocol import Batch
from minillm.config import ModelConfig


def kv_bytes(config: ModelConfig, tokens: int, itemsize: int) -> int:
    """2 L T K d b: keys and values, layers, tokens, KV heads, head_dim, bytes per element."""
    return 2 * config.num_layers * tokens * config.num_kv_heads * config.head_dim * itemsize


class ContiguousKVCache:
    """K and V of `num_rows` sequences, [L, rows, K, length, d] each, and the attention that reads them.

    Rows are handed out densely: sequences occupy rows 0 .. n-1, so that a decode step reads one slice.
    Memory starts as zeros: a masked slot then weighs exactly 0, never 0 * NaN.
    """

    def __init__(
        self, config: ModelConfig, num_rows: int, length: int, dtype: torch.dtype, device: str | torch.device = "cpu"
    ):
        shape = (config.num_layers, num_rows, config.num_kv_heads, length, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.num_rows, self.length = num_rows, length

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a sequence of `length` tokens into another row: how the rows stay dense when one leaves."""
        self.k[:, target, :, :length] = self.k[:, source, :, :length]
        self.v[:, target, :, :length] = self.v[:, source, :, :length]

    # The attention backend ------------------------------------------------------------------------

    def plan(self, batch: Batch) -> DecodePlan | PrefillPlan:
        for row in batch.rows:
            if row.context > self.length:
                raise ValueError(f"row {row.slot} would hold {row.context} tokens, but only {self.length} are reserved")
        if len(batch.rows) > 1 and all(row.num_new == 1 for row in batch.rows):
            return DecodePlan(batch, self.k.dtype)
        return PrefillPlan(batch)

    def write(self, layer: int, k: Tensor, v: Tensor, plan: DecodePlan | PrefillPlan) -> None:
        if isinstance(plan, DecodePlan):  # one token for each row, at its own position
            self.k[layer][plan.slots, :, plan.positions] = k
            self.v[layer][plan.slots, :, plan.positions] = v
            return
        for (slot, start, n), s in zip(plan.rows, plan.slices, strict=True):
            self.k[layer, slot, :, start : start + n] = k[s].transpose(0, 1)
            self.v[layer, slot, :, start : start + n] = v[s].transpose(0, 1)

    def forward(self, layer: int, q: Tensor, plan: DecodePlan | PrefillPlan) -> Tensor:
        if isinstance(plan, DecodePlan):
            return self._decode(layer, q, plan)
        parts = [
            attend_sdpa(q[s], self.k[layer, row.slot, :, : row.context], self.v[layer, row.slot, :, : row.context])
            for row, s in zip(plan.rows, plan.slices, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, layer: int, q: Tensor, plan: DecodePlan) -> Tensor:
        """One query token for each row: two batched products around a softmax over [rows * K, H/K, T]."""
        B, H, d = q.shape
        k = self.k[layer, plan.rows, :, : plan.context]  # [B, K, T, d]; a view when the rows are dense
        v = self.v[layer, plan.rows, :, : plan.context]
        K, T = k.shape[1], k.shape[2]
        qg = q.reshape(B * K, H // K, d) * d**-0.5
        scores = torch.bmm(qg, k.reshape(B * K, T, d).transpose(1, 2)).view(B, K, H // K, T)
        weights = (scores + plan.mask).softmax(-1, dtype=torch.float32).to(q.dtype)
        return torch.bmm(weights.view(B * K, H // K, T), v.reshape(B * K, T, d)).view(B, H, d)


class PrefillPlan:
    """Sequences one after the other, each attended on its own."""

    def __init__(self, batch: Batch):
        self.rows = batch.rows
        ends = (batch.last + 1).tolist()
        self.slices = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


class DecodePlan:
    """One new token for each of several sequences, attended together."""

    def __init__(self, batch: Batch, dtype: torch.dtype):
        device = batch.token_ids.device
        slots = [row.slot for row in batch.rows]
        self.slots = torch.tensor(slots, device=device)
        self.rows: slice | Tensor = slice(0, len(slots)) if slots == list(range(len(slots))) else self.slots
        self.positions = batch.positions
        self.context = max(row.context for row in batch.rows)
        contexts = batch.positions + 1
        hidden = torch.arange(self.context, device=device)[None] >= contexts[:, None]  # [B, T]
        self.mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)[
            :, None, None
        ]
