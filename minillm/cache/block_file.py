"""One file a block, verified when read, in a folder that one process has to itself. Lesson 12's disk tier uses it.

A file is a safetensors file: "namespace" and "prefix", the whole key; "0", "1", ..., the block's tensors; "checksum".
The checksum is a CRC-32 over all of them with their dtypes and shapes. It is there for accidents, such as a torn write
or a bad sector, which it misses once in 2^32, and never when all that is wrong lies within 32 bits; it takes a third
of the time of a cryptographic hash. Against someone who may write into the folder only the folder's mode protects.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from minillm.cache.pool import BlockLayout
from minillm.errors import MinillmError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FORMAT = b"minillm block 1"  # raised with every change of the file, or of what a pool's tensors mean
NAME = re.compile(r"[0-9a-f]{64}\.safetensors(\.part)?")
MOST_SLOTS = 256


class UnusableError(Exception):
    """Why a file cannot serve. reason: "corrupted", "foreign" (another key's) or "stale" (another layout's)."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def name_of(namespace_key: bytes, packed: bytes) -> str:
    """64 hexadecimal digits. The namespace's length keeps its end apart from the prefix's beginning."""
    return hashlib.sha256(b"%s %d " % (FORMAT, len(namespace_key)) + namespace_key + packed).hexdigest()


def encode(namespace_key: bytes, packed: bytes, payload: list[Tensor]) -> bytes:
    """The content of a block's file."""
    held = {str(i): t for i, t in enumerate(payload)}
    checksum = torch.tensor([_checksum(namespace_key, packed, payload)])
    return save(held | {"namespace": _tensor(namespace_key), "prefix": _tensor(packed), "checksum": checksum})


def decode(content: bytes, namespace_key: bytes, packed: bytes, layout: BlockLayout | None) -> list[Tensor]:
    """The block's tensors, or UnusableError: whatever the bytes are, nothing else is raised."""
    try:
        held = load(content)
        found, prefix = _bytes(held.pop("namespace")).tobytes(), _bytes(held.pop("prefix")).tobytes()
        checksum = held.pop("checksum").item()
        payload = [held[str(i)] for i in range(len(held))]
        sound = checksum == _checksum(found, prefix, payload)
    except Exception:  # bytes from a disk may break any reader anywhere
        raise UnusableError("corrupted") from None
    if not sound:
        raise UnusableError("corrupted")
    if not _same_key(found, prefix, namespace_key, packed):
        raise UnusableError("foreign")
    if layout is not None and tuple((t.dtype, tuple(t.shape)) for t in payload) != layout:
        raise UnusableError("stale")
    return payload


def _same_key(found: bytes, prefix: bytes, namespace_key: bytes, packed: bytes) -> bool:
    return found == namespace_key and prefix == packed


def _checksum(namespace_key: bytes, packed: bytes, payload: list[Tensor]) -> int:
    described = f"{len(namespace_key)} {len(packed)} {[(str(t.dtype), tuple(t.shape)) for t in payload]}"
    crc = zlib.crc32(described.encode(), zlib.crc32(FORMAT))
    for part in (namespace_key, packed, *map(_bytes, payload)):
        crc = zlib.crc32(part, crc)
    return crc


def _bytes(t: Tensor) -> memoryview:
    return memoryview(t.reshape(-1).view(torch.uint8).numpy())


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def write(path: Path, content: bytes) -> None:
    """Whole or not at all, private. Raises OSError; nothing stays behind then.

    Nothing waits for the disk (no fsync): a file torn by a power cut is found by its checksum.
    """
    partial = path.with_name(path.name + ".part")
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(fd, rest) :]
        finally:
            os.close(fd)
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            os.unlink(partial)
        raise


def read(path: Path, size: int) -> bytes:
    """At most size + 1 bytes: one too many shows that the file has grown. Follows no link. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        return file.read(size + 1)


def take_slot(folder: Path) -> tuple[Path, int]:
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


def files(slot: Path) -> list[tuple[Path, int]]:
    """(path, bytes) of a slot's blocks in the order of writing."""
    found = [(path, path.stat()) for path in _ours(slot)]
    return [(path, s.st_size) for path, s in sorted(found, key=lambda f: (f[1].st_mtime_ns, f[0]))]
