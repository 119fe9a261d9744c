"""The grader's side of the sandbox: starts it, feeds it the cells, calls answers, and survives whatever they do.

References and expected values stay on this side. Replies are JSON with plain data and tensors, checked for size and
form (`wire`), never unpickled. A process that hangs or dies is replaced, without the cell that killed it.
Tooling of all lessons.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm.course import wire
from minillm.course.host import PATIENCE
from minillm.course.tasks import Lesson
from minillm.errors import MinillmError

PACKAGE = Path(__file__).resolve().parents[1]
START_S = 60.0  # for the interpreter, the modules of the lesson and torch, before any cell
TORCH = re.compile(r"^\s*(?:import|from)\s+torch\b", re.MULTILINE)
GRACE_S = 2.0  # a call that ignores the alarm inside the sandbox is killed this much later
STARTS = 8  # processes for one notebook
GUARDS = ("landlock", "audit")  # both where there are both; tests switch them off
SYSTEM = (  # what an interpreter and its packages read: libraries, fonts, time zones, the number of cores
    "/usr", "/lib", "/lib64", "/bin", "/opt/homebrew", "/System", "/Library", "/etc/ld.so.cache", "/etc/localtime",
    "/etc/fonts", "/etc/mime.types", "/etc/passwd", "/etc/nsswitch.conf", "/proc/cpuinfo", "/proc/meminfo",
    "/proc/stat", "/proc/sys", "/sys/devices/system", "/sys/fs/cgroup", "/dev/null", "/dev/zero", "/dev/urandom",
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What one notebook may use: wall-clock seconds in all; seconds of `time_limit` for one cell and for one call of an
    answer; memory in MiB."""

    total_s: float = 120.0
    cell_s: float = 20.0
    call_s: float = 60.0  # a task's own `limit_s` is usually lower
    memory_mb: int = 3072


@dataclass(frozen=True)
class Source:
    """A code cell of the submission (`number` counts code cells from 1), or the place of a check."""

    number: int
    text: str
    check: str | None = None  # a task id: here `check(id, name)` stands


class Lost(Exception):
    """The sandbox ended, hung, or does not speak the protocol. `hung` tells a time-out from an end."""

    def __init__(self, text: str, hung: bool = False):
        super().__init__(text)
        self.hung = hung


