"""What two engines need of a wire: messages with tensors, in order, and an end that is noticed. Lesson 15.

Three kinds: in_process_transport.py (queues), shared_memory.py (one machine), distributed.py (torch.distributed). One
suite, tests/test_transport.py, holds them all to what `Channel` says; faulty.py breaks any of them on purpose.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from minillm.errors import MinillmError

Message = dict[str, Any]
Received = tuple[Message, list[Tensor]]
BACKLOG = 64  # channels that wait to be accepted
STALL_S = 30.0  # a send that moves nothing for so long ends the channel: nobody reads at the other side


class ChannelClosed(MinillmError):
    """The channel has ended: closed here or there, the other process is gone, or what came is no message. For good."""


class Channel(Protocol):
    """One end of a wire between two engines. What is sent arrives once, in order, to the bit, or the channel ends.

    One thread may send while another receives; several threads may send, each message stays whole. Whoever only sends
    must still have somebody receive at the other end: a wire holds a bounded number of bytes.
    """

    @property
    def closed(self) -> str | None:
        """Why the channel has ended, or None while it has not. Messages that arrived before may still be received."""

    def send(self, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        """Copies `tensors` (any device, see `frame.DTYPES`) and `message` (JSON: str keys, no NaN) onto the wire.

        Returns when both may be changed again, which says nothing about the other side having received them. Waits
        while the wire is full. Raises ChannelClosed if it has ended or ends meanwhile (the message may or may not have
        arrived), MinillmError if this can be no message (then nothing was sent, and the channel goes on).
        """

    def recv(self, timeout_s: float) -> Received | None:
        """The next message and its tensors (new, on the CPU), or None if there is none within timeout_s seconds (>= 0).

        Raises ChannelClosed once the channel has ended and all that arrived before has been given out; at once if it
        was closed at this end.
        """

    def close(self) -> None:
        """Ends the channel at both ends and gives back what it holds. The other side still gets what was sent before.

        May be called from any thread, and again: the second time does nothing. Who waits in send or recv is woken.
        """


class Listener(Protocol):
    """Where others connect. `address` is what they give to `connect`."""

    address: str

    def accept(self, timeout_s: float) -> Channel | None:
        """A channel to the next one that has shown the key, or None within timeout_s seconds. Wrong ones are dropped.

        Raises ChannelClosed after `close`, also in a thread that waits here.
        """

    def close(self) -> None:
        """Nobody connects any more. Channels that were accepted go on."""


class AcceptQueue:
    """Channels that have shown the key, until a listener's `accept` hands them on: at most `backlog` of them."""

    def __init__(self, backlog: int = BACKLOG):
        self._backlog, self._waiting = backlog, deque[Channel]()
        self._turn, self.open = threading.Condition(), True

    def put(self, channel: Channel) -> bool:
        """False: the listener is closed or far behind, and the channel was closed."""
        with self._turn:
            taken = self.open and len(self._waiting) < self._backlog
            if taken:
                self._waiting.append(channel)
                self._turn.notify_all()
        if not taken:
            channel.close()
        return taken

    def get(self, timeout_s: float) -> Channel | None:
        """`Listener.accept`."""
        with self._turn:
            self._turn.wait_for(lambda: self._waiting or not self.open, timeout_s)
            if not self.open:
                raise ChannelClosed("this listener was closed")
            return self._waiting.popleft() if self._waiting else None

    def close(self) -> None:
        with self._turn:
            self.open = False
            waiting, self._waiting = self._waiting, deque()
            self._turn.notify_all()
        for channel in waiting:
            channel.close()


def listen(kind: str, key: bytes, place: str | None = None) -> Listener:
    """A new place to connect to: kind "in-process" or "shared-memory". `key`: the secret that both sides share.

    place: of a shared-memory listener, "@NAME" or "/PATH"; None draws one.
    """
    if not key:
        raise MinillmError("a channel needs a key that both sides know, got an empty one")
    if kind == "in-process":
        from minillm.cluster.in_process_transport import InProcessListener

        return InProcessListener(key)
    if kind == "shared-memory":
        from minillm.cluster.shared_memory import SharedMemoryListener

        return SharedMemoryListener(key, place=place)
    raise MinillmError(f'transport {kind!r} is not known; use "in-process" or "shared-memory"')


def connect(address: str, key: bytes, timeout_s: float = 10.0) -> Channel:
    """A channel to the listener at `address`. Raises ChannelClosed if nobody is there or the key is another one."""
    kind, _, place = address.partition(":")
    if kind == "in-process" and place:
        from minillm.cluster import in_process_transport

        return in_process_transport.connect(place, key)
    if kind == "unix" and place:
        from minillm.cluster import shared_memory

        return shared_memory.connect(place, key, timeout_s)
    raise MinillmError(f'an address is "in-process:NAME" or "unix:/PATH", as a listener gives it, got {address!r:.80}')
