"""The sandbox's second guard: an audit hook that judges every path, process and connection CPython reports.

It cannot be removed by Python code, but it sees only what is reported. ctypes, a native reader of files that is not
taken away below, a race between its look and the system call, or code that repairs what it relies on (`os.lstat`, a
closure's cell, `gc.get_objects`) passes it by. Where Landlock is on, the kernel still refuses what such code does to
files. This file stands alone: the sandbox loads it by path. Tooling of all lessons.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import Any

PROCESSES = (
    "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "pty.spawn",
    "os.kill", "os.killpg", "signal.pthread_kill", "os.startfile",
)  # fmt: skip
NETWORK = ("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostby")
# event: how many paths its arguments start with (of a symbolic link, the second is what changes)
CHANGES = {
    "os.remove": 1, "os.rename": 2, "os.rmdir": 1, "os.mkdir": 1, "os.link": 2, "os.symlink": 2, "os.truncate": 1,
    "os.chmod": 1, "os.chown": 1, "os.utime": 1, "os.chflags": 1, "os.setxattr": 1, "os.removexattr": 1,
    "sqlite3.connect": 1,
}  # fmt: skip
DIR_FDS = {"os.remove": 1, "os.rename": 2, "os.rmdir": 1, "os.mkdir": 2, "os.link": 2, "os.symlink": 2, "os.chmod": 2,
           "os.chown": 3, "os.utime": 3}  # fmt: skip  # event: where its folder descriptors begin
# What the hook would not see: taken out of the modules.
UNSEEN = {
    "posix": ("pidfd_open", "mknod", "mkfifo", "chroot", "unshare", "setns"),
    "os": ("pidfd_open", "mknod", "mkfifo", "chroot", "unshare", "setns"),
    "_signal": ("pidfd_send_signal",),
    "signal": ("pidfd_send_signal",),
    "_posixsubprocess": ("fork_exec",),
    "subprocess": ("_fork_exec",),
}
NATIVE = ("posix", "_signal", "_posixsubprocess")  # a second import of these would bring the functions back


def take_away(torch_too: bool) -> None:
    """Replace the functions that act without an audit event. torch takes seconds to import: only if it must be."""
    import shutil
    import subprocess  # noqa: F401  (loaded now, so that its copy of fork_exec is replaced)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("while grading, an answer cannot start or signal processes, or open files in native code")

    for name, functions in UNSEEN.items():
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            for function in functions:
                if hasattr(module, function):
                    setattr(module, function, refuse)
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # rmtree opens folders, which the hook refuses
    if torch_too:
        with contextlib.suppress(Exception):  # not there, or too little memory: then no answer has it either
            import torch

            storages = (torch.UntypedStorage, torch.TypedStorage, torch._C.StorageBase)
            for holder in (torch, torch._C._VariableFunctions, torch.ops.aten, *storages):
                with contextlib.suppress(TypeError, AttributeError):
                    holder.from_file = refuse  # type: ignore[union-attr, method-assign]
            torch._C.PyTorchFileReader = refuse  # type: ignore[assignment, misc]


def hook(readable: list[str], forbidden: list[str], scratch: str) -> Any:
    """The audit hook. Paths are judged by where they lead."""
    opened = tuple(os.path.realpath(f) for f in readable)
    closed = tuple(os.path.realpath(f) for f in forbidden)
    realpath, isdir, fsdecode, separator = os.path.realpath, os.path.isdir, os.fsdecode, os.sep
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    loaded = sys.modules

    def inside(path: str, folders: tuple[str, ...]) -> bool:
        return any(path == folder or path.startswith(folder.rstrip(separator) + separator) for folder in folders)

    def writable(path: Any) -> bool:
        if isinstance(path, int):
            return True
        real = realpath(fsdecode(path))
        return inside(real, (scratch,)) or real == os.devnull

    def opens(path: Any, flags: int) -> None:
        real = realpath(fsdecode(path))
        if flags & writing and not writable(path):
            raise PermissionError(f"while grading, an answer cannot write to {path!r}")
        if real.endswith(".ipynb") or inside(real, closed) or not inside(real, (*opened, scratch)):
            raise PermissionError("while grading, an answer cannot read notebooks or the course's own files")
        if isdir(real):  # a folder's descriptor makes relative paths of the next os.open that no event tells
            raise PermissionError(f"while grading, an answer cannot open a folder: {path!r}")

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            if args[0] is not None and not isinstance(args[0], int):
                opens(args[0], args[2])
        elif event == "import":
            if args[0].startswith("minillm.") and args[0] not in loaded:
                raise ImportError(f"while grading, an answer cannot import {args[0]}; write it yourself")
            if args[0].rpartition(".")[2] in NATIVE:
                raise ImportError(f"while grading, an answer cannot import {args[0]} afresh")
        elif event.startswith(PROCESSES):
            raise PermissionError("while grading, an answer cannot start or signal processes")
        elif event.startswith(NETWORK):
            raise PermissionError("while grading, there is no network")
        elif event in CHANGES and args[0] != ":memory:":
            paths = args[: CHANGES[event]] if event != "os.symlink" else args[1:2]
            relative = any(fd not in (None, -1) for fd in args[DIR_FDS.get(event, len(args)) :])
            if relative or not all(writable(p) for p in paths):
                raise PermissionError(f"while grading, an answer cannot change {args[0]!r}")

    return watch
