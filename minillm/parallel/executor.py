"""What every rank does in a step: its layers, between what it receives and what it sends on. Lesson 14.

The driver (rank 0) does the same as the workers: nobody is special but in who decides what the step is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.attention.protocol import AttentionBackend, Batch
from minillm.models.transformer import Transformer
from minillm.parallel.group import Group
from minillm.parallel.shard import Place


class MicroBatch(NamedTuple):
    """A part of a step. ready: which of its rows are complete after it, and get logits."""

    batch: Batch
    ready: list[int]


class StageExecutor:
    """The layers of one rank. world: all ranks, for what passes between stages."""

    def __init__(self, model: Transformer, attention: AttentionBackend, world: Group, place: Place):
        self.model, self.attention, self.world, self.place = model, attention, world, place

    @torch.inference_mode()
    def step(self, micro_batches: Sequence[MicroBatch]) -> Tensor | None:
        """Logits [R, V] of the ready rows of all micro-batches, in order: on rank 0 and on the last stage. Else None.

        A stage begins with the next micro-batch as soon as it has handed one on (GPipe; Huang et al., 2019). The logits
        go back to rank 0 when all is received, in one message: between two ranks messages pass one after the other, and
        rank 0 would not hear of the first logits before it had handed on its last hidden states.
        """
        place, tp = self.place, self.place.tp
        self.world.flush()  # what the step before has sent: it has long been received
        done: list[Tensor] = []
        for micro_batch in micro_batches:
            out = self._compute(micro_batch.batch)
            if place.last:
                done.append(self._logits(out, micro_batch))
            else:
                self.world.send(out, place.rank + tp)
        count = sum(len(m.ready) for m in micro_batches)
        if place.last:
            logits = torch.cat(done) if len(done) > 1 else done[0]
            if not place.first and place.tp_rank == 0 and count:  # rank 0 draws the tokens
                self.world.send(logits, 0)
            return logits
        if place.rank:
            return None
        logits = self._empty(count, self.model.config.vocab_size)
        return self.world.recv(logits, (place.pp - 1) * tp) if count else logits

    def _compute(self, batch: Batch) -> Tensor:
        """Hidden states [N, D] after this stage's layers."""
        hidden = None
        if not self.place.first:
            hidden = self._empty(len(batch.token_ids), self.model.config.hidden_size)
            self.world.recv(hidden, self.place.rank - self.place.tp)
        plan = self.attention.plan(batch)
        return self.model.compute(batch.token_ids, batch.positions, self.attention, plan, hidden)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.model.dtype, device=self.model.device)

    def _logits(self, hidden: Tensor, micro_batch: MicroBatch) -> Tensor:
        batch, ready = micro_batch
        last = batch.last if len(ready) == len(batch.rows) else batch.last[ready]
        return self.model.logits(hidden if len(hidden) == len(last) else hidden[last])
