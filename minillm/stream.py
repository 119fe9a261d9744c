"""`Stream`: what `AsyncLLM` has given for one prompt, and its reader has not taken. Lesson 13 puts a server on it.

The engine's thread fills it and the reader's loop empties it. A step's pieces go to a loop in one call, `deliver`,
however many of its streams they are for: each call wakes the loop by a write to a socket.
"""

from __future__ import annotations

import asyncio

from minillm.request import Request

Item = tuple[Request, str, int, bool]  # request, new text, tokens so far, whether that is all


class Stream:
    """`given` is written by the engine's thread alone, `taken` by the reader's: no lock is needed to compare them.

    limit: tokens that it may be ahead of its reader; None for no bound.
    """

    def __init__(self, name: str, requests: list[Request], loop: asyncio.AbstractEventLoop, limit: int | None):
        self.name, self.requests, self.loop, self.limit = name, requests, loop, limit
        self.given = self.taken = 0
        self.paused = False  # engine's thread
        self.arrived: list[Item] = []
        self.wake = asyncio.Event()
        self.failure: BaseException | None = None


Delivery = tuple[Stream, list[Item], BaseException | None]


def deliver(deliveries: list[Delivery]) -> None:
    """What a step gave the readers of one loop. On that loop."""
    for stream, items, failure in deliveries:
        stream.arrived += items
        stream.failure = stream.failure or failure
        stream.wake.set()
