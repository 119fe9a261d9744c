"""Which cached block leaves first. Lesson 11 builds it.

A policy is one function, `key(block)`: of the blocks that may leave, the one with the smallest key goes. Only a leaf
may leave, for a block is found through the blocks before it: taking one from the middle would lose all that follow.

The queue is a heap with lazy deletion. A block that is locked, touched, or gets a successor leaves a stale entry
behind, dropped when it comes up. So nothing is searched, and a block costs O(log n), however many others are in use.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from minillm.errors import MinillmError


@dataclass(slots=True, eq=False)
class CachedBlock:
    """One block of the cache, and what a policy may ask of it. Compared by identity.

    A walk marks its last block only. What that block knows goes to the block before it when it leaves, so `last_used`
    and `uses` are right whenever a policy is asked: then the block is a leaf.
    """

    id: int  # of the block in the pool
    tokens: tuple[int, ...]  # its block_size tokens
    model: tuple[str, str]  # engine and adapter
    scope: str | None  # the tenant whose block it is; None: public
    parent: CachedBlock | None  # the block before it
    depth: int  # blocks up to and including it
    born: int  # when it came in; time is a counter of calls
    last_used: int
    uses: int = 0  # how often it was hit
    children: int = 0  # blocks that follow it
    pins: int = 0  # 1 if a request holds it, and 1 for each child with pins
    shields: int = 0  # of a public block: children that belong to a tenant with a floor, or have shields
    ticket: int = 0  # of its entry in the queue; 0: in no queue
    place: Any = None  # of the index: where it keeps the block

    def chain(self) -> Iterator[CachedBlock]:
        """This block, the one before it, and so on to the first."""
        block: CachedBlock | None = self
        while block is not None:
            yield block
            block = block.parent


class EvictionPolicy(Protocol):
    """key(block): smallest leaves first; ties go by last use. It may depend on `last_used`, `uses`, `born`, `depth`
    and whatever else changes only when the block is hit or inserted: it is not asked at other times.
    """

    def key(self, block: CachedBlock) -> Any: ...


class LRU:
    """Least recently used."""

    def key(self, block: CachedBlock) -> int:
        return block.last_used


class LFU:
    """Least frequently used. A block that was popular once stays long."""

    def key(self, block: CachedBlock) -> int:
        return block.uses


class FIFO:
    """First in, first out: use does not matter."""

    def key(self, block: CachedBlock) -> int:
        return block.born


class EvictionQueue:
    """Blocks that may leave, smallest key first. put and head cost O(log n), drop O(1), amortised."""

    def __init__(self, policy: EvictionPolicy, tickets: Iterator[int] | None = None):
        self.policy = policy
        self._tickets = tickets or count(1)
        self._heap: list[tuple[Any, int, int, CachedBlock]] = []
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def put(self, block: CachedBlock) -> None:
        """Add the block, or give it the place of its present key."""
        self.drop(block)
        ticket = next(self._tickets)
        try:
            heapq.heappush(self._heap, (self.policy.key(block), block.last_used, ticket, block))
        except TypeError as error:
            raise MinillmError(f"parts: the keys of {type(self.policy).__name__} cannot be compared: {error}") from None
        block.ticket = ticket
        self._live += 1

    def drop(self, block: CachedBlock) -> None:
        """Take the block out, if it is in. Its entry stays in the heap until it comes up, or most entries are stale."""
        if block.ticket:
            block.ticket = 0
            self._live -= 1
            if len(self._heap) > 2 * self._live + 64:
                self._heap = [entry for entry in self._heap if entry[2] == entry[3].ticket]
                heapq.heapify(self._heap)

    def head(self) -> tuple[Any, int, int, CachedBlock] | None:
        """(key, last use, ticket, block) of the block that leaves first, which stays in; None if there is none."""
        while self._heap:
            entry = self._heap[0]
            if entry[2] == entry[3].ticket:
                return entry
            heapq.heappop(self._heap)
        return None

    def blocks(self) -> list[CachedBlock]:
        """The blocks that are in, in no order."""
        return [entry[3] for entry in self._heap if entry[2] == entry[3].ticket]
