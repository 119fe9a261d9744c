"""Data parallelism: several replicas as one. The least loaded gets the next request. Lesson 14 builds it.

>>> async with DataParallel([InProcessReplica(engine, "a"), ProcessReplica("smollm2-135m", "b")]) as both: ...

Replicas share nothing: one more is as much throughput more, and no token is faster. What is new is failure. A replica
that dies before a request's first token is no matter, since another one answers from the beginning. After it, the
other's tokens need not go on where those that were sent end, so the caller is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, Self

from minillm.cluster.replica import Prompt, Replica, ReplicaBusy, ReplicaLost, ReplicaState
from minillm.errors import MinillmError
from minillm.request import CompletionOutput, RequestOutput, SamplingParams

REFRESH_S = 1.0


def least_outstanding(states: Sequence[ReplicaState], without: Collection[str] = ()) -> str | None:
    """The name of the ready replica with the fewest outstanding tokens; of equals, with the fewest requests there, then
    the fewest ever sent, then the first. None if none is ready. Pure: states in, a name out."""
    able = [s for s in states if s.alive and s.ready and s.name not in without]
    best = min(able, key=lambda s: (s.outstanding_tokens, s.requests, s.sent), default=None)
    return None if best is None else best.name


class DataParallel:
    """Replicas with names of their own, as one `Replica`. start and close are theirs too.

    refresh_s: seconds between questions to all of them, which is how one that came back is found.
    """

    def __init__(self, replicas: Sequence[Replica], name: str = "data-parallel", *, refresh_s: float = REFRESH_S):
        listed = isinstance(replicas, Sequence) and not isinstance(replicas, str | bytes)
        if not listed or not all(callable(getattr(r, "generate", None)) for r in replicas):
            raise MinillmError(f"data parallelism needs a list of replicas (cluster/replica.py), got {replicas!r:.80}")
        names = [r.name for r in replicas]
        if not names or len(set(names)) != len(names):
            raise MinillmError(f"data parallelism needs at least one replica, each with a name of its own, got {names}")
        self.name, self.refresh_s = name, refresh_s
        self.replicas = {r.name: r for r in replicas}
        self.retried = 0  # requests that another replica answered from the beginning
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        starts = [asyncio.ensure_future(r.start()) for r in self.replicas.values()]
        try:
            results = await asyncio.gather(*starts, return_exceptions=True)
            if failed := [e for e in results if isinstance(e, BaseException)]:
                raise failed[0]
        except BaseException:  # or whoever waits for them was cancelled, and them
            begun = [r for r, s in zip(self.replicas.values(), starts, strict=True) if _well(s)]
            await asyncio.gather(*(r.close() for r in begun))
            raise
        self._watching = [asyncio.create_task(self._watch(r)) for r in self.replicas.values()]

    async def _watch(self, replica: Replica) -> None:
        """Each by itself: one that hangs holds nobody up."""
        while True:
            await asyncio.sleep(self.refresh_s)
            await replica.refresh()

    def states(self) -> list[ReplicaState]:
        return [r.state() for r in self.replicas.values()]

    def state(self) -> ReplicaState:
        """The sum; a number that one of them does not tell is unknown. Its epoch is theirs together."""
        states = self.states()
        able = [s for s in states if s.alive and s.ready]
        total: dict[str, Any] = {name: _sum([getattr(s, name) for s in states]) for name in SUMMED}
        lengths = [s.max_model_len for s in states if s.max_model_len is not None]
        epochs = [s.epoch for s in states]
        return ReplicaState(
            self.name, alive=any(s.alive for s in states), ready=bool(able),
            why="" if able else "; ".join(f"{s.name}: {s.why}" for s in states),
            epoch="+".join(map(str, epochs)) if None not in epochs else None, model=states[0].model,
            max_model_len=min(lengths, default=None), age_s=max(s.age_s for s in states), **total,
        )  # fmt: skip

    async def refresh(self) -> ReplicaState:
        await asyncio.gather(*(r.refresh() for r in self.replicas.values()))
        return self.state()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None, *,
        priority: int = 0, tenant: str = "", deadline_s: float | None = None,
    ) -> AsyncIterator[RequestOutput]:  # fmt: skip
        begun, tried = time.monotonic(), dict[str, ReplicaBusy | ReplicaLost]()
        while True:
            name = self.choose(prompt, tenant, tried)
            if name is None and not tried:  # one of them may be back
                await self.refresh()
                name = self.choose(prompt, tenant, tried)
            if name is None:
                raise self._nobody(tried)
            whose: dict[str, Any] = {"priority": priority, "tenant": tenant, "deadline_s": deadline_s}
            if deadline_s is not None and tried:
                whose["deadline_s"] = deadline_s - (time.monotonic() - begun)
                if whose["deadline_s"] <= 0:
                    yield _too_late(prompt, sampling_params, request_id, deadline_s)
                    return
            given = 0
            try:
                outputs = self.replicas[name].generate(prompt, sampling_params, request_id, **whose)
                async with contextlib.aclosing(outputs) as seen:  # type: ignore[type-var]
                    async for output in seen:
                        given = sum(len(o.token_ids) for o in output.outputs)
                        yield output
                return
            except (ReplicaLost, ReplicaBusy) as error:
                if given:
                    raise
                tried[name] = error
                self.retried += 1

    def choose(self, prompt: Prompt, tenant: str, without: Collection[str]) -> str | None:
        """Who gets this request; None if nobody can. A router's own class decides otherwise here (lesson 16)."""
        return least_outstanding(self.states(), without)

    def _nobody(self, tried: dict[str, ReplicaBusy | ReplicaLost]) -> MinillmError:
        states = self.states()
        whys = [f"{s.name}: {tried[s.name].why if s.name in tried else s.why or 'not ready'}" for s in states]
        busy = [e for e in tried.values() if isinstance(e, ReplicaBusy)]
        if not busy and not any(s.alive for s in states if s.name not in tried):
            return ReplicaLost(self.name, f"none of its replicas is left ({'; '.join(whys)})")
        waits = [e.retry_after_s for e in busy if e.retry_after_s is not None]
        return ReplicaBusy(self.name, "; ".join(whys), min(waits, default=None))

    async def drain(self, grace_s: float = 30.0) -> int:
        return sum(await asyncio.gather(*(r.drain(grace_s) for r in self.replicas.values())))

    async def close(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        self._watching = []
        await asyncio.gather(*(r.close() for r in self.replicas.values()))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


SUMMED = (
    "waiting", "running", "waiting_tokens", "free_blocks", "cached_blocks", "total_blocks", "max_num_seqs", "steps",
    "requests", "outstanding_tokens", "sent",
)  # fmt: skip


def _well(task: asyncio.Future[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


def _sum(numbers: Sequence[int | None]) -> int | None:
    known = [n for n in numbers if n is not None]
    return sum(known) if len(known) == len(numbers) else None


def _too_late(prompt: Any, params: SamplingParams | None, name: str | None, deadline_s: float) -> RequestOutput:
    """As an engine tells it: the deadline passed while replicas were tried."""
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None if isinstance(prompt, str) else prompt
    text = prompt if isinstance(prompt, str) else prompt.get("prompt") if isinstance(prompt, dict) else None
    why = f"its deadline of {deadline_s:g} s passed before a replica began it"
    choices = [CompletionOutput(i, "", [], "abort", why) for i in range((params or SamplingParams()).n)]
    return RequestOutput(name or "", text, list(ids or []), choices)
