"""The paged KV cache of an engine: its memory, its free blocks, and what has been promised to running groups.

Lesson 06 builds it. A sequence holds only the blocks that its tokens have reached, at most one of them partly filled,
so its waste is below one block, however long it might have become.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

from minillm.cache.blocks import BlockAllocator
from minillm.cache.pool import KVPool
from minillm.errors import MinillmError
from minillm.parts import make_part
from minillm.request import Request


class PagedCache:
    """pool: the memory; allocator: which blocks are free. Shared by all runs of an engine.

    The allocator may be a learner's, so what it says is judged: a block given twice would mix two sequences.
    """

    def __init__(self, pool: KVPool, make_allocator: Callable[[int], Any] = BlockAllocator):
        self.pool = pool
        self.allocator = make_part("allocator", make_allocator, "the number of blocks", pool.num_blocks)
        for name in ("allocate", "free"):
            if not callable(getattr(self.allocator, name, None)):
                raise MinillmError(f"parts: the allocator needs a method {name}, got {self.allocator!r:.80}")
        self._running: dict[int, Request] = {}  # by identity: whom blocks were promised to
        self._held: set[int] = set()
        self._num_free()

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def most_blocks(self, request: Request) -> int:
        """Blocks of the longest sequence that the request may reach. Its last token is never computed."""
        return self.blocks_for(request.num_prompt_tokens + request.max_tokens - 1)

    @property
    def promised(self) -> int:
        """Blocks that running requests may still ask for. Summed, not counted along: a sum cannot drift."""
        return sum(self.most_blocks(r) - len(r.block_ids) for r in self._running.values())

    def _num_free(self) -> int:
        """What the allocator says."""
        free = getattr(self.allocator, "num_free", None)
        if not isinstance(free, int) or isinstance(free, bool):
            raise MinillmError(f"parts: the allocator's num_free must be a number (a property), got {free!r:.80}")
        return free

    @property
    def available(self) -> int:
        """Blocks that are free and promised to nobody."""
        return self._num_free() - self.promised

    def promise(self, requests: Sequence[Request]) -> None:
        """Set blocks aside for a group, so that none of it can run out half way. All or nothing."""
        need = sum(self.most_blocks(r) for r in requests)
        if need > self.available:
            if (free := self._num_free()) + len(self._held) != self.pool.num_blocks:
                raise MinillmError(
                    f"parts: the allocator says that {free} blocks are free; {len(self._held)} of "
                    f"{self.pool.num_blocks} are held, so it has lost some"
                )
            raise MinillmError(
                f"{len(requests)} requests may need {need} blocks of KV cache, {self.available} of "
                f"{self.pool.num_blocks} are free; finish or close the streams under way, or raise num_kv_blocks"
            )
        self._running.update((id(r), r) for r in requests)

    def grow(self, request: Request) -> None:
        """Give the request the blocks that all of its tokens need."""
        missing = self.blocks_for(request.num_tokens) - len(request.block_ids)
        if missing > 0:
            request.block_ids.extend(self._allocate(missing))

    def _allocate(self, n: int) -> list[int]:
        """n blocks that nobody holds; an allocator that gives anything else is at fault, and gets it back."""
        given = self.allocator.allocate(n)
        try:
            ids = [operator.index(i) for i in given]
        except TypeError:
            raise MinillmError(f"parts: the allocator must return a list of {n} block ids, got {given!r:.80}") from None
        own = {i for i in ids if 1 <= i <= self.pool.num_blocks} - self._held
        if not len(own) == len(ids) == n:
            with contextlib.suppress(Exception):
                self.allocator.free(sorted(own))
            raise MinillmError(
                f"parts: the allocator was asked for {n} blocks and gave {ids!r:.80}; they must be {n} different ones "
                f"from 1 to {self.pool.num_blocks} that nobody holds (held: {sorted(self._held)!r:.80})"
            )
        self._held |= own
        return ids

    def release(self, request: Request) -> None:
        """Free the request's blocks, and the promise of those that it never reached. A second time, nothing."""
        held, request.block_ids = request.block_ids, []
        self._running.pop(id(request), None)
        self._held.difference_update(held)
        if held:
            self.allocator.free(held)
