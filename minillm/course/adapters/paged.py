"""Attention of exercises 05 and 06 over the engine's pages. Lessons 05 and 06 mount theirs in the same way."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch import Tensor

from minillm.attention.paged import write_slots
from minillm.attention.protocol import Batch
from minillm.cache.pool import KVPool
from minillm.course.answers import Answers
from minillm.errors import MinillmError

FP32 = {"kv_cache": "paged", "dtype": "float32"}  # what the exercises' checks promise


class PagedPart:
    """Writes keys and values into the pages. `attend` and `slot_mapping` are the answers, set by a subclass."""

    attend: Any
    slot_mapping: Any = None  # 06.3; None: the slots are computed here

    def __init__(self, pool: KVPool):
        if pool.quantized or pool.dtype != torch.float32:
            what = f"a {str(pool.k.dtype).removeprefix('torch.')} cache"
            raise MinillmError(f"parts: the attention of exercises 05 and 06 is for dtype='float32', got {what}")
        self.pool = pool

    def plan(self, batch: Batch) -> Any:
        """(row, its tokens in the flat batch) of each sequence, and the slots of the new tokens."""
        rows, size = [(list(r.blocks), r.start, r.num_new) for r in batch.rows], self.pool.block_size
        slots = [table[t // size] * size + t % size for table, start, n in rows for t in range(start, start + n)]
        if self.slot_mapping is not None:
            slots = self._judged(type(self).slot_mapping(rows, size, len(slots)), len(slots))
        return list(zip(batch.rows, batch.slices, strict=True)), torch.tensor(slots, device=self.pool.k.device)

    def write(self, layer: int, k: Tensor, v: Tensor, plan: Any) -> None:
        self.new = k, v
        write_slots(self.pool, layer, k, v, plan[1])

    def _judged(self, slots: Any, count: int) -> list[int]:
        first, end = self.pool.block_size, (self.pool.num_blocks + 1) * self.pool.block_size
        try:
            ids = [operator.index(i) for i in slots]
        except TypeError:
            raise MinillmError(f"parts: slot_mapping must return a list of numbers, got {slots!r:.80}") from None
        if len(set(ids)) != len(ids) or len(ids) != count or not all(first <= i < end for i in ids):
            raise MinillmError(
                f"parts: slot_mapping must return {count} different slots from {first} to {end - 1}, got {ids!r:.80}"
            )
        return ids

    def _where(self) -> Any:
        """Exercises make their tensors without saying where."""
        device = self.pool.k.device
        return contextlib.nullcontext() if device.type == "cpu" else device


def chunks(answers: Answers) -> type[PagedPart]:
    """What `parts["attention"]` takes, around 05.6's attend_chunk."""

    class Chunks(PagedPart):
        attend = staticmethod(answers.take("05.6", 7))

        def forward(self, layer: int, q: Tensor, plan: Any) -> Tensor:
            k, v = self.new
            pools = self.pool.k[layer], self.pool.v[layer]
            with self._where():
                return torch.cat([
                    _like(q[new], "attend_chunk",
                          self.attend(q[new], k[new], v[new], *pools, torch.tensor(row.blocks), row.start))
                    for row, new in plan[0]
                ])  # fmt: skip

    return Chunks


def tokens(answers: Answers) -> type[PagedPart]:
    """What `parts["attention"]` takes, around 06.4's paged_attention: each new token on its own."""

    class Tokens(PagedPart):
        attend = staticmethod(answers.take("06.4", 5))
        slot_mapping = _slots(answers)

        def forward(self, layer: int, q: Tensor, plan: Any) -> Tensor:
            pools = self.pool.k[layer], self.pool.v[layer]
            seen = [(list(row.blocks), t + 1) for row, _ in plan[0] for t in range(row.start, row.context)]
            with self._where():
                return torch.stack([
                    _like(x, "paged_attention", self.attend(x, *pools, table, context))
                    for x, (table, context) in zip(q, seen, strict=True)
                ])  # fmt: skip

    return Tokens


def kernel(answers: Answers) -> type[PagedPart]:
    """What `parts["attention"]` takes, around 06.5's paged_decode. A prompt's token is a row of its own to it."""

    class Kernel(PagedPart):
        attend = staticmethod(answers.take("06.5", 5))
        slot_mapping = _slots(answers)

        def __init__(self, pool: KVPool):
            super().__init__(pool)
            dim = pool.k.shape[-1]
            if dim & (dim - 1) or dim < 16:
                raise MinillmError(f"parts: paged_decode needs heads of a power of two from 16, this model has {dim}")

        def plan(self, batch: Batch) -> Any:
            rows, slots = super().plan(batch)
            width = max(len(row.blocks) for row, _ in rows)
            seen = [(row, t + 1) for row, _ in rows for t in range(row.start, row.context)]
            tables = [[*row.blocks, *[0] * (width - len(row.blocks))] for row, _ in seen]
            place: Any = {"dtype": torch.int32, "device": self.pool.k.device}
            return rows, slots, torch.tensor(tables, **place), torch.tensor([n for _, n in seen], **place)

        def forward(self, layer: int, q: Tensor, plan: Any) -> Tensor:
            with self._where():
                out = self.attend(q.contiguous(), self.pool.k[layer], self.pool.v[layer], *plan[2:])
            return _like(q, "paged_decode", out)

    return Kernel


def _slots(answers: Answers) -> Any:
    return staticmethod(answers.take("06.3", 3)) if answers.has("06.3") else None


def _like(x: Tensor, what: str, given: Any) -> Tensor:
    if not isinstance(given, Tensor) or given.shape != x.shape or given.dtype != x.dtype:
        got = f"{list(given.shape)} {given.dtype}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise MinillmError(f"parts: {what} must return a tensor {list(x.shape)} {x.dtype}, got {got}")
    return given
