"""Which blocks of a paged KV cache are free, and who holds the others. Lesson 06 builds it.

A block holds the keys and values of `block_size` consecutive tokens of one sequence. Any block serves any sequence, so
no hole is ever too small: fragmentation between sequences cannot exist (PagedAttention; Kwon et al., 2023).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from minillm.errors import MinillmError


class OutOfBlocksError(MinillmError):
    """More blocks were asked for than are free. Nothing was allocated."""


class BlockAllocator:
    """Block ids 1 .. num_blocks. Block 0 is the padding block: it stays zero and belongs to nobody.

    Conservation, checked by `check`: free + held == num_blocks, where a block is held while its reference count is
    above 0. Blocks are handed out in the order in which they were freed, so a stale one is reused as late as possible.
    """

    def __init__(self, num_blocks: int):
        if not isinstance(num_blocks, int) or isinstance(num_blocks, bool) or num_blocks < 1:
            raise MinillmError(f"a cache needs a whole number of blocks, at least 1, got {num_blocks!r}")
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks + 1))
        self._references = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """n different free blocks, each with one reference. OutOfBlocksError leaves everything as it was."""
        if n < 0:
            raise MinillmError(f"cannot allocate {n} blocks")
        if n > len(self._free):
            raise OutOfBlocksError(f"{n} blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        ids = [self._free.popleft() for _ in range(n)]
        for i in ids:
            self._references[i] = 1
        return ids

    def share(self, ids: Iterable[int]) -> None:
        """One more reference to each: another sequence reads the same blocks."""
        ids = self._held(ids, "share")
        for i in ids:
            self._references[i] += 1

    def free(self, ids: Iterable[int]) -> None:
        """Drop one reference of each; a block without references is free. Freeing what is free is an error."""
        ids = self._held(ids, "free")
        for n, i in enumerate(ids):
            if self._references[i] == 0:  # listed more often than it is held
                for j in ids[:n]:
                    self._take_back(j)
                raise MinillmError(f"block {i} is freed more often than it is held")
            self._references[i] -= 1
            if self._references[i] == 0:
                self._free.append(i)

    def _take_back(self, i: int) -> None:
        if self._references[i] == 0:
            self._free.remove(i)
        self._references[i] += 1

    def _held(self, ids: Iterable[int], what: str) -> list[int]:
        ids = list(ids)
        for i in ids:
            if not 1 <= i <= self.num_blocks or self._references[i] == 0:
                raise MinillmError(f"cannot {what} block {i}: it is not held (blocks are 1 to {self.num_blocks})")
        return ids

    def check(self) -> None:
        """Raise MinillmError unless every block is either free, once, or held."""
        free = set(self._free)
        held = {i for i in range(1, self.num_blocks + 1) if self._references[i] > 0}
        if len(free) != len(self._free) or free & held or len(free) + len(held) != self.num_blocks:
            raise MinillmError(
                f"blocks are lost or doubled: {len(self._free)} free ({len(free)} different), {len(held)} held, "
                f"{len(free & held)} both, of {self.num_blocks}"
            )
