"""Host memory and disk below the pool: blocks that would be lost are kept there. Lesson 12 builds it.

The key of a block is its namespace, its own tokens, and the SHA-256 of the chain before it (block_file.py says why no
other prompt can be served). It is compared in full. A tier is bounded in bytes and forgets the least recently used
block first.

There is no promotion: a block found on disk goes to the pool, and comes back to the host when it is evicted there. A
second copy in the host would only displace another block.

A tier is a cache: whatever goes wrong with a file, the block is missing and its tokens are computed again. Nothing
here raises after the start, and nothing waits for a disk to have written. Not thread-safe: one step loop owns it.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from minillm.cache import block_file
from minillm.cache.block_file import Chain, Link, Payload, Prefix, capacity_of, link_of, own, pack
from minillm.cache.disk import DiskTier

__all__ = ["Chain", "DiskTier", "HostTier", "Link", "Tier", "Tiers", "pack"]


@dataclass(frozen=True, slots=True)
class _Held:
    """A block in the host's memory, with its whole key."""

    namespace_key: bytes
    link: Link
    payload: Payload

    @property
    def nbytes(self) -> int:
        return sum(map(len, (self.namespace_key, *self.link))) + sum(t.nbytes for t in self.payload)


class Tier(Protocol):
    """Keeps blocks. `overflow`, where set, is offered what leaves."""

    name: str
    capacity_bytes: int
    stats: Counter[str]
    overflow: Callable[[bytes, Link, Payload], object] | None

    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def put(self, namespace_key: bytes, prefix: Prefix, payload: Payload) -> bool: ...
    def get(self, namespace_key: bytes, prefix: Prefix) -> Payload | None: ...
    def contains(self, namespace_key: bytes, prefix: Prefix) -> bool: ...
    def touch(self, namespace_key: bytes, prefix: Prefix) -> bool: ...
    def discard(self, namespace_key: bytes, prefix: Prefix) -> None: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...


class HostTier:
    """Blocks in the memory of the host. Keys count towards the bound as well as tensors."""

    name = "host"

    def __init__(self, capacity_bytes: int):
        self.capacity_bytes = capacity_of(capacity_bytes)
        self.nbytes = 0
        self.stats: Counter[str] = Counter()
        self.overflow: Callable[[bytes, Link, Payload], object] | None = None
        self._held: OrderedDict[str, _Held] = OrderedDict()  # by name, least recently used first

    def __len__(self) -> int:
        return len(self._held)

    def put(self, namespace_key: bytes, prefix: Prefix, payload: Payload) -> bool:
        """Whether it is kept. The payload is given away: who writes into it later writes into the tier."""
        held = _Held(namespace_key, link_of(prefix), [own(t) for t in payload])
        if self.touch(namespace_key, held.link):
            return True
        if held.nbytes > self.capacity_bytes:
            self.stats["too_large"] += 1
            return False
        name = block_file.name_of(namespace_key, held.link)
        self._drop(name)  # should another key have it
        while self.nbytes + held.nbytes > self.capacity_bytes:
            gone = self._drop(next(iter(self._held)))
            self.stats["evicted"] += 1
            if self.overflow is not None and gone is not None:
                self.overflow(gone.namespace_key, gone.link, gone.payload)
        self._held[name] = held
        self.nbytes += held.nbytes
        self.stats["puts"] += 1
        return True

    def get(self, namespace_key: bytes, prefix: Prefix) -> Payload | None:
        """The block, to be read only, or None."""
        name = self._find(namespace_key, prefix)
        if name is None:
            self.stats["misses"] += 1
            return None
        self._held.move_to_end(name)
        self.stats["hits"] += 1
        return self._held[name].payload

    def contains(self, namespace_key: bytes, prefix: Prefix) -> bool:
        return self._find(namespace_key, prefix) is not None

    def touch(self, namespace_key: bytes, prefix: Prefix) -> bool:
        """Mark it as used just now, if it is here."""
        if (name := self._find(namespace_key, prefix)) is not None:
            self._held.move_to_end(name)
        return name is not None

    def discard(self, namespace_key: bytes, prefix: Prefix) -> None:
        if (name := self._find(namespace_key, prefix)) is not None:
            self._drop(name)

    def _find(self, namespace_key: bytes, prefix: Prefix) -> str | None:
        link = link_of(prefix)
        name = block_file.name_of(namespace_key, link)
        held = self._held.get(name)
        same = held is not None and block_file.same_key(held.namespace_key, held.link, namespace_key, link)
        return name if same else None

    def _drop(self, name: str) -> _Held | None:
        if (held := self._held.pop(name, None)) is not None:
            self.nbytes -= held.nbytes
        return held

    def clear(self) -> None:
        self._held.clear()
        self.nbytes = 0

    def close(self) -> None:
        self.clear()


class Tiers:
    """Tiers from the fastest to the slowest; what leaves one is offered to the next. There may be none."""

    def __init__(self, tiers: Sequence[Tier] = ()):
        self.tiers = list(tiers)
        for upper, lower in itertools.pairwise(self.tiers):
            upper.overflow = lower.put

    def __len__(self) -> int:
        return sum(len(t) for t in self.tiers)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tiers)

    @property
    def capacity_bytes(self) -> int:
        return sum(t.capacity_bytes for t in self.tiers)

    @property
    def first(self) -> str | None:
        """The tier to which blocks go, or would if it had room."""
        return self.tiers[0].name if self.tiers else None

    @property
    def stats(self) -> dict[str, dict[str, int]]:
        """Counts by tier since the start."""
        return {t.name: dict(t.stats) for t in self.tiers}

    def put(self, namespace_key: bytes, prefix: Prefix, payload: Payload) -> str | None:
        """The tier that keeps the block, None when it is dropped. The payload is given away."""
        link = link_of(prefix)
        return next((t.name for t in self.tiers if t.put(namespace_key, link, payload)), None)

    def get(self, namespace_key: bytes, prefix: Prefix) -> Payload | None:
        """The block, to be read only, or None: it must be computed."""
        link = link_of(prefix)
        for tier in self.tiers:
            if (payload := tier.get(namespace_key, link)) is not None:
                return payload
        return None

    def contains(self, namespace_key: bytes, prefix: Prefix) -> str | None:
        """The fastest tier that has the block. Reads no file and does not count as use."""
        link = link_of(prefix)
        return next((t.name for t in self.tiers if t.contains(namespace_key, link)), None)

    def touch(self, namespace_key: bytes, prefix: Prefix) -> str | None:
        """As `contains`, and marks it as used: a block that would be put again need not be read from the pool."""
        link = link_of(prefix)
        return next((t.name for t in self.tiers if t.touch(namespace_key, link)), None)

    def match(self, keys: Iterable[tuple[bytes, Prefix]]) -> list[str]:
        """Where the blocks of these keys are, up to the first that is nowhere: no further key is asked for."""
        found: list[str] = []
        for key in keys:
            if (tier := self.contains(*key)) is None:
                break
            found.append(tier)
        return found

    def discard(self, namespace_key: bytes, prefix: Prefix) -> None:
        """The block will not be asked for again."""
        link = link_of(prefix)
        for tier in self.tiers:
            tier.discard(namespace_key, link)

    def clear(self) -> None:
        for tier in self.tiers:
            tier.clear()

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()
