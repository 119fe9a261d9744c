"""An exchange of rank 0 with the others, which must end as it began: between two, everybody listens. Lesson 14.

A step that rank 0 leaves half way would leave the others waiting in the middle of it, and the next would be answered
with this one's sums. So an interrupt (Ctrl+C, a notebook's stop button) is held back until the exchange has ended; a
second one breaks it off, and then the engine has ended, for the ranks are out of step.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from minillm.parallel.group import RankLost


class Turns:
    """why(error): after a collective has failed, which rank was lost and of what. lost(): the same, if one is.

    NCCL does not raise when a rank is lost: what still runs is aborted, and leaves rubbish. So nothing counts that was
    computed while one was lost, and no other error is its reason.
    """

    def __init__(self, why: Callable[[RankLost], RankLost], lost: Callable[[], RankLost | None] = lambda: None):
        self.why, self.lost = why, lost
        self.broken: RankLost | None = None
        self.under_way = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Raises RankLost when a rank is gone, when something fails in here, and ever after."""
        if self.broken is not None:
            raise self.broken
        with _interrupts_later():
            self.under_way = True
            try:
                yield
                if (lost := self.lost()) is not None:
                    raise lost
                self.under_way = False  # not after a fault: nobody listens any more
            except BaseException as error:
                self.broken = self._fault(error)
                if isinstance(error, Exception):
                    raise self.broken from error
                raise

    def _fault(self, error: BaseException) -> RankLost:
        if (lost := self.lost()) is not None:  # then all that fails here, in whatever words, fails because of it
            return lost
        if isinstance(error, RankLost):
            return self.why(error)
        what = f"{type(error).__name__}: {error!s:.300}".rstrip(": ")
        return RankLost(f"rank 0 left a step that the other ranks are still in ({what}); make a new engine")


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """In the main thread, where Python raises them: the first SIGINT comes at the end, the second at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # ignored, or not Python's
        yield
        return
    held: list[tuple[int, Any]] = []

    def later(number: int, frame: Any) -> None:
        if held:
            before(number, frame)
        held.append((number, frame))

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        before(*held[0])
