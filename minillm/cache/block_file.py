"""The key of a block, and its file: one file a block, verified when read. Lesson 12's tiers use both.

KV depends on all tokens before it, so a block is named by a chain: SHA-256 over the digest of the block before it, its
own tokens, and who may read it (the namespace). A block's key has constant size, and a prompt of n blocks is named in
time linear in n. Whoever holds a block compares the whole key (namespace, parent's digest, own tokens) with the one
that is asked for; the name only finds it. So a name that two keys share costs a block and serves nobody a wrong one.
Two different prefixes have one key only if their parents' digests are equal. Then, going up both chains, at some block
two different inputs have the same SHA-256. Nobody can construct such a pair, and by accident it takes 2^128 blocks.
That is why the digest is no parameter: a weaker one would be all that stands between two prompts.

A file is a safetensors file: "namespace", "parent" and "tokens", the key; "0", "1", ..., the block's tensors;
"checksum", a CRC-32 over all of them with their dtypes and shapes. It is there for accidents, such as a torn write or
a bad sector, which it misses once in 2^32, and never when all that is wrong lies within 32 bits; it takes a third of
the time of a cryptographic hash. Against someone who may write into the folder only the folder's mode protects.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.cache.pool import BlockLayout
from minillm.errors import MinillmError

FORMAT = b"minillm block 2"  # raised with every change of the file, or of what a pool's tensors mean
DIGEST_BYTES = 32
Payload = list[Tensor]  # of one block, on the CPU: what KVPool.read_block gives


class Link(NamedTuple):
    """A block in a chain."""

    parent: bytes  # digest of the block before it; b"" for the first
    own: bytes  # its tokens, packed


Prefix = Sequence[int] | bytes | Link  # tokens from the first on, also packed, are a chain of one block


class UnusableError(Exception):
    """Why a file cannot serve. reason: "corrupted", "foreign" (another key's) or "stale" (another layout's)."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens as little-endian int32."""
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error as error:
        raise MinillmError(f"a token must be a whole number of 32 bits ({error})") from None


def link_of(prefix: Prefix) -> Link:
    if isinstance(prefix, Link):
        return prefix
    return Link(b"", prefix if isinstance(prefix, bytes) else pack(prefix))


def digest_of(namespace_key: bytes, prefix: Prefix) -> bytes:
    """32 bytes that stand for a block and all before it. Lengths keep apart where one part ends and the next begins."""
    link = link_of(prefix)
    head = b"%s %d %d " % (FORMAT, len(namespace_key), len(link.parent))
    return hashlib.sha256(b"".join((head, namespace_key, link.parent, link.own))).digest()


def name_of(namespace_key: bytes, prefix: Prefix) -> str:
    """64 hexadecimal digits, under which a tier finds the block."""
    return digest_of(namespace_key, prefix).hex()


class Chain:
    """The keys of one sequence's blocks, each digest computed once. 32 bytes a block are kept."""

    def __init__(self, block_size: int, reader: Callable[[int], bytes]):
        """reader(end): the namespace of the block that ends before token `end`."""
        self.block_size, self.reader = block_size, reader
        self._digests = [b""]  # what the block of this number follows

    def key(self, tokens: Sequence[int], i: int) -> tuple[bytes, Link]:
        """(namespace, link) of block i of `tokens`: always the same tokens, of which there may be more each time."""
        for n in range(len(self._digests) - 1, i):
            self._digests.append(digest_of(*self._key(tokens, n)))
        return self._key(tokens, i)

    def _key(self, tokens: Sequence[int], i: int) -> tuple[bytes, Link]:
        start, end = i * self.block_size, (i + 1) * self.block_size
        return self.reader(end), Link(self._digests[i], pack(tokens[start:end]))


def encode(namespace_key: bytes, prefix: Prefix, payload: Payload) -> bytes:
    """The content of a block's file."""
    from safetensors.torch import save  # a bare GPU machine has no safetensors, and needs none without a disk tier

    link = link_of(prefix)
    held = {str(i): t for i, t in enumerate(payload)}
    for name, part in (("namespace", namespace_key), ("parent", link.parent), ("tokens", link.own)):
        held[name] = _tensor(part)
    return save(held | {"checksum": torch.tensor([_checksum(namespace_key, link, payload)])})


def decode(content: bytes, namespace_key: bytes, prefix: Prefix, layout: BlockLayout | None) -> Payload:
    """The block's tensors, or UnusableError: whatever the bytes are, nothing else is raised."""
    from safetensors.torch import load

    try:
        held = load(content)
        found, parent, own = (_bytes(held.pop(name)).tobytes() for name in ("namespace", "parent", "tokens"))
        link = Link(parent, own)
        checksum = held.pop("checksum").item()
        payload = [held[str(i)] for i in range(len(held))]
        sound = checksum == _checksum(found, link, payload)
    except Exception:  # bytes from a disk may break any reader anywhere
        raise UnusableError("corrupted") from None
    if not sound:
        raise UnusableError("corrupted")
    if not same_key(found, link, namespace_key, link_of(prefix)):
        raise UnusableError("foreign")
    if layout is not None and tuple((t.dtype, tuple(t.shape)) for t in payload) != layout:
        raise UnusableError("stale")
    return payload


def same_key(found: bytes, link: Link, namespace_key: bytes, asked: Link) -> bool:
    return found == namespace_key and link == asked


def _checksum(namespace_key: bytes, link: Link, payload: Payload) -> int:
    sizes = f"{len(namespace_key)} {len(link.parent)} {len(link.own)}"
    described = f"{sizes} {[(str(t.dtype), tuple(t.shape)) for t in payload]}"
    crc = zlib.crc32(described.encode(), zlib.crc32(FORMAT))
    for part in (namespace_key, link.parent, link.own):
        crc = zlib.crc32(part, crc)
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
