"""Where an answer runs: calls it with copies of the inputs, under a time limit, and reports what happened as data.

The same code runs inside a notebook (the check cells) and inside the sandbox (`minillm grade`), so both see the same
outcome. This file stands alone beside `wire`: the sandbox loads both by path. Tooling of all lessons.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE = 4.0  # an answer that sleeps, or does not get the processor, may take so many times its seconds


class OverTime(BaseException):
    """Raised inside an answer that runs too long. Not an `Exception`, so that `except Exception` lets it pass."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt the body once it has used so many `seconds` of the processor, or PATIENCE times as many have passed.

    So a busy machine costs no points. Needs POSIX and the main thread; elsewhere there is no limit.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    begun, used, ended = time.monotonic(), time.process_time(), False

    def ring(signum: int, frame: Any) -> None:
        may_go_on = time.process_time() - used < seconds and time.monotonic() - begun < PATIENCE * seconds
        if not (ended or may_go_on):
            raise OverTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.2)  # rings again: it may go on, or swallow OverTime by `except:`
    try:
        try:
            yield
        finally:
            ended = True  # a ring that is late must not come between here and the next line
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # or it would ring once `before` is back, which may end the process
        signal.signal(signal.SIGALRM, before)


class Host:
    """Holds the objects of a submission and calls them. `wire` is the module `minillm.course.wire`."""

    def __init__(
        self, wire: Any, callback: Callable[[int, list[Any]], Any] | None = None, swallow: bool = False,
        watch: Callable[[], Any] | None = None, world: Callable[..., Any] | None = None,
    ):  # fmt: skip
        """`watch()` is a context manager that gives a `minillm.course.kernel_watch.Watch`; world: `ranks.run`."""
        self.wire, self.callback, self.swallow, self.watch, self.world = wire, callback, swallow, watch, world
        self.objects: dict[Any, Any] = {}
        self.next = 0

    def keep(self, value: Any) -> int:
        self.next += 1
        self.objects[self.next] = value
        return self.next

    def call(
        self, target: Any, attr: str | None, args: list[Any] | None, limit: float, gaps: dict[str, int] | None = None,
        only: list[str] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Call object `target` (its attribute `attr`, when given) with encoded `args`; no `args`: just read `attr`.

        gaps   not None: watch what kernels touch; {"0": 5} puts 5 guards after each row of argument 0
        only   not None: on ranks, `args[rank]` are those of a rank, whose group has these methods
        """
        try:
            obj = self.objects[target]
            if args is None:
                with time_limit(limit):
                    result = getattr(obj, str(attr))
                return {"ok": self.wire.encode(result, self.keep), "changed": []}
            values = self.wire.decode(args, lambda i, _: self.objects[i], self._function)
            with contextlib.ExitStack() as watching:
                if gaps is not None:
                    if self.watch is None:
                        raise RuntimeError("this lesson's answers hold no kernels")
                    watch = watching.enter_context(self.watch())
                    watch.begin()
                    values = watch.place(values, {int(i): n for i, n in gaps.items()})
                with time_limit(limit):
                    function = obj if attr is None else getattr(obj, attr)
                    if only is not None:
                        if self.world is None:
                            raise RuntimeError("this lesson's answers do not run on ranks")
                        result, said = self.world(function, values, only)
                    else:
                        result = function(*values)
                    reply = {"ok": self.wire.encode(result, self.keep)}
                    if only is not None:
                        reply["said"] = said
                if gaps is not None:
                    reply["touched"] = watch.record(result)
                    watch.begin()
            after = self.wire.encode(values, lambda v: self._known(v))
            reply["changed"] = [[i, b] for i, (a, b) in enumerate(zip(args, after, strict=True)) if a != b]
            return reply
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not self.swallow:
                raise  # the learner pressed stop
            return describe(error)

    def _known(self, value: Any) -> int:
        return next((i for i, v in self.objects.items() if v is value), -1)

    def _function(self, number: int, wired: Any) -> Callable[..., Any]:
        def function(*args: Any) -> Any:
            assert self.callback is not None
            return self.callback(number, list(args))

        function._wire = wired  # type: ignore[attr-defined]  # so that it can travel back as itself
        return function


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as data: type, one-line message, and the submission's own line that raised it."""
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__  # Triton wraps what a kernel raised
    try:
        message = " ".join(str(error).split())[:300]
    except BaseException:
        message = ""
    return {"error": type(error).__name__[:80], "message": message, "where": where(error)}


def where(error: BaseException) -> str:
    """`line 4: y = x / 0` for the innermost line that is neither this package, nor torch, nor the standard library."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f"line {error.lineno}: {(error.text or '').strip()[:120]}"
    ours, library = os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.path.dirname(os.__file__)
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        name = frame.f_code.co_filename
        if name.startswith((ours, library, "<frozen")) or "site-packages" in name:
            continue
        if str(frame.f_globals.get("__name__")).startswith("minillm."):
            continue
        line = linecache.getline(name, number).strip()
        return f"line {number}: {line[:120]}"
    return ""
