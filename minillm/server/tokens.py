"""/tokenize and /detokenize: text to token ids and back, while nobody's stream waits for it. Lesson 13.

They compute nothing in the engine, so admission does not see them. What bounds them: each is a request of its key's
quota, WORKERS run at once (so that threads are left for the prompts of generations) and MAX_WAITING may wait, and
neither takes more than CONTEXTS contexts. All is done in a thread, reading the body and writing the reply too: a list
of a million ids as JSON would hold up the loop as much as the tokenizer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from minillm.errors import MinillmError
from minillm.server.admission import least_tokens
from minillm.server.errors import ApiError
from minillm.server.failures import turned_away
from minillm.server.http import to_json
from minillm.server.protocol import DetokenizeRequest, TokenizeRequest, parse_body
from minillm.server.replies import detokenize_reply, tokenize_reply
from minillm.server.reply_schema import documented
from minillm.server.state import State

WORKERS = 2
MAX_WAITING = 32
CONTEXTS = 4  # whoever asks about more knows already that it is too long
ERRORS = (400, 401, 404, 408, 413, 415, 429, 500)


def add_tokens(app: FastAPI, state: State) -> None:
    places = Places()

    async def answer(request: Request, work: Callable[[State, bytes], Any]) -> Response:
        tenant = state.tenants.authenticate(request.headers.get("authorization"))
        try:
            state.door.count(tenant)
            async with state.bodies.read(request) as raw:
                reply = await places.run(lambda: to_json(work(state, raw)))
        except ApiError as error:
            if turned_away(error):
                state.metrics.rejected(error.code, tenant.name)
            raise
        return Response(reply, media_type="application/json")

    @app.post("/tokenize", summary="Token ids of a text or conversation.", **documented(TokenizeRequest, *ERRORS))
    async def tokenize(request: Request) -> Response:
        return await answer(request, tokenized)

    @app.post("/detokenize", summary="The text of token ids.", **documented(DetokenizeRequest, *ERRORS))
    async def detokenize(request: Request) -> Response:
        return await answer(request, detokenized)


class Places:
    """Threads for few, a queue for some, and no for the rest."""

    def __init__(self) -> None:
        self._free, self.inside = asyncio.Semaphore(WORKERS), 0

    async def run(self, work: Callable[[], Any]) -> Any:
        """work() in a thread. Raises ApiError 429 if too many wait."""
        if self.inside >= WORKERS + MAX_WAITING:
            raise ApiError(429, f"{MAX_WAITING} requests wait to be tokenised; try again in 1 s", code="queue_full",
                           retry_after_s=1.0)  # fmt: skip
        self.inside += 1
        try:
            async with self._free:
                return await asyncio.to_thread(work)
        finally:
            self.inside -= 1


def tokenized(state: State, raw: bytes) -> dict[str, Any]:
    """The reply to a body of /tokenize. Raises ApiError."""
    body = parse_body(raw, TokenizeRequest)
    state.check_model(body.model)
    field, tokenizer = "prompt" if body.prompt is not None else "messages", state.tokenizer
    try:
        text = state.render(body) if body.prompt is None else body.prompt
        _bounded(state, field, least_tokens(state.count_bytes(text), state.bytes.longest if state.bytes else None))
        ids = tokenizer.encode(text, add_special_tokens=body.special_tokens)
    except MinillmError as error:
        raise ApiError(400, f"{field}: {error}", param=field) from None
    _bounded(state, field, len(ids))
    return tokenize_reply(ids, state.llm.engine.max_model_len, tokenizer, body.return_token_strs)


def detokenized(state: State, raw: bytes) -> dict[str, Any]:
    """The reply to a body of /detokenize. Raises ApiError."""
    body = parse_body(raw, DetokenizeRequest)
    state.check_model(body.model)
    _bounded(state, "tokens", len(body.tokens))
    return detokenize_reply(body.tokens, state.tokenizer)


def _bounded(state: State, field: str, tokens: int) -> None:
    context = state.llm.engine.max_model_len
    if tokens > CONTEXTS * context:
        raise ApiError(400, f"{field}: it has {tokens} tokens or more; at most {CONTEXTS * context} are taken, "
                       f"{CONTEXTS} times the context", param=field)  # fmt: skip
