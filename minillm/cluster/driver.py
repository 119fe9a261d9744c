"""What all drivers of replicas share: who is under way, when silence is death, and how a drain ends. Lesson 14.

A replica that says nothing may compute a long prompt, or hang. So silence alone is no verdict: after `silence_s`
without a token the driver asks whether steps go on there, and only a bad answer, or none, is death.
"""

from __future__ import annotations

import asyncio
import contextlib
import numbers
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from minillm.cluster.replica import Prompt, ReplicaBusy, ReplicaLost, ReplicaState
from minillm.errors import MinillmError, RequestError
from minillm.request import RequestOutput, SamplingParams

SILENCE_S = 20.0  # without a token until a replica is asked whether it lives
BYTES_A_TOKEN = 4  # of a text that was not tokenised here: a guess, right after the first token
END: Any = object()


@dataclass(eq=False)
class Call:
    """One request under way. ended: set to the exception that ends it from outside."""

    prompt_tokens: int
    most: int  # tokens that it may give
    ended: asyncio.Future[BaseException]
    given: int = 0

    @property
    def outstanding(self) -> int:
        """Tokens that the replica has still to compute for it, at most."""
        return (0 if self.given else self.prompt_tokens) + max(0, self.most - self.given)


class Driver:
    """A replica's driver: `_open`, `_ask`, `_outputs` and `_close` are its own.

    silence_s: seconds without a token after which the replica is asked whether it lives.
    """

    def __init__(self, name: str, *, silence_s: float = SILENCE_S):
        if not isinstance(name, str) or not name:
            raise MinillmError(f"a replica needs a name, got {name!r:.80}")
        if isinstance(silence_s, bool) or not isinstance(silence_s, int | float) or not silence_s > 0:
            raise MinillmError(f"silence_s must be seconds, more than 0, got {silence_s!r}")
        self.name, self.silence_s = name, silence_s
        self._calls: set[Call] = set()
        self._sent = 0
        self._draining = self._open_now = False
        self._seen = ReplicaState(name, alive=False, ready=False, why="it was not started")
        self._seen_at = time.monotonic()

    # A driver's own ---------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Until the replica is ready. Raises MinillmError."""
        raise NotImplementedError

    async def _ask(self) -> ReplicaState:
        """Raises MinillmError when there is no answer."""
        raise NotImplementedError

    def _outputs(
        self, name: str | None, prompt: Prompt, params: SamplingParams, whose: dict[str, Any]
    ) -> AsyncIterator[RequestOutput]:
        raise NotImplementedError

    async def _close(self) -> None:
        raise NotImplementedError

    async def _died_of(self, error: ReplicaLost) -> str:
        """Better words than the error's, if there are any."""
        return error.why

    # Replica ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._open_now and self.state().alive:
            raise MinillmError(f"replica {self.name} runs already")
        if self._open_now:
            await self.close()
        self._draining = False
        try:
            await self._open()
            self._open_now = True
            await self.refresh()
        except BaseException:  # or whoever waits for it was cancelled
            self._open_now = False
            await self._close()
            raise

    def state(self) -> ReplicaState:
        seen, calls = self._seen, list(self._calls)
        if self._draining:
            seen = replace(seen, ready=False, why=seen.why or "draining")
        return replace(
            seen, age_s=time.monotonic() - self._seen_at, requests=len(calls), sent=self._sent,
            outstanding_tokens=sum(c.outstanding for c in calls),
        )  # fmt: skip

    async def refresh(self) -> ReplicaState:
        if self._open_now:
            try:
                self._see(replace(await self._ask(), name=self.name))
            except MinillmError as error:
                self._bury(str(error))
        return self.state()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None, *,
        priority: int = 0, tenant: str = "", deadline_s: float | None = None,
    ) -> AsyncIterator[RequestOutput]:  # fmt: skip
        params = sampling_params if sampling_params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise RequestError("sampling_params", f"expected SamplingParams, got {params!r:.80}")
        if not self._open_now:
            raise ReplicaLost(self.name, self._seen.why or "it was closed")
        if self._draining:
            raise ReplicaBusy(self.name, "it is draining")
        whose: dict[str, Any] = {"priority": priority, "tenant": tenant, "deadline_s": deadline_s}
        call = self._enter(prompt, params)
        try:
            outputs = self._watched(self._outputs(request_id, prompt, params, whose), call)
            async with contextlib.aclosing(outputs) as seen:  # type: ignore[type-var]
                async for output in seen:
                    call.prompt_tokens = len(output.prompt_token_ids) or call.prompt_tokens
                    call.given = sum(len(o.token_ids) for o in output.outputs)
                    yield output
        except ReplicaLost as error:
            why = await self._died_of(error)
            if not call.ended.done():  # that one was ended, and its replica lives
                self._bury(why)
            raise ReplicaLost(self.name, why, call.given) from error
        finally:
            self._calls.discard(call)

    async def drain(self, grace_s: float = 30.0) -> int:
        self._draining = True
        end = time.monotonic() + grace_s
        while self._calls and (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 0.02))
        return await self._end_calls(f"it was drained, and this answer took more than the {grace_s:g} s that it had")

    async def close(self) -> None:
        if not self._open_now:
            return
        self._bury("it was closed")
        await self._end_calls("it was closed")
        self._open_now = False
        await self._close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Inside -----------------------------------------------------------------------------------------------------

    def _see(self, state: ReplicaState) -> None:
        self._seen, self._seen_at = state, time.monotonic()

    def _bury(self, why: str) -> None:
        """It is dead, until it answers again."""
        self._see(replace(self._seen, alive=False, ready=False, why=why))

    def _enter(self, prompt: Prompt, params: SamplingParams) -> Call:
        text, ids = read_prompt(prompt)
        tokens = len(ids) if ids is not None else 1 + len((text or "").encode()) // BYTES_A_TOKEN
        room = None if self._seen.max_model_len is None else max(0, self._seen.max_model_len - tokens)
        asked = [n for n in (params.max_tokens, room) if n is not None]
        call = Call(tokens, params.n * min(asked, default=0), asyncio.get_running_loop().create_future())
        self._calls.add(call)
        self._sent += 1
        return call

    async def _end_calls(self, why: str) -> int:
        late = list(self._calls)
        for call in late:
            if not call.ended.done():
                call.ended.set_result(ReplicaLost(self.name, why))
        for _ in range(200):  # their readers need a moment to hear of it; one that does not read never will
            if not self._calls:
                break
            await asyncio.sleep(0.005)
        return len(late)

    async def _watched(self, outputs: AsyncIterator[RequestOutput], call: Call) -> AsyncIterator[RequestOutput]:
        """The outputs, until the call is ended or its replica is silent and does not live."""
        task: asyncio.Future[Any] | None = None
        try:
            while True:
                task = asyncio.ensure_future(anext(outputs, END))
                while not task.done():
                    if call.ended.done():
                        raise call.ended.result()
                    either: set[asyncio.Future[Any]] = {task, call.ended}
                    done, _ = await asyncio.wait(either, timeout=self.silence_s, return_when=asyncio.FIRST_COMPLETED)
                    why = None if done else await self._dead()
                    if why is not None and not task.done():
                        raise ReplicaLost(self.name, why)
                if (output := task.result()) is END:
                    return
                yield output
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await outputs.aclose()  # type: ignore[attr-defined]

    async def _dead(self) -> str | None:
        """Why it is dead, after a silence; None if it lives."""
        try:
            state = await self._ask()
        except MinillmError as error:
            return f"no token for {self.silence_s:g} s, and no answer when asked: {error}"
        return None if state.alive else f"no token for {self.silence_s:g} s: {state.why}"


def read_prompt(prompt: Any) -> tuple[str | None, list[int] | None]:
    """(text, token ids), of which at least one is there. Raises RequestError."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, Mapping):
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if ids is None and not isinstance(text, str):
            raise RequestError("prompt", f"a dict needs 'prompt' or 'prompt_token_ids', got keys {list(prompt)}")
        return text, None if ids is None else read_ids(ids)
    return None, read_ids(prompt)


def read_ids(ids: Any) -> list[int]:
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(ids, str | bytes | bytearray) or not isinstance(ids, Sequence):
        raise RequestError("prompt", f"expected text, token ids or a dict, got {type(ids).__name__}")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise RequestError("prompt", f"token id {token!r:.40} is no whole number")
    return [int(token) for token in ids]
