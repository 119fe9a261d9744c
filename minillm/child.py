"""A process of ours: started, heard, watched, and ended with us. Ranks and replicas are such (lessons 14 and 15).

Its standard input is a pipe from us, and it ends when that does (`end_with_parent`): so it is gone too if this process
is killed. Its last lines are kept, because they say why it died.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minillm.errors import MinillmError

LINES_KEPT, LINES_TOLD = 200, 4  # of what it writes to its standard error
LAST_WORDS_S = 5.0  # in which they are read, when it has ended: another process may hold the pipe open
KILLED_S = 10.0  # in which a killed process must be gone: one that hangs in a driver cannot be killed
_ALIVE: weakref.WeakSet[Child] = weakref.WeakSet()


class Child:
    """The process, the head of a session of its own: a Ctrl+C in our terminal does not reach it, and what it started is
    killed with it. Not what is such a Child itself (a rank of a replica): that ends with its standard input.

    told: what it can read first from its standard input. `ended` is set when it is gone and its last line is read.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], told: str = ""):
        self.lines: deque[str] = deque(maxlen=LINES_KEPT)
        self.ended = threading.Event()
        try:
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise MinillmError(f"cannot start {command[0]}: {error.strerror or error}") from None
        _ALIVE.add(self)
        readers = [
            threading.Thread(target=_each_line, args=(stream, hear), name="minillm-child", daemon=True)
            for stream, hear in ((self.process.stdout, self._hear), (self.process.stderr, self.lines.append))
        ]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._watch, args=(readers,), name="minillm-child", daemon=True).start()
        if told:
            assert self.process.stdin is not None
            with contextlib.suppress(OSError, ValueError):  # it has ended already: told by whoever asks for it
                self.process.stdin.write(told.encode())
                self.process.stdin.flush()  # and stays open: its end is ours

    def _hear(self, line: str) -> None:
        """A line of its standard output, in a thread of its own."""

    def _watch(self, readers: Sequence[threading.Thread]) -> None:
        # Its group's name is taken until it is waited for: the rest of the group ends first. (macOS: from 3.13 on.)
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):  # somebody else has waited for it
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
                self._signal(signal.SIGKILL)
        self.process.wait()  # no zombie stays
        for reader in readers:
            reader.join(LAST_WORDS_S)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None and not any(r.is_alive() for r in readers):
                with contextlib.suppress(OSError):
                    stream.close()
        self.ended.set()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """At once, with all that it has started. Does not wait for it."""
        if self.process.returncode is None:
            self._signal(signal.SIGKILL)

    def end(self, grace_s: float) -> None:
        """Ask it to end; kill it when it has not. Returns when it is gone, or does not even obey that."""
        if self.process.returncode is None:
            with contextlib.suppress(OSError):
                self.process.send_signal(signal.SIGTERM)
            if not self.ended.wait(grace_s + 1.0):
                self.kill()
        self.ended.wait(KILLED_S)
        _ALIVE.discard(self)

    def fate(self) -> str:
        """How it ended, in words."""
        code = self.process.returncode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def epitaph(self) -> str:
        """How it ended, and what it said last."""
        return f"process {self.process.pid} {self.fate()}{self.last_words()}"

    def last_words(self) -> str:
        last = list(self.lines)[-LINES_TOLD:]
        return "".join([". Its last lines:", *(f"\n  {line}" for line in last)]) if last else "; it said nothing"


def _each_line(stream: Any, hear: Callable[[str], None]) -> None:
    with contextlib.suppress(ValueError, OSError):  # it is closed
        for line in stream:
            if text := line.decode("utf-8", "replace").strip():
                hear(text[:2000])


def end_with_parent(end: Callable[[], Any]) -> None:
    """In the child, which has read what it was told: call `end` when whoever started it is gone, or lets it go."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        end()

    threading.Thread(target=watch, name="minillm-parent", daemon=True).start()


@atexit.register
def _end_all() -> None:
    """Whoever forgot to end a child leaves no process behind."""
    for left in list(_ALIVE):
        left.end(0.0)
