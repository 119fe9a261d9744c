"""A channel with a thread for each direction: nobody who has something to say waits for it to be said. Lesson 15.

An engine's step must not stop because a wire is full: what it says is queued here, in order, and sent by a thread. What
is queued and not yet sent can be taken back (`drop`), for a transfer that has ended holds nothing any more. And who is
behind with what was heard does not read on: the wire fills, and the other side waits (`busy`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from minillm.cluster.transport import Channel, ChannelClosed, Message
from minillm.errors import MinillmError

TICK_S = 0.05
MOST_POSTED, MOST_POSTED_BYTES = 256, 256 << 20  # for an engine's thread, of one peer


class _Said(NamedTuple):
    message: Message
    tensors: Sequence[Tensor]
    key: Hashable
    nbytes: int


class Posted:
    """What a link's threads leave for an engine's, by `call`, is counted until it is done: `behind` is a link's `busy`.

    done: called after each, in the engine's thread. Once the engine has ended nobody is behind: nothing is left for it.
    """

    def __init__(self, llm: Any, done: Callable[[], None]):
        self._llm, self._done, self._lock = llm, done, threading.Lock()
        self.count = self.nbytes = 0

    @property
    def behind(self) -> bool:
        """A step takes long, or the peer says more than it was asked for."""
        much = self.count >= MOST_POSTED or self.nbytes >= MOST_POSTED_BYTES
        return much and self._llm.dead is None

    def post(self, work: Callable[[], None], nbytes: int = 0) -> None:
        """work() in the engine's thread, which holds nbytes until then."""
        if self._llm.dead is not None:
            return

        def do() -> None:
            try:
                work()
            finally:
                self._add(-1, -nbytes)
                self._done()

        self._add(1, nbytes)
        self._llm.call(do)

    def _add(self, count: int, nbytes: int) -> None:
        with self._lock:
            self.count += count
            self.nbytes += nbytes


class Link:
    """hear(message, tensors) is called for each message, tick() about every tick_s seconds, lost(why) once, when the
    channel has ended, unless `close` ended it here. All by threads of the link. Nothing is received while busy(), which
    must not wait; say `look` when it may have changed."""

    def __init__(
        self, channel: Channel, hear: Callable[[Message, list[Tensor]], None], lost: Callable[[str], None],
        tick: Callable[[], None] = lambda: None, tick_s: float = TICK_S, busy: Callable[[], bool] = lambda: False,
    ):  # fmt: skip
        self.channel, self._hear, self._lost, self._tick, self._tick_s = channel, hear, lost, tick, tick_s
        self._busy = busy
        self._queue: deque[_Said] = deque()
        self._turn = threading.Condition()
        self.queued_bytes = 0
        self._ended = False
        self._threads = [
            threading.Thread(target=work, name=f"minillm-kv-{name}", daemon=True)
            for name, work in (("send", self._send_all), ("receive", self._receive_all))
        ]

    def start(self) -> Link:
        """RuntimeError if the process may have no more threads; then the channel is closed."""
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            self.close()
            raise
        return self

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def queued(self) -> int:
        """Messages that wait to be sent."""
        return len(self._queue)

    def look(self) -> None:
        """What `busy` says may have changed."""
        with self._turn:
            self._turn.notify_all()

    def say(
        self, message: Message, tensors: Sequence[Tensor] = (), key: Hashable = None, soon: bool = False
    ) -> None:  # fmt: skip
        """Queue a message; after the end of the channel, nothing. From any thread; never waits. The tensors must not
        change any more. key: by which it may be dropped. soon: before all that waits, but for the first, which may be
        under way."""
        with self._turn:
            if self._ended:
                return
            nbytes = sum(t.nbytes for t in tensors)
            place = min(1, len(self._queue)) if soon else len(self._queue)
            self._queue.insert(place, _Said(message, tensors, key, nbytes))
            self.queued_bytes += nbytes
            self._turn.notify_all()

    def drop(self, key: Hashable) -> None:
        """Take back what is queued under a key."""
        with self._turn:
            kept = [said for said in self._queue if said.key != key]
            self._queue = deque(kept)
            self.queued_bytes = sum(said.nbytes for said in kept)

    def close(self, timeout_s: float = 5.0) -> None:
        """End the channel and the threads. `lost` is not called."""
        self._end()
        self.channel.close()
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(timeout_s)

    def flush(self, timeout_s: float = 1.0) -> None:
        """Wait until everything is sent, but not for ever."""
        with self._turn:
            self._turn.wait_for(lambda: self._ended or not self._queue, timeout_s)

    def _end(self) -> bool:
        """True for the first who ends it."""
        with self._turn:
            first, self._ended = not self._ended, True
            self._queue.clear()
            self.queued_bytes = 0
            self._turn.notify_all()
        return first

    def _fall(self, why: str) -> None:
        if self._end():
            self.channel.close()
            self._lost(why)

    def _send_all(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._ended or self._queue)
                if self._ended:
                    return None
                said = self._queue[0]
            try:
                self.channel.send(said.message, said.tensors)
            except ChannelClosed as error:
                return self._fall(str(error))
            except Exception as error:  # it can be no message: a fault of ours, and the other side would wait for it
                return self._fall(f"{type(error).__name__}: {error}")
            with self._turn:
                if self._queue and self._queue[0] is said:  # it may have been dropped meanwhile
                    self._queue.popleft()
                    self.queued_bytes -= said.nbytes
                self._turn.notify_all()

    def _receive_all(self) -> None:
        due = time.monotonic()
        while not self._ended:
            wait = max(0.0, min(self._tick_s, due - time.monotonic()))
            with self._turn:
                ready = self._turn.wait_for(lambda: self._ended or not self._busy(), wait)
            try:
                received = self.channel.recv(wait) if ready else None
            except MinillmError as error:
                return self._fall(str(error))
            if received is not None and not self._ended:
                try:
                    self._hear(*received)
                except Exception as error:  # without this thread nobody would hear or tick, and nobody would know
                    return self._fall(f"a message could not be taken: {type(error).__name__}: {error}")
            if time.monotonic() >= due:
                due = time.monotonic() + self._tick_s
                with contextlib.suppress(Exception):
                    self._tick()
        return None
