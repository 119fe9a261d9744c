"""A channel over torch.distributed: two ranks of a gloo world, on one machine or on several. Lesson 15.

The stream goes in packets. A gloo receive takes a message up to the size that was asked for, and a longer one ends the
process, so every receive asks for the largest packet. Who may be in the world is torch's business: whoever reaches its
store is trusted, there is no key.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from minillm.cluster.stream import STEP, StreamChannel
from minillm.cluster.transport import STALL_S, ChannelClosed
from minillm.errors import MinillmError
from minillm.parallel.group import DistGroup

WINDOW = 32 << 20
LINGER_S = 5.0  # how long `close` waits for the goodbye of the other side
HEAD = struct.Struct("<cQ")
DATA, READ, BYE, BEAT = b"d", b"r", b"b", b"."
PACKET = HEAD.size + STEP
TAG = 15


class DistChannel(StreamChannel):
    """One end: the other one is the other rank of a group of two, which uses it for nothing else meanwhile.

    Raises MinillmError for another size or backend. After both ends are closed the group can carry another channel.
    """

    def __init__(self, group: DistGroup, window: int = WINDOW, stall_s: float = STALL_S):
        if group.size != 2 or group.rank not in (0, 1):
            raise MinillmError(f"a channel joins 2 ranks, and this group has {group.size} (this rank: {group.rank})")
        # Both ends have the same window: it is not negotiated, so it must be the same number at both.
        super().__init__(window=window, peer_window=window, stall_s=stall_s)
        self._gloo, self._peer = _gloo(group), 1 - group.rank
        # A receive that waits longer than the world's timeout breaks the world: something is said before that.
        self._beat_s = min(timedelta(seconds=20), self._gloo.options._timeout / 4).total_seconds()
        self._packet = bytearray()
        self._inbox: deque[memoryview] = deque()
        self._outbox: deque[bytes | bytearray] = deque()
        self._work, self._saying_bye = threading.Condition(), False
        self._threads = [
            threading.Thread(target=run, name=f"minillm-dist-{run.__name__[1:]}", daemon=True)
            for run in (self._receiver, self._sender)
        ]
        for thread in self._threads:
            thread.start()

    def _write(self, part: memoryview) -> None:
        while part:
            if not self._packet:
                self._packet += bytes(HEAD.size)
            take = min(len(part), PACKET - len(self._packet))
            self._packet += part[:take]
            part = part[take:]
            if len(self._packet) == PACKET:
                self._flush()

    def _flush(self) -> None:
        if packet := self._packet:
            HEAD.pack_into(packet, 0, DATA, len(packet) - HEAD.size)
            self._packet = bytearray()
            self._post(packet)

    def _read(self, into: memoryview) -> None:
        while into:
            first = self._inbox[0]
            take = min(len(first), len(into))
            into[:take] = first[:take]
            into = into[take:]
            if take == len(first):
                self._inbox.popleft()
            else:
                self._inbox[0] = first[take:]

    def _grant(self, count: int) -> None:
        self._post(HEAD.pack(READ, count), urgent=True)

    def _release(self) -> None:
        """Says goodbye and waits, not for long, until the other side has heard it and all that was sent before."""
        self._say_bye()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(LINGER_S)
        self._inbox.clear()

    def _post(self, packet: bytes | bytearray, urgent: bool = False) -> None:
        with self._work:
            if self._saying_bye:
                raise ChannelClosed(self._ended or "the channel was closed")
            (self._outbox.appendleft if urgent else self._outbox.append)(packet)
            self._work.notify_all()

    def _say_bye(self) -> None:
        with self._work:
            self._saying_bye = True
            self._work.notify_all()

    def _sender(self) -> None:
        """One packet after the other. At most a window of them waits here: the rest has no credit."""
        try:
            while True:
                with self._work:
                    self._work.wait_for(lambda: self._outbox or self._saying_bye, self._beat_s)
                    packet = self._outbox.popleft() if self._outbox else HEAD.pack(BYE if self._saying_bye else BEAT, 0)
                x = torch.frombuffer(bytearray(packet) if isinstance(packet, bytes) else packet, dtype=torch.uint8)
                self._gloo.send([x], self._peer, TAG).wait()
                if packet[:1] == BYE:
                    return
        except RuntimeError as error:
            self._gone(error)

    def _receiver(self) -> None:
        """Every packet at once, so that a goodbye or a credit never waits behind data. Ends with their goodbye."""
        x = torch.zeros(PACKET, dtype=torch.uint8)
        fault: str | None = None
        try:
            while True:
                self._gloo.recv([x], self._peer, TAG).wait()
                kind, count = HEAD.unpack(bytes(x[: HEAD.size].tolist()))
                if kind == BYE:
                    self._end("the other side has closed the channel")
                    self._say_bye()
                    return
                try:
                    if fault is None:
                        self._take(kind, count, x)
                except MinillmError as error:  # goes on to listen: a receive that is given up breaks the world
                    fault = f"what came is not this protocol: {error}"
                    self._end(fault)
                    self._say_bye()
        except RuntimeError as error:
            self._gone(error)

    def _take(self, kind: bytes, count: int, x: Tensor) -> None:
        if kind == DATA and count <= STEP:
            data = x[HEAD.size : HEAD.size + count].clone().numpy().data
            with self._turn:
                self._arrived(count)
                if not self._closed_here:
                    self._inbox.append(data)
        elif kind == READ:
            self._granted(count)
        elif kind != BEAT:
            raise MinillmError(f"the other side said {kind!r} {count}, which means nothing")

    def _gone(self, error: RuntimeError) -> None:
        self._end(f"the other process is gone ({str(error).splitlines()[0]:.160})")
        self._say_bye()


def _gloo(group: DistGroup) -> Any:
    """What of the group carries CPU tensors. Used directly: only its work says when a tensor has been taken."""
    import torch.distributed as dist

    process_group: Any = group._group or dist.group.WORLD
    try:
        backend = process_group._get_backend(torch.device("cpu"))
    except RuntimeError:
        backend = None
    if backend is None or backend.name() != "gloo":
        raise MinillmError("a channel carries CPU tensors, which needs a gloo group (or cpu:gloo,cuda:nccl)")
    return backend
