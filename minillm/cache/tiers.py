"""Host memory and disk below the pool: blocks that would be lost are kept there. Lesson 12 builds it.

The key of a block is its namespace and all tokens up to its end, compared in full: a hash only names files, so a
collision can never serve another prompt. A tier is bounded in bytes and forgets the least recently used block first.

There is no promotion: a block found on disk goes to the pool, and comes back to the host when it is evicted there. A
second copy in the host would only displace another block.

A tier is a cache: whatever goes wrong with a file, the block is missing and its tokens are computed again. Nothing
here raises after the start, and nothing waits for a disk to have written. Not thread-safe: one step loop owns it.
"""

from __future__ import annotations

import itertools
import os
import struct
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from minillm.cache import block_file
from minillm.cache.pool import BlockLayout
from minillm.errors import MinillmError

TOKEN_BYTES = 4
Payload = list[Tensor]  # of one block, on the CPU: what KVPool.read_block gives
Prefix = Sequence[int] | bytes  # tokens, or the same packed


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens as little-endian int32. Packed once, the key of a request's block i is [: 4 * block_size * (i + 1)]."""
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error as error:
        raise MinillmError(f"a token must be a whole number of 32 bits ({error})") from None


def _packed(prefix: Prefix) -> bytes:
    return prefix if isinstance(prefix, bytes) else pack(prefix)


class Tier(Protocol):
    """Keeps blocks. `overflow`, where set, is offered what leaves."""

    name: str
    stats: Counter[str]
    overflow: Callable[[bytes, bytes, Payload], object] | None

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
        self.capacity_bytes = _capacity(capacity_bytes)
        self.nbytes = 0
        self.stats: Counter[str] = Counter()
        self.overflow: Callable[[bytes, bytes, Payload], object] | None = None
        self._held: OrderedDict[tuple[bytes, bytes], Payload] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._held)

    def put(self, namespace_key: bytes, prefix: Prefix, payload: Payload) -> bool:
        """Whether it is kept. The payload is given away: who writes into it later writes into the tier."""
        key = namespace_key, _packed(prefix)
        if self.touch(*key):
            return True
        payload = [_own(t) for t in payload]
        size = _size(key, payload)
        if size > self.capacity_bytes:
            self.stats["too_large"] += 1
            return False
        while self.nbytes + size > self.capacity_bytes:
            oldest, gone = self._held.popitem(last=False)
            self.nbytes -= _size(oldest, gone)
            self.stats["evicted"] += 1
            if self.overflow is not None:
                self.overflow(*oldest, gone)
        self._held[key] = payload
        self.nbytes += size
        self.stats["puts"] += 1
        return True

    def get(self, namespace_key: bytes, prefix: Prefix) -> Payload | None:
        """The block, to be read only, or None."""
        key = namespace_key, _packed(prefix)
        found = self.touch(*key)
        self.stats["hits" if found else "misses"] += 1
        return self._held[key] if found else None

    def contains(self, namespace_key: bytes, prefix: Prefix) -> bool:
        return (namespace_key, _packed(prefix)) in self._held

    def touch(self, namespace_key: bytes, prefix: Prefix) -> bool:
        """Mark it as used just now, if it is here."""
        key = namespace_key, _packed(prefix)
        if key in self._held:
            self._held.move_to_end(key)
            return True
        return False

    def discard(self, namespace_key: bytes, prefix: Prefix) -> None:
        key = namespace_key, _packed(prefix)
        if (payload := self._held.pop(key, None)) is not None:
            self.nbytes -= _size(key, payload)

    def clear(self) -> None:
        self._held.clear()
        self.nbytes = 0

    def close(self) -> None:
        self.clear()


