"""A channel over a stream of bytes with credit: what the wires between processes share. Lesson 15.

The reader lends a window of bytes. A writer spends it, waits when it is spent, and gets back what has been read: that
is back-pressure, and it bounds memory whatever the other side does. The next byte goes straight into the tensor that
it belongs to; how bytes move is the wire's business (shared_memory.py, distributed.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from torch import Tensor

from minillm.cluster import frame
from minillm.cluster.transport import STALL_S, ChannelClosed, Message, Received
from minillm.errors import MinillmError

STEP = 1 << 20  # bytes written before the reader hears of them, so that both sides copy at the same time


class StreamChannel:
    """`Channel` over the five methods below. The wire's own thread calls `_arrived`, `_granted` and `_end`."""

    def __init__(self, window: int, peer_window: int, stall_s: float = STALL_S):
        self._window, self._peer_window, self._stall_s = window, peer_window, stall_s
        self._turn = threading.Condition()
        self._credit, self._ready, self._owed = (
            peer_window,
            0,
            0,
        )  # may be written; may be read; read but not given back
        self._ended: str | None = None
        self._closed_here = False
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._begin_frame()

    # What a wire does. None of them waits for the other side's application.
    def _write(self, part: memoryview) -> None:
        """Append bytes to the stream; there is credit for them. Raises OSError if the wire is broken."""
        raise NotImplementedError

    def _flush(self) -> None:
        """Let the other side know of all that was written."""
        raise NotImplementedError

    def _read(self, into: memoryview) -> None:
        """Take the next len(into) bytes, which have arrived."""
        raise NotImplementedError

    def _grant(self, count: int) -> None:
        """Tell the other side that it may write `count` bytes more."""
        raise NotImplementedError

    def _release(self) -> None:
        """Called once, at the end of this side: tell the other side, give back what the wire holds."""
        raise NotImplementedError

    @property
    def closed(self) -> str | None:
        return self._ended

    def send(self, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        head, _ = frame.encode(message, tensors)
        with self._sending:
            self._check_open()
            try:
                self._put(memoryview(head))
                for t in tensors:
                    self._put(frame.as_bytes(t))
                self._flush()
            except OSError as error:
                self._fail(f"the wire broke while a message was sent ({error})")
                self._check_open()
            except BaseException:  # half a frame is on the wire, which nobody can make whole
                if self._ended is None:
                    self._fail("a message broke off while it was sent")
                raise

    def recv(self, timeout_s: float) -> Received | None:
        deadline = time.monotonic() + timeout_s
        with self._receiving:
            while True:
                into = self._targets[0] if self._targets else memoryview(b"")
                if not into:
                    if (whole := self._next_part()) is not None:
                        return whole
                    continue
                count = self._wait_for_bytes(len(into), deadline)
                if not count:
                    return None
                self._read(into[:count])
                self._targets[0] = into[count:]
                self._give_back(count)

    def close(self) -> None:
        self._fail("the channel was closed")

    # Called by the wire's thread.
    def _arrived(self, count: int) -> None:
        with self._turn:
            if self._ready + self._owed + count > self._window:
                raise MinillmError(f"the other side wrote {count} bytes more than it may")
            self._ready += count
            self._turn.notify_all()

    def _granted(self, count: int) -> None:
        with self._turn:
            if self._credit + count > self._peer_window:
                raise MinillmError(f"the other side gave back {count} bytes that it did not have")
            self._credit += count
            self._turn.notify_all()

    def _end(self, why: str) -> None:
        """The channel has ended; what arrived before may still be read. The first reason stays."""
        with self._turn:
            if self._ended is None:
                self._ended = why
            self._turn.notify_all()

    def _fail(self, why: str) -> None:
        """This side ends the channel, and reads no more."""
        with self._turn:
            self._end(why)
            first, self._closed_here = not self._closed_here, True
        if first:
            self._release()

    def _check_open(self) -> None:
        if self._ended is not None:
            raise ChannelClosed(self._ended)

    def _put(self, part: memoryview) -> None:
        while part:
            if not self._credit:
                self._flush()  # or the other side would wait for what this one keeps
            count = self._take_credit(min(len(part), STEP))
            self._write(part[:count])
            part = part[count:]

    def _take_credit(self, most: int) -> int:
        """1 to `most` bytes that may be written, as soon as there is one."""
        with self._turn:
            if self._turn.wait_for(lambda: self._credit or self._ended is not None, self._stall_s):
                self._check_open()
                count = min(most, self._credit)
                self._credit -= count
                return count
        self._fail(f"the other side has read nothing for {self._stall_s:g} s")
        raise ChannelClosed(str(self._ended))

    def _wait_for_bytes(self, most: int, deadline: float) -> int:
        """How many bytes, at most `most`, can be read now; 0 if there were none until the deadline."""
        with self._turn:
            self._turn.wait_for(lambda: self._ready or self._ended is not None, max(0.0, deadline - time.monotonic()))
            if self._closed_here or (self._ended is not None and not self._ready):
                cut = "" if self._at_start and not self._closed_here else ", in the middle of a message"
                raise ChannelClosed(f"{self._ended}{'' if self._closed_here else cut}")
            count = min(most, self._ready)
            self._ready -= count
            self._owed += count
            return count

    def _give_back(self, count: int) -> None:
        with self._turn:
            batch = self._owed if self._owed >= self._window // 4 else 0
            self._owed -= batch
            open_ = self._ended is None
        if batch and open_:
            try:
                self._grant(batch)
            except OSError as error:
                self._end(f"the wire broke ({error})")

    def _begin_frame(self) -> None:
        self._prefix = bytearray(frame.PREFIX.size)
        self._header: bytearray | None = None
        self._tensors: list[Tensor] | None = None
        self._targets = [memoryview(self._prefix)]

    @property
    def _at_start(self) -> bool:
        return self._header is None and len(self._targets[0]) == frame.PREFIX.size

    def _next_part(self) -> Received | None:
        """A part of the frame is whole: judge it, say where the next bytes go. The message, if that was all of it."""
        try:
            if self._header is None:
                size, self._payload = frame.judge_prefix(self._prefix)
                self._header = bytearray(size)
                self._targets = [memoryview(self._header)]
                return None
            if self._tensors is None:
                self._message, specs = frame.judge_header(self._header, self._payload)
                self._tensors = [frame.empty(spec) for spec in specs]
                self._targets = [frame.as_bytes(t) for t in self._tensors if t.nbytes]
            else:
                self._targets.pop(0)
        except MinillmError as error:
            self._fail(f"what came is no message: {error}")
            raise ChannelClosed(str(self._ended)) from error
        if self._targets:
            return None
        message, tensors = self._message, self._tensors
        self._begin_frame()
        return message, tensors
