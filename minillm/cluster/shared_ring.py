"""Memory that two processes share, without a name. Lesson 15 needs it.

It is an anonymous file whose descriptor goes from one process to the other, not a named segment as in
`multiprocessing.shared_memory`: without a name there is nothing that a killed process leaves behind, that a resource
tracker unlinks under somebody's feet, or that a peer could say to get at the memory of others. Nor does the size of
/dev/shm bound it. It is sealed, since a file that shrinks under a mapping ends the process that reads it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import tempfile

from minillm.errors import MinillmError

MAX_WINDOW = 1 << 30
SEALED = hasattr(os, "memfd_create")  # Linux; elsewhere an unlinked file, and a peer that has the key is trusted more


class Ring:
    """`size` bytes of memory that two processes see. A reader's is mapped read-only."""

    def __init__(self, fd: int, size: int, writable: bool):
        self.size, self._at = size, 0
        self._memory = memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)))

    def _pieces(self, count: int) -> list[slice]:
        first = min(count, self.size - self._at)
        return [slice(self._at, self._at + first), *([slice(0, count - first)] if count > first else [])]

    def write(self, part: memoryview) -> None:
        done = 0
        for piece in self._pieces(len(part)):
            self._memory[piece] = part[done : done + piece.stop - piece.start]
            done += piece.stop - piece.start
        self._at = (self._at + len(part)) % self.size

    def read(self, into: memoryview) -> None:
        done = 0
        for piece in self._pieces(len(into)):
            into[done : done + piece.stop - piece.start] = self._memory[piece]
            done += piece.stop - piece.start
        self._at = (self._at + len(into)) % self.size


def new_memory(size: int) -> int:
    """A descriptor of `size` bytes of zeros without a name, which cannot shrink where the system can promise it."""
    if not SEALED:
        with tempfile.TemporaryFile() as file:
            file.truncate(size)
            return os.dup(file.fileno())
    fd = os.memfd_create("minillm-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def judge_memory(fd: int, size: int) -> None:
    """Raises MinillmError unless fd is memory as `new_memory` makes it: reading it cannot end this process."""
    status = os.fstat(fd)
    if not 0 < size <= MAX_WINDOW or not stat.S_ISREG(status.st_mode) or status.st_size != size:
        raise MinillmError(f"the other side offered memory of {size} bytes, and it is something else")
    if SEALED:
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:
            sealed = 0
        if not sealed:
            raise MinillmError("the other side offered memory that it could take away again")
