"""The disk below the host's memory: blocks in files, in a folder that one process has to itself. Lesson 12 builds it.

A disk is not trusted: what is missing or wrong there is computed again, and what cannot be written is lost.
"""

from __future__ import annotations

import os
import re
import stat
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from minillm.cache import block_file
from minillm.cache.block_file import Link, Payload, Prefix, capacity_of, own
from minillm.cache.pool import BlockLayout
from minillm.errors import MinillmError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = re.compile(r"[0-9a-f]{64}\.safetensors(\.part)?")
MOST_SLOTS = 256


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
        self.capacity_bytes = capacity_of(capacity_bytes)
        self.layout = layout
        self.stats: Counter[str] = Counter()
        self.overflow: Callable[[bytes, Link, Payload], object] | None = None
        self._sizes: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self.nbytes = 0
        try:
            self._folder, lock = _take_slot(Path(folder))
            self._unlock = weakref.finalize(self, os.close, lock)
            self._find_files()
        except OSError as error:
            raise MinillmError(f"kv_disk_path: {folder} cannot be used ({error}); give a folder of your own") from None

    def __len__(self) -> int:
        return len(self._sizes)

    def put(self, namespace_key: bytes, prefix: Prefix, payload: Payload) -> bool:
        """Whether it is kept. The file appears whole or not at all; if the machine dies, its checksum tells."""
        if self.touch(namespace_key, prefix):
            return True
        if not self._unlock.alive:
            return False
        content = block_file.encode(namespace_key, prefix, [own(t) for t in payload])
        if len(content) > self.capacity_bytes:
            self.stats["too_large"] += 1
            return False
        self._evict_to(self.capacity_bytes - len(content))
        if self.nbytes + len(content) > self.capacity_bytes:  # files that could not be deleted
            self.stats["write_errors"] += 1
            return False
        name = block_file.name_of(namespace_key, prefix)
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
        name = block_file.name_of(namespace_key, prefix)
        if name not in self._sizes:
            self.stats["misses"] += 1
            return None
        try:
            content = block_file.read(self._path(name), self._sizes[name])
            payload = block_file.decode(content, namespace_key, prefix, self.layout)
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
        return block_file.name_of(namespace_key, prefix) in self._sizes

    def touch(self, namespace_key: bytes, prefix: Prefix) -> bool:
        """Mark it as used just now, if it is here."""
        name = block_file.name_of(namespace_key, prefix)
        if name in self._sizes:
            self._sizes.move_to_end(name)
            return True
        return False

    def discard(self, namespace_key: bytes, prefix: Prefix) -> None:
        name = block_file.name_of(namespace_key, prefix)
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
        for path, size in _files(self._folder):
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


def _take_slot(folder: Path) -> tuple[Path, int]:
    """(a private folder within `folder`, the descriptor of its lock): the first that no living process holds.

    Later ones that nobody holds are emptied, so that no more stays on disk than the processes that run may keep.
    Raises OSError; MinillmError where there are no file locks.
    """
    if fcntl is None:
        raise MinillmError("kv_disk_path needs file locks, which this system does not have; leave it out")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for i in range(MOST_SLOTS):
        if (lock := _lock(folder / f"slot-{i}.lock")) is not None:
            break
    else:
        raise OSError(f"{MOST_SLOTS} processes use it")
    try:
        slot = folder / f"slot-{i}"
        slot.mkdir(mode=0o700, exist_ok=True)
        found = slot.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise OSError(f"{slot.name} is a link or belongs to another user")
        slot.chmod(0o700)  # made by whatever umask, or by hand
        for spare in (folder / f"slot-{j}" for j in range(i + 1, MOST_SLOTS)):
            _empty(spare)
        for path in _ours(slot):
            if path.suffix == ".part":  # its writer died
                os.unlink(path)
    except BaseException:
        os.close(lock)
        raise
    return slot, lock


def _lock(path: Path) -> int | None:
    """The lock's descriptor, None while another process holds it. The lock ends with the descriptor."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _empty(slot: Path) -> None:
    with suppress(OSError):
        if slot.is_symlink() or not slot.is_dir() or (lock := _lock(slot.with_suffix(".lock"))) is None:
            return
        try:
            for path in _ours(slot):
                os.unlink(path)
            slot.rmdir()
        finally:
            os.close(lock)


def _ours(slot: Path) -> Iterator[Path]:
    """Files that this module named. Others are nobody's here: not counted, not touched."""
    with os.scandir(slot) as entries:
        yield from [Path(e.path) for e in entries if NAME.fullmatch(e.name) and e.is_file(follow_symlinks=False)]


def _files(slot: Path) -> list[tuple[Path, int]]:
    """(path, bytes) of a slot's blocks in the order of writing."""
    found = [(path, path.stat()) for path in _ours(slot)]
    return [(path, s.st_size) for path, s in sorted(found, key=lambda f: (f[1].st_mtime_ns, f[0]))]
