"""CUDA graphs for decode: a step's few hundred launches, recorded once and replayed as one. Lesson 07 builds it.

A small decode step is over on the device before the host has launched it. A graph holds the launches with their
arguments, so it can be replayed only with the same shapes and the same addresses. Hence three things here:

- inputs are copied into fixed buffers, and the plan of the attention backend is made of those buffers;
- batch sizes are rounded up to a few buckets. Padding rows have slot -1, which is never written, context 0, which reads
  nothing, and block tables full of block 0, which belongs to nobody;
- the number of KV splits is fixed at capture, by a bucket of context lengths.

A graph is captured when its bucket is first needed and kept only where a replay beats the eager step by the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from minillm.attention.protocol import Batch
from minillm.attention.triton import TritonAttention, TritonPlan
from minillm.device import on
from minillm.models.transformer import Transformer


class Capture(Protocol):
    def __call__(self, step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
        """Record `step`. Returns what replays it, and the tensor that every replay fills."""


def cuda_capture(step: Callable[[], Tensor]) -> tuple[Callable[[], Any], Tensor]:
    """Warm up on a side stream, as capture demands (compilation and allocation must be over), then record."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph.replay, out


@dataclass
class Buffers:
    """Fixed inputs of one bucket: B rows, each with at most `blocks` blocks."""

    token_ids: Tensor  # [B] int64
    positions: Tensor  # [B] int64
    plan: TritonPlan

    @classmethod
    def empty(cls, rows: int, blocks: int, max_context: int, device: torch.device) -> Buffers:
        long = lambda *shape: torch.zeros(shape, dtype=torch.int64, device=device)
        plan = TritonPlan(long(rows) - 1, long(rows, blocks).int(), long(rows).int(), max_context)
        return cls(long(rows), long(rows), plan)

    def fill(self, batch: Batch, plan: TritonPlan) -> None:
        n, width = plan.block_tables.shape
        blocks = min(width, self.plan.block_tables.shape[1])  # a table may be longer than the tokens need
        for fixed, now, padding in (
            (self.token_ids, batch.token_ids, 0), (self.positions, batch.positions, 0),
            (self.plan.slots, plan.slots, -1), (self.plan.context_lens, plan.context_lens, 0),
        ):  # fmt: skip
            fixed[:n].copy_(now)
            fixed[n:].fill_(padding)
        self.plan.block_tables[:n, :blocks].copy_(plan.block_tables[:, :blocks])
        self.plan.block_tables[:n, blocks:].zero_()
        self.plan.block_tables[n:].zero_()


@dataclass
class Graph:
    buffers: Buffers
    replay: Callable[[], Any]
    logits: Tensor


def buckets(largest: int) -> list[int]:
    """1, 2, 4, then every 8 up to 64 and every 16 beyond: padding wastes little where a step is long."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, largest + 16, 16)]
    return [*[s for s in sizes if s < largest], largest]


class DecodeGraphs:
    """Captured decode steps by (batch bucket, context bucket). `run` gives logits, or None where eager is better."""

    def __init__(
        self, model: Transformer, attention: TritonAttention, max_rows: int, capture: Capture = cuda_capture,
        pays: Callable[[Callable[[], Any], Callable[[], Any]], bool] | None = None,
    ):  # fmt: skip
        """max_rows: most sequences a graph is made for. pays(eager, replay): whether the replay is worth keeping."""
        self.model, self.attention, self.capture = model, attention, capture
        self.pays = pays or replay_is_faster
        self.rows = buckets(max_rows)
        self.contexts = [n for n in (512, 2048, 8192, 32768, 131072) if n < model.max_len] + [model.max_len]
        self.graphs: dict[tuple[int, int], Graph | None] = {}

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor | None:
        """Logits [B, V] of a step in which every sequence has one new token; None when no graph serves it."""
        if any(row.num_new != 1 for row in batch.rows) or len(batch.rows) > self.rows[-1]:
            return None
        rows = next(n for n in self.rows if n >= len(batch.rows))
        context = next(n for n in self.contexts if n >= max(row.context for row in batch.rows))
        if self.graphs.get((rows, context), ...) is None:
            return None  # captured once and found slower: the eager step makes its own plan
        plan = self.attention.plan(batch)
        with on(self.model.device):
            if (rows, context) not in self.graphs:
                self.graphs[rows, context] = self._make(rows, context, batch, plan)
            graph = self.graphs[rows, context]
            if graph is None:
                return None
            graph.buffers.fill(batch, plan)
            graph.replay()
            return graph.logits[: len(batch.rows)].clone()  # the next replay overwrites it

    def _make(self, rows: int, context: int, batch: Batch, plan: TritonPlan) -> Graph | None:
        blocks = -(-context // self.attention.pool.block_size)
        buffers = Buffers.empty(rows, blocks, context, self.model.device)
        buffers.fill(batch, plan)  # real inputs: recording runs the step, and running it twice writes the same KV twice

        def step() -> Tensor:
            hidden = self.model.compute(buffers.token_ids, buffers.positions, self.attention, buffers.plan)
            return self.model.logits(hidden)

        replay, logits = self.capture(step)
        eager = lambda: self.model.logits(self.model.compute(batch.token_ids, batch.positions, self.attention, plan))
        return Graph(buffers, replay, logits) if self.pays(eager, replay) else None


def replay_is_faster(eager: Callable[[], Any], replay: Callable[[], Any], repeats: int = 5) -> bool:
    """Whether the best of some alternating replays beats the best eager step, on the clock of the current device."""

    def seconds(work: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    pairs: Sequence[tuple[float, float]] = [(seconds(eager), seconds(replay)) for _ in range(repeats)]
    return min(r for _, r in pairs) < min(e for e, _ in pairs)