class DiskTier:
    """Blocks in files, one each: a safetensors file that names what it holds and carries a checksum.

    Prompts can be read off keys and values, so files are private (0600 in a folder of 0700) and their names are hashes.
    Each process has a slot of the folder to itself, by a lock; the bound is that of one process. A slot whose process
    ended serves the next one, which trusts nothing there that it has not verified, in the order of writing.

    layout: a pool's block_layout; a file of another one is dropped. Raises MinillmError where the folder cannot be
    used. After that a write that fails drops the block, and a file that is missing or wrong is a miss; `stats` counts
    write_errors, missing, unreadable, corrupted, foreign (another key's) and stale (another layout's).
    """

    name = "disk"

    def __init__(self, folder: str | os.PathLike[str], capacity_bytes: int, layout: BlockLayout | None = None):
        self.capacity_bytes = _capacity(capacity_bytes)
        self.layout = layout
        self.stats: Counter[str] = Counter()
        self.overflow: Callable[[bytes, bytes, Payload], object] | None = None
        self._sizes: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self.nbytes = 0
        try:
            self._folder, lock = block_file.take_slot(Path(folder))
            self._unlock = weakref.finalize(self, os.close, lock)
            self._find_files()
        except OSError as error:
            raise MinillmError(f"kv_disk_path: {folder} cannot be used ({error}); give a folder of your own") from None

    def __len__(self) -> int:
        return len(self._sizes)

    def put(self, namespace_key: bytes, prefix: Prefix, payload: Payload) -> bool:
        """Whether it is kept. The file appears whole or not at all; if the machine dies, its checksum tells."""
        packed = _packed(prefix)
        if self.touch(namespace_key, packed):
            return True
        if not self._unlock.alive:
            return False
        content = block_file.encode(namespace_key, packed, [_own(t) for t in payload])
        if len(content) > self.capacity_bytes:
            self.stats["too_large"] += 1
            return False
        self._evict_to(self.capacity_bytes - len(content))
        if self.nbytes + len(content) > self.capacity_bytes:  # files that could not be deleted
            self.stats["write_errors"] += 1
            return False
        name = block_file.name_of(namespace_key, packed)
        try:
            block_file.write(self._path(name), content)
        except OSError:
            self.stats["write_errors"] += 1
            return False
        self._sizes[name] = len(content)
        self.nbytes += len(content)
        self.stats["puts"] += 1
        return True

    def get(self, namespace_key: bytes, prefix: Prefix) -> Payload | None:
        """The block, verified, or None: then a file that was there is gone."""
        packed = _packed(prefix)
        name = block_file.name_of(namespace_key, packed)
        if name not in self._sizes:
            self.stats["misses"] += 1
            return None
        try:
            content = block_file.read(self._path(name), self._sizes[name])
            payload = block_file.decode(content, namespace_key, packed, self.layout)
        except block_file.UnusableError as error:
            fault = error.reason
        except FileNotFoundError:
            fault = "missing"
        except OSError:
            fault = "unreadable"
        else:
            self._sizes.move_to_end(name)
            self.stats["hits"] += 1
            return payload
        self.stats[fault] += 1
        self._drop(name)
        return None

    def contains(self, namespace_key: bytes, prefix: Prefix) -> bool:
        """Whether there is a file; only `get` verifies it."""
        return block_file.name_of(namespace_key, _packed(prefix)) in self._sizes

    def touch(self, namespace_key: bytes, prefix: Prefix) -> bool:
        """Mark it as used just now, if it is here."""
        name = block_file.name_of(namespace_key, _packed(prefix))
        if name in self._sizes:
            self._sizes.move_to_end(name)
            return True
        return False

    def discard(self, namespace_key: bytes, prefix: Prefix) -> None:
        name = block_file.name_of(namespace_key, _packed(prefix))
        if name in self._sizes:
            self._drop(name)

    def clear(self) -> None:
        for name in list(self._sizes):
            self._drop(name)

    def close(self) -> None:
        """Leave files and slot to the next process."""
        self._sizes.clear()
        self.nbytes = 0
        self._unlock()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    def _find_files(self) -> None:
        for path, size in block_file.files(self._folder):
            self._sizes[path.stem] = size
            self.nbytes += size
        self._evict_to(self.capacity_bytes)

    def _evict_to(self, nbytes: int) -> None:
        while self.nbytes > nbytes and self._sizes:
            self._drop(next(iter(self._sizes)))
            self.stats["evicted"] += 1

    def _drop(self, name: str) -> None:
        self._delete(self._path(name), self._sizes.pop(name))

    def _delete(self, path: Path, size: int) -> None:
        """What cannot be deleted keeps counting: it fills the disk all the same."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError:
            return
        self.nbytes -= size


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
    def stats(self) -> dict[str, dict[str, int]]:
        """Counts by tier since the start."""
        return {t.name: dict(t.stats) for t in self.tiers}

    def put(self, namespace_key: bytes, prefix: Prefix, payload: Payload) -> str | None:
        """The tier that keeps the block, None when it is dropped. The payload is given away."""
        packed = _packed(prefix)
        return next((t.name for t in self.tiers if t.put(namespace_key, packed, payload)), None)

    def get(self, namespace_key: bytes, prefix: Prefix) -> Payload | None:
        """The block, to be read only, or None: it must be computed."""
        packed = _packed(prefix)
        for tier in self.tiers:
            if (payload := tier.get(namespace_key, packed)) is not None:
                return payload
        return None

    def contains(self, namespace_key: bytes, prefix: Prefix) -> str | None:
        """The fastest tier that has the block. Reads no file and does not count as use."""
        packed = _packed(prefix)
        return next((t.name for t in self.tiers if t.contains(namespace_key, packed)), None)

    def touch(self, namespace_key: bytes, prefix: Prefix) -> str | None:
        """As `contains`, and marks it as used: a block that would be put again need not be read from the pool."""
        packed = _packed(prefix)
        return next((t.name for t in self.tiers if t.touch(namespace_key, packed)), None)

    def match(self, namespace_key: bytes, prefix: Prefix, block_size: int, start: int = 0) -> list[str]:
        """Where the whole blocks of a prompt are, from block number `start` up to the first that is nowhere."""
        packed = _packed(prefix)
        names = []
        for end in range((start + 1) * block_size, len(packed) // TOKEN_BYTES + 1, block_size):
            if (name := self.contains(namespace_key, packed[: TOKEN_BYTES * end])) is None:
                break
            names.append(name)
        return names

    def discard(self, namespace_key: bytes, prefix: Prefix) -> None:
        """The block will not be asked for again."""
        packed = _packed(prefix)
        for tier in self.tiers:
            tier.discard(namespace_key, packed)

    def clear(self) -> None:
        for tier in self.tiers:
            tier.clear()

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()


def _capacity(given: object) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise MinillmError(f"a tier's capacity must be a whole number of bytes, at least 1, got {given!r}")
    return given


def _own(t: Tensor) -> Tensor:
    """t, or a copy where t is a window: it would keep more memory alive than is counted."""
    whole = t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes
    return t if whole else t.clone(memory_format=torch.contiguous_format)


def _size(key: tuple[bytes, bytes], payload: Payload) -> int:
    return len(key[0]) + len(key[1]) + sum(t.nbytes for t in payload)
