"""From requests to logits: three rungs of the ladder. Lessons 01 (naive), 02 (KV cache) and 06 (paged) build them.

All do the same for the engine: given requests, compute what is missing, or a part of it (lesson 10), and return the
logits of the next token of each one that is then complete. They differ in whether `num_computed_tokens` is allowed to
move, and in where keys and values are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from minillm.attention.causal import NoCacheAttention
from minillm.attention.protocol import AttentionBackend, Batch, Row
from minillm.cache.blocks import OutOfBlocksError
from minillm.cache.contiguous import ContiguousKVCache
from minillm.cache.paged import PagedCache
from minillm.graphs import DecodeGraphs
from minillm.models.transformer import Transformer
from minillm.request import Request


class Runner(Protocol):
    def start(self, requests: Sequence[Request]) -> None:
        """Get ready for a group of requests that will run together."""

    def forward(self, requests: Sequence[Request], num_new: Sequence[int] | None = None) -> Tensor:
        """Compute num_new[i] of request i's missing tokens; None: all of them, for everybody.

        Returns the logits of the next token of each request that is complete after this step, in order, [R, V].
        """

    def finish(self, request: Request) -> None:
        """Let go of whatever the request holds. A second time, or for one that never started, nothing happens."""


class NaiveRunner:
    """Recompute every token at every step. Token t costs t tokens of work, so T tokens cost O(T^2)."""

    def __init__(self, model: Transformer):
        self.model = model
        self.attention = NoCacheAttention()

    def start(self, requests: Sequence[Request]) -> None:
        pass

    def forward(self, requests: Sequence[Request], num_new: Sequence[int] | None = None) -> Tensor:
        _whole(requests, num_new, "kv_cache='none'")
        rows = [Row(slot=i, start=0, num_new=r.num_tokens) for i, r in enumerate(requests)]
        batch = Batch.build(rows, [t for r in requests for t in r.tokens], self.model.device)
        hidden = self.model.forward(batch, self.attention)
        return self.model.logits(hidden[batch.last])

    def finish(self, request: Request) -> None:
        pass


class CachedRunner:
    """Compute each token once and keep its keys and values in a contiguous cache.

    Every request owns one row of the cache. Rows stay dense: when a request leaves, the last row moves
    into the hole.
    """

    def __init__(self, model: Transformer, make_cache: Callable[..., ContiguousKVCache] = ContiguousKVCache):
        self.model = model
        self.make_cache = make_cache
        self.cache: ContiguousKVCache | None = None
        self.owners: list[Request] = []  # row -> request

    def start(self, requests: Sequence[Request]) -> None:
        """Reserve, for every request, the longest sequence that any of them may reach."""
        length = max(r.num_prompt_tokens + r.max_tokens for r in requests)
        self.cache, self.owners = None, []  # release the old one before reserving the new one
        self.cache = self.make_cache(self.model.config, len(requests), length, self.model.dtype, self.model.device)
        self.owners = list(requests)

    def forward(self, requests: Sequence[Request], num_new: Sequence[int] | None = None) -> Tensor:
        assert self.cache is not None, "start() comes first"
        _whole(requests, num_new, "kv_cache='contiguous'")
        row_of = {id(r): i for i, r in enumerate(self.owners)}
        # In row order a decode step reads one contiguous slice of the cache; `restore` undoes the order.
        order = sorted(range(len(requests)), key=lambda i: row_of[id(requests[i])])
        rows = [Row(row_of[id(r)], r.num_computed_tokens, r.num_new_tokens) for r in (requests[i] for i in order)]
        new = [t for i in order for t in requests[i].new_tokens]
        batch = Batch.build(rows, new, self.model.device)
        hidden = self.model.forward(batch, self.cache)
        for r in requests:
            r.num_computed_tokens = r.num_tokens
        logits = self.model.logits(hidden if len(hidden) == len(rows) else hidden[batch.last])
        if order == list(range(len(order))):
            return logits
        restore = sorted(range(len(order)), key=order.__getitem__)
        return logits[restore]

    def finish(self, request: Request) -> None:
        hole = next((i for i, r in enumerate(self.owners) if r is request), None)
        if self.cache is None or hole is None:
            return
        last = self.owners.pop()
        if last is not request:
            self.cache.move(len(self.owners), hole, last.num_computed_tokens)
            self.owners[hole] = last


class PagedRunner:
    """Compute each token once and keep its keys and values in blocks, taken when a sequence reaches them."""

    def __init__(
        self, model: Transformer, cache: PagedCache, attention: AttentionBackend, graphs: DecodeGraphs | None = None
    ):
        self.model, self.cache, self.attention, self.graphs = model, cache, attention, graphs

    def start(self, requests: Sequence[Request]) -> None:
        self.cache.promise(requests)

    def forward(self, requests: Sequence[Request], num_new: Sequence[int] | None = None) -> Tensor:
        counts = [r.num_new_tokens for r in requests] if num_new is None else list(num_new)
        tokens: list[int] = []
        for r, n in zip(requests, counts, strict=True):
            if not self.cache.grow(r, r.num_computed_tokens + n):
                raise OutOfBlocksError(f"request {r.request_id} needs a block, and none is free")
            behind = r.new_tokens
            tokens += behind if n == len(behind) else behind[:n]
        rows = [
            Row(i, r.num_computed_tokens, n, r.block_ids) for i, (r, n) in enumerate(zip(requests, counts, strict=True))
        ]
        ready = [i for i, (r, n) in enumerate(zip(requests, counts, strict=True)) if n == r.num_new_tokens]
        logits = self.compute(rows, tokens, ready)
        for r, n in zip(requests, counts, strict=True):
            r.num_computed_tokens += n
        return logits

    def compute(self, rows: list[Row], tokens: list[int], ready: list[int]) -> Tensor:
        """The logits of the ready ones' next tokens. tokens: the new ones of all rows, one row after the other."""
        batch = Batch.build(rows, tokens, self.model.device)
        logits = self.graphs.run(batch) if self.graphs is not None else None
        if logits is not None:
            return logits if len(ready) == len(rows) else logits[ready]
        # Only a request that is complete needs logits: they are the widest product of the model.
        hidden = self.model.forward(batch, self.attention)
        last = batch.last if len(ready) == len(rows) else batch.last[ready]
        return self.model.logits(hidden if len(hidden) == len(last) else hidden[last])

    def finish(self, request: Request) -> None:
        self.cache.release(request)


def _whole(requests: Sequence[Request], num_new: Sequence[int] | None, whose: str) -> None:
    if num_new is not None and list(num_new) != [r.num_new_tokens for r in requests]:
        raise ValueError(f"{whose} computes requests whole; chunks need kv_cache='paged'")
