"""The key of a block, and its file: one file a block, verified when read. Lesson 12's tiers use both.

The key is the namespace and all tokens up to the block's end. A hash of it, a name, finds a block; the key decides.

A file is a safetensors file: "namespace" and "prefix", the whole key; "0", "1", ..., the block's tensors; "checksum".
The checksum is a CRC-32 over all of them with their dtypes and shapes. It is there for accidents, such as a torn write
or a bad sector, which it misses once in 2^32, and never when all that is wrong lies within 32 bits; it takes a third
of the time of a cryptographic hash. Against someone who may write into the folder only the folder's mode protects.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from minillm.cache.pool import BlockLayout
from minillm.errors import MinillmError

FORMAT = b"minillm block 1"  # raised with every change of the file, or of what a pool's tensors mean
TOKEN_BYTES = 4
Payload = list[Tensor]  # of one block, on the CPU: what KVPool.read_block gives
Prefix = Sequence[int] | bytes  # tokens, or the same packed


class UnusableError(Exception):
    """Why a file cannot serve. reason: "corrupted", "foreign" (another key's) or "stale" (another layout's)."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens as little-endian int32. Packed once, the key of a request's block i is [: 4 * block_size * (i + 1)]."""
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error as error:
        raise MinillmError(f"a token must be a whole number of 32 bits ({error})") from None


def packed_of(prefix: Prefix) -> bytes:
    return prefix if isinstance(prefix, bytes) else pack(prefix)


def name_of(namespace_key: bytes, packed: bytes) -> str:
    """64 hexadecimal digits. The namespace's length keeps its end apart from the prefix's beginning."""
    return next(names_of(namespace_key, packed, [len(packed)]))


def names_of(namespace_key: bytes, packed: bytes, ends: Iterable[int]) -> Iterator[str]:
    """`name_of` of packed[:end] for each of growing `ends`, in time linear in the last."""
    digest = hashlib.sha256(b"%s %d " % (FORMAT, len(namespace_key)) + namespace_key)
    start = 0
    for end in ends:
        digest.update(packed[start:end])
        start = end
        yield digest.copy().hexdigest()


def encode(namespace_key: bytes, packed: bytes, payload: Payload) -> bytes:
    """The content of a block's file."""
    from safetensors.torch import save  # a bare GPU machine has no safetensors, and needs none without a disk tier

    held = {str(i): t for i, t in enumerate(payload)}
    checksum = torch.tensor([_checksum(namespace_key, packed, payload)])
    return save(held | {"namespace": _tensor(namespace_key), "prefix": _tensor(packed), "checksum": checksum})


def decode(content: bytes, namespace_key: bytes, packed: bytes, layout: BlockLayout | None) -> Payload:
    """The block's tensors, or UnusableError: whatever the bytes are, nothing else is raised."""
    from safetensors.torch import load

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
    if not same_key(found, prefix, namespace_key, packed):
        raise UnusableError("foreign")
    if layout is not None and tuple((t.dtype, tuple(t.shape)) for t in payload) != layout:
        raise UnusableError("stale")
    return payload


def same_key(found: bytes, prefix: bytes, namespace_key: bytes, packed: bytes) -> bool:
    return found == namespace_key and prefix == packed


def _checksum(namespace_key: bytes, packed: bytes, payload: Payload) -> int:
    described = f"{len(namespace_key)} {len(packed)} {[(str(t.dtype), tuple(t.shape)) for t in payload]}"
    crc = zlib.crc32(described.encode(), zlib.crc32(FORMAT))
    crc = zlib.crc32(packed, zlib.crc32(namespace_key, crc))
    for t in payload:
        crc = zlib.crc32(_bytes(t), crc)
    return crc


def _bytes(t: Tensor) -> memoryview:
    return t.reshape(-1).view(torch.uint8).numpy().data


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
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise


def read(path: Path, size: int) -> bytes:
    """At most size + 1 bytes: one too many shows that the file has grown. Follows no link. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        return file.read(size + 1)


def capacity_of(given: object) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise MinillmError(f"a tier's capacity must be a whole number of bytes, at least 1, got {given!r}")
    return given


def own(t: Tensor) -> Tensor:
    """t, or a copy where t is a window: it would keep more memory alive than is counted."""
    whole = t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes
    return t if whole else t.clone(memory_format=torch.contiguous_format)
