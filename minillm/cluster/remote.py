"""A replica that is a server somewhere: any that speaks OpenAI's API and gives token ids. Lesson 14.

>>> async with HttpReplica("http://10.0.0.7:8000", "west", tenant_keys={"alice": "sk-..."}) as replica: ...

A server of minillm tells its whole state on /state. One of others is asked for /health and its model, its load is what
this process has there, and what only minillm knows (deadlines) is refused for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from minillm.cluster.completion import LATE, Completion, body_of, fault
from minillm.cluster.driver import SILENCE_S, Driver, read_ids, read_prompt
from minillm.cluster.http import Address, Answer, Fields, Refused, Unreachable
from minillm.cluster.replica import Prompt, ReplicaLost, ReplicaState
from minillm.errors import MinillmError, RequestError
from minillm.request import RequestOutput, SamplingParams

ANSWER_S = 5.0  # for a connection, and for an answer to a question about its state
READY_S = 60.0
LOOK_S = 0.1


class HttpReplica(Driver):
    """url: http(s)://host:port, with or without /v1.

    model        its name there; None takes the first that it lists
    api_key      for requests without a tenant, and for questions
    tenant_keys  tenant -> API key: to a server, the key says whose request it is. Another tenant is refused
    answer_s     seconds for a connection, and for an answer about its state
    ready_s      seconds that start waits for it to become ready
    """

    def __init__(
        self, url: str, name: str | None = None, *, model: str | None = None, api_key: str | None = None,
        tenant_keys: Mapping[str, str] | None = None, answer_s: float = ANSWER_S, ready_s: float = READY_S,
        silence_s: float = SILENCE_S,
    ):  # fmt: skip
        super().__init__(url if name is None else name, silence_s=silence_s)
        self._at = Address(url)
        self._model, self._named = model, model
        self._keys = {"": api_key, **(tenant_keys or {})}
        for key in self._keys.values():
            if key is not None and not (key.isascii() and key.isprintable() and key):
                raise MinillmError("an API key must be printable ASCII text: it goes into a header")
        self.answer_s, self.ready_s = answer_s, ready_s
        self._own: bool | None = None  # whether it is one of minillm's; None: not asked yet
        self._room: int | None = None  # a context of a server of others

    # Its state ----------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        self._own = None
        end = time.monotonic() + self.ready_s
        while True:
            try:
                state = await self._ask()
                why = None if state.ready else state.why
            except MinillmError as error:
                why = str(error)
            if why is None:
                break
            if time.monotonic() > end:
                raise MinillmError(f"replica {self.name} did not become ready within {self.ready_s:g} s: {why}")
            await self._pause()
        if self._named is None:
            self._model = state.model if self._own and state.model else await self._first_model()

    async def _pause(self) -> None:
        """Between looks at a server that is not ready yet. Raises MinillmError when it never will be."""
        await asyncio.sleep(LOOK_S)

    async def _ask(self) -> ReplicaState:
        if self._own is not False:
            answer = await self._get("/state")
            if answer.status == 200:
                self._own = True
                return ReplicaState.from_dict(answer.json())
            if answer.status not in (404, 405):
                raise MinillmError(f"/state says {answer.status}: {_message(answer)}")
            self._own = False
        answer = await self._get("/health")
        if answer.status != 200:
            return ReplicaState(self.name, alive=False, ready=False, why=f"/health says {answer.status}")
        return ReplicaState(self.name, model=self._model, max_model_len=self._room)

    async def _first_model(self) -> str:
        answer = await self._get("/v1/models")
        try:
            card = answer.json()["data"][0]
            self._room = _context(card)
            return str(card["id"])
        except (LookupError, TypeError, AttributeError):
            raise MinillmError(
                f"replica {self.name}: /v1/models names no model (status {answer.status}: {_message(answer)}); give one"
            ) from None

    async def _get(self, path: str) -> Answer:
        return await self._at.ask("GET", path, self._at.fields(self._keys[""]), self.answer_s)

    # A request ----------------------------------------------------------------------------------------------------

    async def _outputs(
        self, name: str | None, prompt: Prompt, params: SamplingParams, whose: dict[str, Any]
    ) -> AsyncIterator[RequestOutput]:
        tenant, deadline_s, priority = whose["tenant"], whose["deadline_s"], whose["priority"]
        if tenant not in self._keys:
            raise RequestError("tenant", f"{tenant!r:.80} has no API key for replica {self.name}; give it tenant_keys")
        if deadline_s is not None and not self._own:
            raise RequestError("deadline_s", f"the server of replica {self.name} is not minillm's: it knows none")
        if deadline_s is not None and not (isinstance(deadline_s, int | float) and 0 < deadline_s < 1e9):
            raise RequestError("deadline_s", f"expected seconds from now, above 0, got {deadline_s!r}")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError("priority", f"expected a whole number, got {priority!r:.80}")
        rid = f"request-{secrets.token_hex(6)}" if name is None else name
        headers = self._at.fields(self._keys[tenant], _header(rid))
        text, ids = read_prompt(prompt)
        if params.max_tokens is None:
            ids, params = await self._all_that_fits(text, ids, params, headers)
        told = Completion(rid, text, ids, params)
        body = body_of(self._model or "", ids if ids is not None else text or "", params, priority, deadline_s)
        try:
            events = self._at.events("/v1/completions", headers, body, self.answer_s)
            async with contextlib.aclosing(events) as batches:  # type: ignore[type-var]
                async for batch in batches:
                    news = [told.feed(event) for event in batch]
                    if told.done or told.error is not None:  # the last output is below
                        break
                    if any(news):
                        yield told.output()
        except Unreachable as error:
            raise ReplicaLost(self.name, str(error)) from error
        except Refused as refused:
            no_stream = {"message": "its answer is no stream of events"}
            said = _error(refused.answer) or (no_stream if refused.answer.status == 200 else {})
            self._judge(told, said, refused.answer)
        if told.error is not None:
            if told.tokens:
                yield told.output()  # what came before the error, in one read with it
            self._judge(told, told.error, None)
        if not told.done:
            raise ReplicaLost(self.name, "its stream ended without [DONE]")
        yield told.output()

    def _judge(self, told: Completion, error: dict[str, Any], answer: Answer | None) -> None:
        if error.get("code") != LATE or told.tokens:
            raise fault(self.name, error, answer)
        told.abort(str(error.get("message") or "its deadline passed"))

    async def _all_that_fits(
        self, text: str | None, ids: list[int] | None, params: SamplingParams, headers: Fields
    ) -> tuple[list[int], SamplingParams]:
        """max_tokens None is what the context leaves; to a server that is a number, so the prompt is counted first."""
        room = self._seen.max_model_len or self._room
        if ids is None:
            try:
                body = {"model": self._model, "prompt": text}
                answer = await self._at.ask("POST", "/tokenize", headers, self.answer_s, body)
            except Unreachable as error:
                raise ReplicaLost(self.name, str(error)) from error
            if answer.status != 200:
                raise fault(self.name, _error(answer) or {}, answer)
            try:
                ids, room = read_ids(answer.json()["tokens"]), room or _context(answer.json())
            except (LookupError, TypeError, AttributeError, RequestError) as error:
                raise MinillmError(f"replica {self.name}: /tokenize gives no token ids ({error})") from None
        if room is None:
            raise RequestError("max_tokens", f"replica {self.name} does not say how long its context is; give a number")
        return ids, params.replace(max_tokens=max(1, room - len(ids)))

    async def _close(self) -> None:
        """A connection ends with its request; nothing else was started."""


def _context(said: Mapping[str, Any]) -> int | None:
    """Tokens that fit, if a server of others says so in numbers."""
    room = said.get("max_model_len")
    return room if type(room) is int and room > 0 else None


def _header(rid: Any) -> str:
    """Raises RequestError for an id that does not fit a header as minillm's servers take it."""
    good = (
        isinstance(rid, str) and 0 < len(rid) <= 128 and all(c.isascii() and (c.isalnum() or c in "._:-") for c in rid)
    )
    if not good:
        raise RequestError("request_id", f"up to 128 letters, digits and . _ : - go to a server, got {rid!r:.80}")
    return str(rid)


def _error(answer: Answer) -> dict[str, Any] | None:
    data = answer.json()
    error = data.get("error") if isinstance(data, dict) else None
    return error if isinstance(error, dict) else None


def _message(answer: Answer) -> str:
    return str((_error(answer) or {}).get("message") or answer.body[:100].decode("utf-8", "replace"))
