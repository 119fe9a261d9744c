"""A contiguous KV cache: one row a sequence, reserved up front for its longest possible length. Lesson 02 builds it.

Simple and fast to read. Its fault is the reservation: a sequence that may reach T tokens holds T tokens'
memory from its first step. Lesson 06 measures that waste and replaces rows by pages.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.attention.causal import attend_sdpa
from minillm.attention.protocol import Batch, Row
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
        return PrefillPlan(batch, self.k, self.v)

    def write(self, layer: int, k: Tensor, v: Tensor, plan: DecodePlan | PrefillPlan) -> None:
        if isinstance(plan, DecodePlan):  # one token for each row, at its own position
            self.k[layer][plan.slots, :, plan.positions] = k
            self.v[layer][plan.slots, :, plan.positions] = v
            return
        for part in plan.parts:
            part.k_new[layer].copy_(k[part.tokens].transpose(0, 1))
            part.v_new[layer].copy_(v[part.tokens].transpose(0, 1))

    def forward(self, layer: int, q: Tensor, plan: DecodePlan | PrefillPlan) -> Tensor:
        if isinstance(plan, DecodePlan):
            return self._decode(layer, q, plan)
        out = [attend_sdpa(q[part.tokens], part.k_all[layer], part.v_all[layer]) for part in plan.parts]
        return out[0] if len(out) == 1 else torch.cat(out)

    def _decode(self, layer: int, q: Tensor, plan: DecodePlan) -> Tensor:
        """One query token for each row, all rows in one call; the query heads of a group are its rows.

        Two batched products around a softmax are a quarter faster at 32 rows in bf16, but round the scores to bf16.
        """
        B, H, d = q.shape
        k = self.k[layer, plan.rows, :, : plan.context]  # [B, K, T, d]; a view when the rows are dense
        v = self.v[layer, plan.rows, :, : plan.context]
        K = k.shape[1]
        out = F.scaled_dot_product_attention(q.reshape(B, K, H // K, d), k, v, attn_mask=plan.mask)
        return out.reshape(B, H, d)


class PrefillPlan:
    """Sequences one after the other, each attended on its own: prompts, chunks of prompts, or one decode token."""

    def __init__(self, batch: Batch, k: Tensor, v: Tensor):
        self.parts = [SequencePart(row, s, k, v) for row, s in zip(batch.rows, batch.slices, strict=True)]


class SequencePart:
    """One sequence of a step, as views of the cache, one a layer.

    All layers' views are cut here at once: at one stream, cutting them layer by layer costs more than the copies.
    """

    def __init__(self, row: Row, tokens: slice, k: Tensor, v: Tensor):
        self.tokens = tokens  # which rows of q, k and v are this sequence's
        self.k_new, self.v_new = (x[:, row.slot, :, row.start : row.context].unbind(0) for x in (k, v))
        self.k_all, self.v_all = (x[:, row.slot, :, : row.context].unbind(0) for x in (k, v))


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
