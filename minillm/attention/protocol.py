"""What one step computes, and what an attention backend must do with it.

A `Batch` is plain data: the new tokens of some sequences, one after the other. A sequence whose whole
prompt is new and one that adds a single token differ only in `num_new`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Row(NamedTuple):
    """The part of one sequence that a step computes: `num_new` tokens after `start` that are already computed."""

    slot: int  # of a contiguous cache: the row where the sequence's KV lives
    start: int  # tokens whose KV exists
    num_new: int  # tokens to compute now
    blocks: Sequence[int] = ()  # of a paged cache: the sequence's block table, enough for `context` tokens

    @property
    def context(self) -> int:
        """Tokens visible to the last new one, itself included."""
        return self.start + self.num_new


@dataclass
class Batch:
    """One step: N = sum of num_new tokens."""

    rows: list[Row]
    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64
    last: Tensor  # [len(rows)] int64: index of each sequence's last token, whose logits give the next one

    @classmethod
    def build(cls, rows: list[Row], token_ids: list[int], device: str | torch.device = "cpu") -> Batch:
        positions = [p for row in rows for p in range(row.start, row.context)]
        last, end = [], 0
        for row in rows:
            end += row.num_new
            last.append(end - 1)
        table = torch.tensor([token_ids, positions], dtype=torch.int64).to(device)
        return cls(rows, table[0], table[1], torch.tensor(last, dtype=torch.int64, device=device))

    @property
    def slices(self) -> list[slice]:
        """Which of the step's tokens are each sequence's own."""
        ends = (self.last + 1).tolist()
        return [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


class AttentionBackend(Protocol):
    """Called by the transformer: `plan` once a step, then for each layer `write` and `forward`.

    A backend may fuse the rotation with the write. It then has a method `rope_write(layer, qkv, cos, sin, positions,
    plan) -> q`, and `write` is not called: qkv [N, H + 2 K, d] not rotated, cos and sin the tables [positions, d],
    positions [N]; q [N, H, d] rotated (lesson 04).
    """

    def plan(self, batch: Batch) -> Any:
        """Whatever `write` and `forward` need that is the same for every layer."""

    def write(self, layer: int, k: Tensor, v: Tensor, plan: Any) -> None:
        """Keep keys and values of the new tokens. k and v [N, K, d], keys already rotated."""

    def forward(self, layer: int, q: Tensor, plan: Any) -> Tensor:
        """Causal attention of the new tokens over all earlier ones. q [N, H, d] -> [N, H, d]."""
