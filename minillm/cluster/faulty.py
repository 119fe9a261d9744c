"""A channel that fails on purpose, at the message that a test or a lesson names. Lesson 15.

Everything still arrives in order: no transport reorders. Wrap both ends to break both directions.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from minillm.cluster.transport import Channel, ChannelClosed, Message, Received
from minillm.errors import MinillmError

Fault = Literal["drop", "delay", "corrupt", "duplicate", "close"]


@dataclass(frozen=True)
class Struck:
    """A fault that took place: at which message that was sent (from 0), which fault, and the message."""

    at: int
    fault: Fault
    message: Message


class FaultyChannel:
    """`channel`, but message n that is sent here (from 0) meets faults[n].

    drop       it is lost
    delay      it and all after it wait here until `release`
    corrupt    one bit of its largest tensor is another one; without tensors, every value of the message is None
    duplicate  it is sent twice
    close      the channel ends instead: `send` raises ChannelClosed, and the other side is told

    struck: the faults that have taken place.
    """

    def __init__(self, channel: Channel, faults: Mapping[int, Fault]):
        wrong = sorted({str(f) for f in faults.values()} - set(get_args(Fault)))
        if wrong:
            raise MinillmError(f"faults are {', '.join(get_args(Fault))}; got {', '.join(wrong)}")
        self._channel, self._faults = channel, dict(faults)
        self._count, self._held, self._holding = 0, list[tuple[Message, list[Tensor]]](), False
        self._sending = threading.Lock()
        self.struck: list[Struck] = []

    @property
    def closed(self) -> str | None:
        return self._channel.closed

    def send(self, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        with self._sending:
            fault = self._faults.get(self._count)
            if fault is not None:
                self.struck.append(Struck(self._count, fault, message))
            self._count += 1
            if fault == "close":
                self._channel.close()
                raise ChannelClosed("the channel was closed (a fault on purpose)")
            if fault == "drop":
                return
            if fault == "corrupt":
                message, tensors = _corrupt(message, tensors)
            self._holding |= fault == "delay"
            for _ in range(2 if fault == "duplicate" else 1):
                if self._holding:
                    self._held.append((dict(message), [t.detach().clone() for t in tensors]))
                else:
                    self._channel.send(message, tensors)

    def release(self) -> None:
        """What a delay has kept is sent, in order. Does nothing where nothing is kept."""
        with self._sending:
            self._holding, held, self._held = False, self._held, []
            for message, tensors in held:
                self._channel.send(message, tensors)

    def recv(self, timeout_s: float) -> Received | None:
        return self._channel.recv(timeout_s)

    def close(self) -> None:
        self._channel.close()


def _corrupt(message: Message, tensors: Sequence[Tensor]) -> tuple[Message, list[Tensor]]:
    copies = [t.detach().to("cpu", copy=True).contiguous() for t in tensors]
    largest: Any = max(copies, key=lambda t: t.nbytes, default=None)
    if largest is None or not largest.nbytes:
        return dict.fromkeys(message), copies
    raw = largest.view(-1).view(torch.uint8)
    raw[len(raw) // 2] ^= 1
    return message, copies