@dataclass
class Session:
    """One submission in a sandbox. A `Transport` for `Candidate`; its roots are task ids."""

    lesson: Lesson
    sources: Sequence[Source]
    limits: Limits = field(default_factory=Limits)
    problems: list[str] = field(default_factory=list)  # of cells, for the learner
    found: set[str] = field(default_factory=set)  # task ids whose answer is there
    names: list[str] = field(default_factory=list)  # everything callable the notebook defines
    guard: str = ""  # what guards the files: "landlock" or "audit"

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._skip: set[int] = set()
        self._starts = 0
        self._deadline = time.monotonic() + self.limits.total_s
        self._scratch = tempfile.mkdtemp(prefix="minillm-grade-")

    def __enter__(self) -> Session:
        self.load()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        shutil.rmtree(self._scratch, ignore_errors=True)

    # Cells

    def load(self) -> None:
        """Run all cells in a fresh process; leave out those that end or hang it."""
        while True:
            at = 0
            try:
                if self._starts >= STARTS:
                    raise Lost(f"the process ended {STARTS} times; it is not started again")
                self._start()
                message = self._receive(self.limits.cell_s + START_S)
                self.guard = str(message.get("guard", ""))
                while "cell" in (message := self._receive(PATIENCE * self.limits.cell_s + GRACE_S)):
                    at = int(message["cell"])
                self._loaded(message)
                return
            except Lost as lost:
                reason = self._why(lost)
                self._stop()
                if not at or self._starts >= STARTS or time.monotonic() >= self._deadline:
                    self._note(f"the notebook cannot be run: {reason}")
                    return
                self._skip.add(at)
                self._note(f"cell {at} ({self._title(at)}) {reason}; the other cells are graded without it")

    def _loaded(self, message: Any) -> None:
        try:
            for number, error in message["loaded"]:
                at = f" at {error['where']}" if error["where"] else ""
                what = {"OverTime": "did not end in time", "SystemExit": "ended the program with SystemExit"}.get(
                    error["error"], f"raised {error['error']}: {error['message']}"
                )
                self._note(f"cell {int(number)} ({self._title(int(number))}) {what}{at}")
            self.found = {str(t) for t in message["found"]} & set(self.lesson.by_id)
            self.names = [str(n) for n in message["names"]]
        except (KeyError, TypeError, ValueError):
            raise Lost("it does not speak the grader's protocol") from None

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem[:500])

    def _title(self, number: int) -> str:
        lines = next((s.text for s in self.sources if s.number == number and not s.check), "").strip().splitlines()
        return (lines[0] if lines else "")[:50]

    # Calls

    def request(
        self, target: Any, attr: str | None, args: list[Any] | None, limit: float, functions: list[Any],
        gaps: dict[str, int] | None = None, only: list[str] | None = None,
    ) -> Any:  # fmt: skip
        """`Host.call` inside the sandbox; callbacks are served here. Never raises for what the submission does."""
        if time.monotonic() >= self._deadline:
            return _gone(f"the {self.limits.total_s:g} s for the whole notebook are over")
        if self._process is None:
            self.load()
        if self._process is None:
            return _gone("the notebook cannot be run any more; see the problems of the file")
        try:
            self._send({"target": target, "attr": attr, "args": args, "limit": limit, "gaps": gaps, "only": only})
            end = time.monotonic() + PATIENCE * limit + GRACE_S
            while "callback" in (reply := self._receive(end - time.monotonic())):
                self._send(self._serve(reply, functions))
            return reply
        except wire.WireError as error:
            self._stop()
            return _gone(f"the result cannot be read: {error}")
        except Lost as lost:
            reason = self._why(lost)
            self._stop()
            return {"error": "OverTime"} if lost.hung else _gone(f"while it ran, the process {reason}")

    def _serve(self, message: Any, functions: list[Any]) -> Any:
        try:
            args = wire.decode(message["args"], lambda i, name: object())
            return {"ok": wire.encode(functions[int(message["callback"])](*args))}
        except Exception as error:
            return {"error": type(error).__name__, "message": str(error)[:500]}

    # The process

    def _start(self) -> None:
        if os.name != "posix":
            raise MinillmError("minillm grade needs Linux or macOS; the check cells of a notebook work everywhere")
        self._starts += 1
        scratch = Path(self._scratch, str(self._starts))
        scratch.mkdir()
        root = PACKAGE.parent
        forbidden = [PACKAGE, *(p for n in ("solutions", "tests", "kernels", ".git") if (p := root / n).exists())]
        # Not the folder of the exercises, nor a checkout; an installed course shares its folder with the packages.
        out = {os.path.realpath(os.getcwd())} | ({str(root)} if (root / "pyproject.toml").exists() else set())
        path = [p for p in sys.path if p and os.path.realpath(p) not in out]
        setup = {
            "package": str(PACKAGE),
            "path": path,
            "readable": [*path, sys.prefix, sys.base_prefix, *SYSTEM],
            "guards": list(GUARDS),
            "allow": list(self.lesson.allow),
            "torch": any(TORCH.search(s.text) for s in self.sources if s.number not in self._skip),
            "forbidden": [str(p) for p in forbidden],
            "scratch": str(scratch),
            "cpu_s": self.limits.total_s + 30,
            "memory_mb": self.limits.memory_mb,
            "cell_s": self.limits.cell_s,
            "names": {task.id: task.name for task in self.lesson.tasks},
            "cells": [
                {"keep": s.check, "name": self.lesson.by_id[s.check].name}
                if s.check
                else {"number": s.number, "source": s.text}
                for s in self.sources
                if s.number not in self._skip and (s.check is None or s.check in self.lesson.by_id)
            ],
        }
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT")}
        own = {
            "HOME": str(scratch), "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1", "IPYTHONDIR": str(scratch), "MPLCONFIGDIR": str(scratch),
        }  # fmt: skip
        try:
            with open(scratch / "stderr", "wb") as stderr:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", str(PACKAGE / "course" / "sandbox.py")],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, cwd=scratch, env=kept | own,
                    start_new_session=True, bufsize=0,
                )  # fmt: skip
        except OSError as error:
            raise MinillmError(f"the sandbox does not start: {error}") from None
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._send(setup)

    def _stop(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                stream.close()
        self._process = None

    def _why(self, lost: Lost) -> str:
        """`ended by itself (exit code 3)`, or what `lost` says when the process is still there."""
        process = self._process
        if process is None or lost.hung:
            return str(lost)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        if process.returncode is None:
            return str(lost)
        with contextlib.suppress(OSError):
            if text := Path(self._scratch, str(self._starts), "stderr").read_text(errors="replace").strip():
                raise MinillmError(f"the sandbox does not start: {text.splitlines()[-1][:300]}")
        code = process.returncode
        if code >= 0:
            return f"ended by itself (exit code {code})"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        if name in ("SIGSEGV", "SIGBUS"):
            return f"died ({name}): a load or store went outside its memory"
        return f"was killed ({name}: a crash, or beyond its limits)"

    def _send(self, message: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        raw = wire.dumps(message)
        raw = len(raw).to_bytes(8, "big") + raw
        fd, end = self._process.stdin.fileno(), time.monotonic() + 10
        view = memoryview(raw)
        while view:
            ready = select.select([], [fd], [], max(0.0, end - time.monotonic()))[1]
            if not ready:
                raise Lost("it does not take any more input", hung=True)
            try:
                view = view[os.write(fd, view[:65536]) :]
            except BlockingIOError:
                continue
            except OSError:
                raise Lost("ended") from None

    def _receive(self, seconds: float) -> Any:
        end = min(time.monotonic() + seconds, self._deadline)
        size = int.from_bytes(self._read(8, end), "big")
        if size > wire.LIMIT_BYTES:
            raise Lost(f"sent {size} bytes, more than a check takes")
        try:
            message = wire.loads(self._read(size, end))
        except wire.WireError as error:
            raise Lost(str(error)) from None
        if not isinstance(message, dict):
            raise Lost("it does not speak the grader's protocol")
        return message

    def _read(self, size: int, end: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        fd, parts, got = self._process.stdout.fileno(), [], 0
        while got < size:
            if not select.select([fd], [], [], max(0.0, end - time.monotonic()))[0]:
                raise Lost("did not end in time", hung=True)
            part = os.read(fd, min(size - got, 1 << 20))
            if not part:
                raise Lost("ended")
            parts.append(part)
            got += len(part)
        return b"".join(parts)


def _gone(text: str) -> dict[str, str]:
    return {"error": "Gone", "message": text}
