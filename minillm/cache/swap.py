"""Blocks that leave the pool for a tier, and come back. Lesson 12 builds it.

There are two ways out. Without a prefix cache a preempted request's blocks would be lost: they are copied there and
then (swap), unless computing them again is predicted to be cheaper. With one they stay where they can be hit, and cost
nothing; a block is copied only when it is evicted, if reading it back would beat computing it. There is one way back:
at admission, from the first block that the pool has not, as many as cost less to copy than to compute.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch

from minillm.cache.block_file import DIGEST_BYTES
from minillm.cache.namespace import Namespace
from minillm.cache.tiers import Chain, Link, Tiers
from minillm.cache.view import Tokens
from minillm.events import EventLog
from minillm.request import Request

if TYPE_CHECKING:
    from minillm.roofline.restore import RestoreModel

Key = tuple[bytes, Link]


class Pool(Protocol):
    """What a cache needs of its memory: `KVPool`, or the `ShadowPool` of the tests."""

    num_blocks: int
    block_size: int

    def read_blocks(self, ids: Sequence[int]) -> list[Any]: ...

    def write_blocks(self, ids: Sequence[int], payloads: Sequence[Any]) -> None: ...


class Swap:
    """tiers: where to, or None; restore: the cost model, without which a tier is always used; mode: "auto",
    "recompute" (nothing is copied at a preemption) or "swap" (whatever it costs).

    namespace(request): who may read its blocks; None where there is no prefix cache: then nobody but itself.
    """

    def __init__(
        self, pool: Pool, tiers: Tiers | None, restore: RestoreModel | None, mode: str, events: EventLog,
        namespace: Callable[[Request], Namespace] | None,
    ):  # fmt: skip
        self.pool, self.tiers, self.restore, self.mode, self.events = pool, tiers, restore, mode, events
        self.namespace = namespace
        self.private: dict[Request, int] = {}  # how many of a swapped request's first blocks the tiers may hold
        self._chains: WeakKeyDictionary[Request, Chain] = WeakKeyDictionary()
        self._cached: dict[int, tuple[Key, int]] = {}  # block of the prefix cache -> (its key, tokens before it)
        self._block_bytes = 0

    def keys(self, request: Request, start: int, end: int) -> Iterator[Key]:
        """Keys of the request's blocks from `start` to before `end`, one at a time: often the first is one too many."""
        if (chain := self._chains.get(request)) is None:
            own = uuid.uuid4().bytes
            reader = (lambda end: own) if self.namespace is None else self.namespace(request).reader_key
            chain = self._chains[request] = Chain(self.pool.block_size, reader)
        tokens = Tokens(request)
        for i in range(start, end):
            yield chain.key(tokens, i)

    # With a prefix cache: when a block is evicted

    def cached(self, request: Request, ids: Sequence[int], new: Sequence[int]) -> None:
        """The prefix cache took the blocks `new` of the request's first ones, `ids`: so they are named in a tier."""
        if self.tiers is None or not new:
            return
        at = len(ids) - len(new)
        places = range(at, len(ids)) if list(ids[at:]) == list(new) else [ids.index(i) for i in new]
        for i in places:
            (key,) = self.keys(request, i, i + 1)
            self._cached[ids[i]] = key, i * self.pool.block_size

    def spill(self, block: int) -> None:
        """A cached block loses its place."""
        if self.tiers is None or (first := self.tiers.first) is None or block not in self._cached:
            return
        key, before = self._cached[block]
        if self.tiers.touch(*key) is None:
            restore = None if self.mode == "swap" else self.restore
            if restore is None or restore.worth_keeping(first, context_before=before):
                self._copy([(key, block)])
        del self._cached[block]  # not before: if this raised, the block stays in the prefix cache

    # Without: when a request is preempted

    def out(self, request: Request) -> tuple[str, int]:
        """How a request's tokens are kept that is about to lose its blocks, and how many blocks were copied for it.

        "cached": they stay in the prefix cache until somebody needs the memory; "swap": its first blocks, at least one,
        are in a tier; "recompute": they are not kept.
        """
        full = request.num_computed_tokens // self.pool.block_size
        if self.namespace is not None and full:
            return "cached", 0
        if self.tiers is None or (first := self.tiers.first) is None or self.mode == "recompute" or not full:
            return "recompute", 0
        keys = list(self.keys(request, 0, full))
        stored = [self.tiers.contains(*key) is not None for key in keys]
        if self.restore is not None and self.mode == "auto":
            tail = request.num_tokens - full * self.pool.block_size
            if self.restore.preemption(full, stored=sum(stored), tier=first, tail=tail).how == "recompute":
                return "recompute", 0
        self.private[request] = max(full, self.private.get(request, 0))
        # The first block last: where there is no room for all, it is the oldest that leaves, and a beginning is of use.
        most = self._room(keys[0], request.block_ids[0])
        copied = self._copy([(keys[i], request.block_ids[i]) for i in reversed(range(min(full, most)))])
        return ("swap" if self.tiers.contains(*keys[0]) else "recompute"), copied

    def _room(self, key: Key, block: int) -> int:
        """No more blocks than this fit into all tiers. (Perhaps fewer: a file has a header, too.)"""
        assert self.tiers is not None
        if not self._block_bytes:
            self._block_bytes = sum(t.nbytes for t in self.pool.read_blocks([block])[0])
        each = self._block_bytes + len(key[0]) + len(key[1].own) + DIGEST_BYTES
        return (self.tiers.capacity_bytes + DIGEST_BYTES) // each  # the first has no parent

    def _copy(self, blocks: Sequence[tuple[Key, int]]) -> int:
        """Put these into the tiers, in this order; what is there already counts as used. Returns how many were put."""
        assert self.tiers is not None
        away = [block for key, block in blocks if self.tiers.contains(*key) is None]
        begun = time.perf_counter()
        payloads = dict(zip(away, self.pool.read_blocks(away), strict=True))
        reading = (time.perf_counter() - begun) / max(1, len(away))  # seconds a block
        count: Counter[str] = Counter()
        seconds: dict[str, float] = {}
        for key, block in blocks:
            if self.tiers.touch(*key) is not None:
                continue
            begun = time.perf_counter()
            payload = payloads.pop(block, None)  # it may have been there, until one of these took its room
            tier = self.tiers.put(*key, payload or self.pool.read_blocks([block])[0])
            if tier is not None:
                count[tier] += 1
                seconds[tier] = seconds.get(tier, 0.0) + reading + time.perf_counter() - begun
        if self.restore is not None:
            for tier, n in count.items():
                self.restore.observe_copy(tier, n, seconds[tier], write=True)
        return count.total()

    def forget(self, request: Request) -> None:
        """The request is over: what it alone left in the tiers goes."""
        full = self.private.pop(request, 0)
        if self.tiers is not None:
            for key in self.keys(request, 0, full):
                self.tiers.discard(*key)
        self._chains.pop(request, None)

    # And back

    def back(self, request: Request, most: int) -> None:
        """Fill the request's first missing blocks, of its first `most`, and move its counter over them."""
        if self.tiers is None:
            return
        bs, start = self.pool.block_size, request.num_computed_tokens // self.pool.block_size
        where = self.tiers.match(self.keys(request, start, most))
        if self.restore is not None and where and self.mode != "swap":
            tail = request.num_tokens - (start + len(where)) * bs
            count, _ = self.restore.restoring(where, context_before=start * bs, tail=tail)
            where = where[:count]
        for source, in_a_row in groupby(where):
            run = len(list(in_a_row))
            begun, payloads = time.perf_counter(), []
            for key in self.keys(request, start, start + run):
                payload = self.tiers.get(*key)
                if payload is None:  # corrupted or gone: compute from here on
                    break
                payloads.append(payload)
            if payloads:
                self.pool.write_blocks(request.block_ids[start : start + len(payloads)], payloads)
                if self.restore is not None:
                    settle(self.pool)
                    self.restore.observe_copy(source, len(payloads), time.perf_counter() - begun, write=False)
                self.events.record("hit", request.request_id, tokens=len(payloads) * bs, source=source)
            start += len(payloads)
            request.num_computed_tokens = start * bs
            if len(payloads) < run:
                return


def settle(pool: Pool) -> None:
    """Wait for what the pool's device still does, before a time is taken: a kernel's launch is not its end."""
    memory = getattr(pool, "k", None)
    if memory is not None and memory.is_cuda:
        torch.cuda.synchronize(memory.device)
