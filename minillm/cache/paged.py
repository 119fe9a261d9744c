"""The paged KV cache of an engine: its memory, its free blocks, and what has been promised to running groups.

Lesson 06 builds it. A sequence holds only the blocks that its tokens have reached, at most one of them partly filled,
so its waste is below one block, however long it might have become.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minillm.cache.blocks import BlockAllocator
from minillm.cache.pool import KVPool
from minillm.errors import MinillmError
from minillm.request import Request


class PagedCache:
    """pool: the memory; allocator: which blocks are free. Shared by all runs of an engine."""

    def __init__(self, pool: KVPool, make_allocator: Callable[[int], Any] = BlockAllocator):
        self.pool = pool
        self.allocator = make_allocator(pool.num_blocks)
        self.promised = 0  # blocks that running groups may still ask for

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def most_blocks(self, request: Request) -> int:
        """Blocks of the longest sequence that the request may reach. Its last token is never computed."""
        return self.blocks_for(request.num_prompt_tokens + request.max_tokens - 1)

    @property
    def available(self) -> int:
        """Blocks that are free and promised to nobody."""
        return self.allocator.num_free - self.promised

    def promise(self, requests: Sequence[Request]) -> None:
        """Set blocks aside for a group, so that none of it can run out half way. All or nothing."""
        need = sum(self.most_blocks(r) for r in requests)
        if need > self.available:
            raise MinillmError(
                f"{len(requests)} requests may need {need} blocks of KV cache, {self.available} of "
                f"{self.pool.num_blocks} are free; finish or close the streams under way, or raise num_kv_blocks"
            )
        self.promised += need

    def grow(self, request: Request) -> None:
        """Give the request the blocks that all of its tokens need."""
        missing = self.blocks_for(request.num_tokens) - len(request.block_ids)
        if missing > 0:
            request.block_ids.extend(self.allocator.allocate(missing))
            self.promised -= missing

    def release(self, request: Request) -> None:
        """Free the request's blocks, and the promise of those that it never reached."""
        held, request.block_ids = request.block_ids, []
        self.promised -= self.most_blocks(request) - len(held)
        self.allocator.free(held)
