"""Alive, ready, draining: when a server takes requests, and how it stops taking them. Lesson 13.

ready     the model has computed something here, and steps go on. If it cannot, the server ends
draining  nothing new is taken; what runs may finish within the grace period, and is then ended in words (G2). So may
          what a prefill server computes for others (lesson 15)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Protocol

from minillm.async_llm import AsyncLLM
from minillm.errors import MinillmError
from minillm.events import Event
from minillm.server.errors import ApiError
from minillm.server.metrics import WARM_UP

log = logging.getLogger("minillm.server")
TRIES = 5  # of a first forward pass that fails
BACK_OFF_S = 0.5  # after the first of them; each time twice as long
LOOK_S = 0.1  # between looks at whether a drain should hurry


class Endable(Protocol):
    """A call under way."""

    def end(self, error: ApiError) -> None: ...


class Beside(Protocol):
    """Work that is no client's call: prompts of other servers (`cluster.prefill_worker.PrefillWorker`)."""

    @property
    def num_jobs(self) -> int: ...

    def drain(self) -> None: ...

    def give_back(self, why: str) -> int: ...


class Lifecycle:
    """On the server's loop. `calls` are the generations under way; `beside` is what else a drain waits for."""

    def __init__(self, llm: AsyncLLM, stall_s: float):
        self.llm, self.stall_s = llm, stall_s
        self.warm = False
        self.failed: str | None = None  # why it never will be
        self.draining = False
        self.calls: set[Endable] = set()
        self.ended: int = 0  # calls that a drain had to end
        self.beside: Beside | None = None
        self.given_back = 0  # prompts of `beside` that a drain had to end
        self._empty = asyncio.Event()
        self.hurry: asyncio.Event | None = None
        self._drain: asyncio.Task[int] | None = None

    def enter(self, call: Endable) -> None:
        """Raises ApiError while the server takes nothing."""
        if (why := self.closed()) is not None:
            raise why
        self.calls.add(call)

    def leave(self, call: Endable) -> None:
        self.calls.discard(call)
        if not self.calls:
            self._empty.set()

    @property
    def under_way(self) -> int:
        """What a drain waits for."""
        return len(self.calls) + (0 if self.beside is None else self.beside.num_jobs)

    def closed(self) -> ApiError | None:
        """Why nothing new is taken."""
        if self.llm.dead is not None:  # first: a server whose engine has ended drains too
            return dead_error()
        if self.draining:
            return ApiError(503, "this server is draining; send the request to another one", code="draining",
                            retry_after_s=1.0)  # fmt: skip
        return None

    def not_ready(self) -> str | None:
        """None, or why this server should get no traffic."""
        if self.llm.dead is not None:
            return "the engine has ended"
        if self.failed is not None:
            return self.failed
        if self.draining:
            return "draining"
        if not self.warm:
            return "no forward pass has run yet"
        waited = self.llm.stalled_s()
        if waited > self.stall_s:
            return f"no step has progressed for {waited:.0f} s"
        return None

    def start_drain(self, grace_s: float, hurry: asyncio.Event | None = None) -> asyncio.Task[int]:
        """`drain` as a task: the one that is under way, if there is one."""
        self.hurry = hurry or self.hurry
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self.drain(grace_s))
        return self._drain

    async def drain(self, grace_s: float) -> int:
        """Take nothing new, wait for what runs, then end it. Returns how many calls had to be ended."""
        self.draining = True
        if self.beside is not None:
            self.beside.drain()
        end = time.monotonic() + grace_s
        while self.under_way and (left := end - time.monotonic()) > 0 and not (self.hurry and self.hurry.is_set()):
            self._empty.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), min(left, LOOK_S))
        late = list(self.calls)
        for call in late:
            call.end(ApiError(503, f"the server is shutting down, and this answer took more than the {grace_s:g} s "
                              "that it had left", code="shutting_down", retry_after_s=1.0))  # fmt: skip
        self.ended += len(late)
        if self.beside is not None:
            why = f"the prefill server is shutting down, and this took more than the {grace_s:g} s that it had left"
            self.given_back = await asyncio.to_thread(self.beside.give_back, why)
        for _ in range(100):  # their last words need a moment to be sent
            if not self.calls:
                break
            await asyncio.sleep(0.02)
        return len(late)


def dead_error() -> ApiError:
    return ApiError(503, "the engine has ended, and this server with it; its log says why", code="engine_dead")


async def warm_up(llm: AsyncLLM, lifecycle: Lifecycle, done: Callable[[], None]) -> None:
    """Have the model compute something: after it, /ready may say yes, and done() is called.

    That is a short generation of the server's own, or any step that finishes before. One that fails is tried again:
    another process may leave the device's memory in a moment. If TRIES have failed, lifecycle.failed says why, and
    `run.serve` ends.
    """
    loop, stepped = asyncio.get_running_loop(), asyncio.Event()

    def follow(event: Event) -> None:
        if event.kind == "step" and any(row[0] != WARM_UP for row in event.data["rows"]):
            loop.call_soon_threadsafe(stepped.set)

    end = llm.engine.events.subscribe(follow)
    own, others = asyncio.create_task(_generate(llm)), asyncio.create_task(stepped.wait())
    try:
        await asyncio.wait((own, others), return_when=asyncio.FIRST_COMPLETED)
        if not others.done():
            own.result()
    except Exception as error:
        lifecycle.failed = f"the first forward pass failed {TRIES} times: {error}"
        log.error("%s", lifecycle.failed)
        return
    finally:
        end()
        for task in (own, others):
            task.cancel()
        await asyncio.gather(own, others, return_exceptions=True)
    lifecycle.warm = True
    done()


async def _generate(llm: AsyncLLM) -> None:
    """One short generation through everything, tried TRIES times."""
    from minillm.request import SamplingParams

    tokenizer = llm.get_tokenizer()
    if tokenizer.chat_template:  # the first conversation would pay for reading the template's engine
        with contextlib.suppress(MinillmError):
            await asyncio.to_thread(tokenizer.render_chat, [{"role": "user", "content": "?"}])
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    for i in range(TRIES):
        try:
            async for _ in llm.generate([0], params, request_id=WARM_UP):
                pass
            return
        except MinillmError as error:
            if llm.dead is not None or i == TRIES - 1:
                raise
            wait = BACK_OFF_S * 2**i
            log.warning("the first forward pass failed; tried again in %g s: %s", wait, error)
            await asyncio.sleep(wait)
