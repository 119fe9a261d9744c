"""A channel inside one process: two queues. Lessons, tests, and two engines that share a process. Lesson 15.

It copies and judges like the others, so that what works here works between processes.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from minillm.cluster import frame
from minillm.cluster.transport import STALL_S, AcceptQueue, Channel, ChannelClosed, Message, Received


class _Wire:
    """One direction: whole frames, at most max_bytes of them (or one larger one)."""

    def __init__(self, max_bytes: int):
        self.max_bytes, self.nbytes = max_bytes, 0
        self.frames: deque[tuple[bytes, list[Tensor], int]] = deque()

    def room_for(self, nbytes: int) -> bool:
        return not self.frames or self.nbytes + nbytes <= self.max_bytes


class InProcessChannel:
    """One end of `pair()`."""

    def __init__(self, out: _Wire, into: _Wire, turn: threading.Condition, ended: list[str], stall_s: float):
        self._out, self._in, self._turn, self._ended, self._stall_s = out, into, turn, ended, stall_s
        self._closed_here = False
        self._sending = threading.Lock()

    @property
    def closed(self) -> str | None:
        return self._ended[0] if self._ended else None

    def send(self, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        head, payload = frame.encode(message, tensors)
        nbytes = len(head) + payload
        with self._sending:
            with self._turn:
                self._wait_for_room(nbytes)
            copies = [t.detach().to("cpu", copy=True).contiguous() for t in tensors]
            with self._turn:  # only this thread has filled the wire meanwhile, so the room is still there
                self._check_open()
                self._out.frames.append((head, copies, nbytes))
                self._out.nbytes += nbytes
                self._turn.notify_all()

    def recv(self, timeout_s: float) -> Received | None:
        with self._turn:
            self._turn.wait_for(lambda: self._in.frames or self._ended, timeout_s)
            if self._closed_here or (self._ended and not self._in.frames):
                raise ChannelClosed(self._ended[0])
            if not self._in.frames:
                return None
            head, tensors, nbytes = self._in.frames.popleft()
            self._in.nbytes -= nbytes
            self._turn.notify_all()
        size, payload = frame.judge_prefix(head[: frame.PREFIX.size])
        message, _ = frame.judge_header(head[-size:], payload)
        return message, tensors

    def close(self) -> None:
        self._end("the channel was closed")

    def _end(self, why: str) -> None:
        with self._turn:
            self._closed_here = True
            self._in.frames.clear()
            self._in.nbytes = 0
            if not self._ended:
                self._ended.append(why)
            self._turn.notify_all()

    def _check_open(self) -> None:
        if self._ended:
            raise ChannelClosed(self._ended[0])

    def _wait_for_room(self, nbytes: int) -> None:
        held, deadline = self._out.nbytes, time.monotonic() + self._stall_s
        while not self._ended and not self._out.room_for(nbytes):
            if self._out.nbytes != held:
                held, deadline = self._out.nbytes, time.monotonic() + self._stall_s
            if not self._turn.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                self._end(f"the other side has read nothing for {self._stall_s:g} s")
        self._check_open()


def pair(max_bytes: int = 32 << 20, stall_s: float = STALL_S) -> tuple[InProcessChannel, InProcessChannel]:
    """Two ends of one channel. max_bytes: how much each direction holds before a sender waits."""
    one, two, turn, ended = _Wire(max_bytes), _Wire(max_bytes), threading.Condition(), list[str]()
    return InProcessChannel(one, two, turn, ended, stall_s), InProcessChannel(two, one, turn, ended, stall_s)


_listeners: dict[str, InProcessListener] = {}


class InProcessListener:
    """Where threads of this process connect."""

    def __init__(self, key: bytes, max_bytes: int = 32 << 20):
        self._key, self._max_bytes = key, max_bytes
        self._arrived = AcceptQueue()
        name = secrets.token_hex(8)
        self.address = f"in-process:{name}"
        _listeners[name] = self

    def accept(self, timeout_s: float) -> Channel | None:
        return self._arrived.get(timeout_s)

    def close(self) -> None:
        _listeners.pop(self.address.partition(":")[2], None)
        self._arrived.close()

    def _connect(self, key: bytes) -> Channel:
        if not hmac.compare_digest(key, self._key):
            raise ChannelClosed(f"{self.address} has another key; both sides need the same one")
        mine, theirs = pair(self._max_bytes)
        if not self._arrived.put(theirs):
            raise ChannelClosed(f"{self.address} takes nobody in now")
        return mine


def connect(name: str, key: bytes) -> Channel:
    """A channel to the listener "in-process:NAME" of this process."""
    if name not in _listeners:
        raise ChannelClosed(f"nobody listens at in-process:{name:.80} in this process")
    return _listeners[name]._connect(key)
