"""A replica that is an engine of this process: the shortest driver, and what the others are held against. Lesson 14.

>>> async with InProcessReplica(lambda: AsyncLLM(max_model_len=512)) as replica:
...     async for output in replica.generate("Once upon a time"):
...         print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from minillm.async_llm import AsyncLLM
from minillm.cluster.driver import SILENCE_S, Driver
from minillm.cluster.replica import Prompt, ReplicaLost, ReplicaState
from minillm.errors import MinillmError, RequestError
from minillm.request import RequestOutput, SamplingParams, Status

STALL_S = 30.0  # without a step, while there is work: then the engine hangs


class InProcessReplica(Driver):
    """llm: an engine that runs, which stays the caller's; or a function that makes one: then start makes it and close
    ends it, and after its death start makes another.

    stall_s: seconds without a step, while there is work, after which it counts as dead.
    """

    def __init__(
        self, llm: AsyncLLM | Callable[[], AsyncLLM], name: str = "in-process", *, stall_s: float = STALL_S,
        silence_s: float = SILENCE_S,
    ):  # fmt: skip
        super().__init__(name, silence_s=silence_s)
        self._make = None if isinstance(llm, AsyncLLM) else llm
        self.llm: AsyncLLM | None = llm if isinstance(llm, AsyncLLM) else None
        self.stall_s = stall_s

    async def _open(self) -> None:
        if self._make is not None:
            thread = ThreadPoolExecutor(1, "minillm-make")
            made = thread.submit(self._make)
            thread.shutdown(wait=False)
            try:
                self.llm = await asyncio.wrap_future(made)
            except asyncio.CancelledError:  # a thread is not: what it makes would be nobody's
                await asyncio.to_thread(_end, made)
                raise
        if self.llm is None or self.llm.dead is not None:
            raise MinillmError(f"replica {self.name}: the engine has ended: {getattr(self.llm, 'dead', None)}")

    async def _ask(self) -> ReplicaState:
        assert self.llm is not None
        return snapshot(self.llm, self.name, self.stall_s)

    def state(self) -> ReplicaState:
        if self._open_now and self.llm is not None:
            self._see(snapshot(self.llm, self.name, self.stall_s))
        return super().state()

    async def _outputs(
        self, name: str | None, prompt: Prompt, params: SamplingParams, whose: dict[str, Any]
    ) -> AsyncIterator[RequestOutput]:
        llm = self.llm
        assert llm is not None
        try:
            async with contextlib.aclosing(llm.generate(prompt, params, name, **whose)) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    yield output
        except RequestError:
            raise
        except MinillmError as error:
            if llm.dead is None:  # a step failed: this request's end, and nobody else's
                raise
            raise ReplicaLost(self.name, str(error)) from error

    async def _close(self) -> None:
        if self._make is not None and self.llm is not None:
            llm, self.llm = self.llm, None
            await asyncio.to_thread(llm.shutdown)


def _end(made: Future[AsyncLLM]) -> None:
    """When it is made."""
    with contextlib.suppress(CancelledError):  # before the thread began
        if made.exception() is None:
            made.result().shutdown()


def snapshot(llm: AsyncLLM, name: str, stall_s: float = STALL_S) -> ReplicaState:
    """An engine as it is now. From any thread: each number by itself, as the engine goes on."""
    core, cache, config = llm.core, llm.engine.cache, llm.engine.config
    assert cache is not None
    waiting = [r for r in list(core.outputs) if r.status in (Status.WAITING, Status.PREEMPTED)]
    why = ""
    if llm.dead is not None:
        why = f"the engine has ended: {llm.dead}"
    elif (waited := llm.stalled_s()) > stall_s:
        why = f"no step has progressed for {waited:.1f} s"
    return ReplicaState(
        name, alive=not why, ready=not why, why=why, epoch=llm.epoch, model=llm.model_name,
        waiting=core.scheduler.num_waiting + len(core.held), running=len(core.scheduler.running),
        waiting_tokens=sum(r.num_new_tokens for r in waiting),
        free_blocks=cache.num_free, cached_blocks=cache.num_cached, total_blocks=cache.pool.num_blocks,
        block_size=config.block_size, max_model_len=llm.engine.max_model_len, max_num_seqs=config.max_num_seqs,
        steps=llm.engine.events.step,
    )  # fmt: skip
