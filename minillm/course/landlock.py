"""The kernel's guard of the sandbox: Landlock, an allow-list that a process can put on itself and never take off.

Afterwards the kernel refuses, to Python and native code alike: reading outside `readable`, writing outside `writable`,
executing any program, TCP (Linux 6.7 and later), and signals to processes outside (6.12 and later). It says nothing on
chmod, chown, utime, stat and fork. Without Linux 5.13 or with Landlock off, `restrict` does nothing and returns False.
This file stands alone: the sandbox loads it by path. Source: userspace-api/landlock of the kernel. Tooling of lessons.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same number on every architecture Python runs torch on
WRITE_FILE, READ_FILE, READ_DIR = 1 << 1, 1 << 2, 1 << 3
ALL_V1 = (1 << 13) - 1  # also: execute, remove and make entries of every kind
REFER, TRUNCATE = 1 << 13, 1 << 14  # since version 2 and 3
OF_FILES = WRITE_FILE | READ_FILE | TRUNCATE  # the rights that a rule on a file, not a folder, may hold
EXECUTE, MAKE_CHAR, MAKE_BLOCK = 1 << 0, 1 << 6, 1 << 11
NET_TCP = 0b11  # bind and connect, since version 4
SCOPES = 0b11  # abstract Unix sockets and signals, since version 6
NO_NEW_PRIVS = 38


def version(libc: ctypes.CDLL) -> int:
    """The kernel's Landlock version; 0 where there is none."""
    return max(0, int(libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1))) if sys.platform == "linux" else 0


def open_parts(folder: str, holes: Sequence[str]) -> Iterator[tuple[str, int]]:
    """(path, rights) that let `folder` be read without `holes`. Rules only add rights, so a hole is cut by naming
    its neighbours; the names in a folder that has a hole may still be listed."""
    folder = os.path.realpath(folder)
    if any(_inside(folder, hole) for hole in holes) or not os.path.exists(folder):
        return
    if not any(_inside(hole, folder) for hole in holes):
        yield folder, READ_FILE | READ_DIR
        return
    yield folder, READ_DIR
    for name in sorted(os.listdir(folder)):
        yield from open_parts(os.path.join(folder, name), holes)


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def restrict(readable: Iterable[str], holes: Iterable[str], writable: Iterable[str]) -> bool:
    """Put the guard on this thread and all that it starts. True: it is on."""
    libc = ctypes.CDLL(None, use_errno=True)
    abi = version(libc)
    if not abi:
        return False
    handled = ALL_V1 | (REFER if abi >= 2 else 0) | (TRUNCATE if abi >= 3 else 0)
    fields = (handled, NET_TCP, SCOPES)[: 3 if abi >= 6 else 2 if abi >= 4 else 1]
    attr = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = libc.syscall(CREATE_RULESET, attr, ctypes.c_size_t(len(attr)), 0)
    if ruleset < 0:
        return False
    closed = [os.path.realpath(hole) for hole in holes]
    rules = [rule for folder in readable for rule in open_parts(folder, closed)]
    rules += [(path, handled & ~(EXECUTE | MAKE_CHAR | MAKE_BLOCK)) for path in writable]
    try:
        for path, rights in dict.fromkeys(rules):
            _allow(libc, ruleset, path, rights & handled)
        libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
        return bool(libc.syscall(RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not there, or not ours: stays closed
    try:
        if not os.path.isdir(path):
            rights &= OF_FILES
        if libc.syscall(ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, fd), 0):
            raise OSError(ctypes.get_errno(), f"Landlock takes no rule for {path}")
    finally:
        os.close(fd)
