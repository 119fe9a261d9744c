"""The driver's side of a step: cut into micro-batches, told to all ranks, computed with them. Lesson 14."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.attention.protocol import Batch, Row
from minillm.cache.paged import PagedCache
from minillm.parallel import messages, pipeline
from minillm.parallel.executor import MicroBatch, StageExecutor
from minillm.parallel.turn import Turns
from minillm.runner import PagedRunner


class ParallelRunner(PagedRunner):
    """A `PagedRunner` whose model is spread over ranks, of which this process is rank 0."""

    def __init__(self, executor: StageExecutor, cache: PagedCache, turns: Turns):
        super().__init__(executor.model, cache, executor.attention)
        self.executor, self.turns = executor, turns

    def compute(self, rows: list[Row], tokens: list[int], ready: list[int]) -> Tensor:
        device = self.model.device
        micro_batches, ids = cut(rows, tokens, ready, self.executor.place.pp, device)
        numbers = messages.encode(micro_batches, ids)
        with self.turns():
            messages.tell(self.executor.world, numbers)
            logits = self.executor.step(micro_batches)
            assert logits is not None  # this is rank 0
            if logits.is_cuda:  # an abort must not be noticed after the tokens are drawn
                torch.cuda.synchronize(logits.device)
        return logits


def cut(
    rows: Sequence[Row], tokens: Sequence[int], ready: Sequence[int], most: int, device: torch.device
) -> tuple[list[MicroBatch], list[list[int]]]:
    """At most so many micro-batches, as `pipeline.micro_batches` cuts rows; and the tokens of each."""
    micro_batches, ids, at, first = [], [], 0, 0
    for part in pipeline.micro_batches(rows, most, lambda row: row.num_new):
        count = sum(row.num_new for row in part)
        own = list(tokens[at : at + count])
        done = [i - first for i in ready if first <= i < first + len(part)]
        local = [row._replace(slot=i) for i, row in enumerate(part)]
        micro_batches.append(MicroBatch(Batch.build(local, own, device), done))
        ids.append(own)
        at, first = at + count, first + len(part)
    return micro_batches, ids
