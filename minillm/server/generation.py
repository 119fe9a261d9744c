"""One generation from its first byte to its last. Lesson 13.

Both routes that generate are this one `Answer`; what differs is the body they take and the reply they give. Each stage
ends with a mark on the request's trace, so the spans sum to the end-to-end time: auth, ingress, then preprocess and
admit twice (the text and what its bytes prove, the tokens and their number), queue, prefill, decode, post.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minillm.errors import MinillmError, RequestError
from minillm.request import RequestOutput
from minillm.server.admission import Ask
from minillm.server.door import Ticket
from minillm.server.errors import GONE, ApiError, as_api_error, without_text
from minillm.server.http import DONE, Call, ClientGone, EventStream, event, log, merged
from minillm.server.lifecycle import dead_error
from minillm.server.protocol import ChatCompletionRequest, Generation, parse_body
from minillm.server.replies import ChatReply, CompletionReply, failure, too_late
from minillm.server.roles import prefill_role
from minillm.server.state import State, engine_id, request_id
from minillm.server.tenants import Tenant
from minillm.server.tracing import RequestTrace

IN_THREAD = 4096  # characters, or bytes of a body, from which work on them would hold up everybody else's tokens
Text = str | list[int]  # a prompt as it came, or as the chat template wrote it
Prompt = tuple[str | None, Sequence[int]]  # its text, if it came as text, and its token ids


class Answer(Response):
    """An ASGI response that does the work when it is called: it has to hear when the client leaves."""

    def __init__(self, state: State, route: str, kind: type[Generation]):  # no super(): there is no body to render yet
        self.state, self.route, self.kind, self.background = state, route, kind, None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, request = self.state, Request(scope, receive)
        rid = "-"
        trace = RequestTrace(rid, self.route, traceparent=request.headers.get("traceparent"))
        out = EventStream(send, {})
        try:
            rid = trace.request_id = request_id(request)
            out.headers["X-Request-Id"] = rid
            await self._answer(request, out, trace)
            trace.status = 200
        except ClientGone:
            trace.fail(GONE, "client_gone")
            state.metrics.failed("client_gone")
        except Exception as error:
            api = _told(error, rid)
            trace.fail(api.status, api.code or api.type)
            state.metrics.failed(error, trace.tenant)
            await out.fail(api)
        finally:
            trace.note(response_bytes=out.sent)
            trace.finish()
            state.traces.record(trace)

    async def _answer(self, request: Request, out: EventStream, trace: RequestTrace) -> None:
        state, config = self.state, self.state.config
        header = request.headers.get("authorization")
        tenant = state.tenants.authenticate(header)
        trace.tenant = tenant.name
        trace.mark("auth")
        if config.role == "prefill":
            raise prefill_role()
        if (why := state.lifecycle.closed()) is not None:
            raise why
        async with state.bodies.read(request) as raw:
            trace.mark("ingress")
            trace.note(request_bytes=len(raw))
            body: Any = await (asyncio.to_thread if len(raw) > IN_THREAD else _here)(parse_body, raw, self.kind)
        trace.user, trace.key = body.user, header
        trace.note(n=body.n, stream=body.stream, model=state.model_name)
        state.check_model(body.model)
        call = Call(request, config.request_timeout_s)
        state.lifecycle.enter(call)
        try:
            texts = await self._texts(body)
            asks = self._asks(body, texts, tenant, time_left(body, trace))
            trace.note(max_tokens=asks[0].max_tokens)
            trace.mark("preprocess")
            with state.door.enter(engine_id(trace.request_id), tenant, asks, _field(body)) as ticket:
                trace.mark("admit")
                await call.run(self._generate(body, texts, ticket, out, trace))
        finally:
            state.lifecycle.leave(call)

    def _asks(self, body: Any, texts: Sequence[Text], tenant: Tenant, deadline_s: float | None) -> list[Ask]:
        """What admission is asked for each prompt."""
        params, priority = body.sampling_params(), tenant.effective_priority(body.priority)
        asks = []
        for text in texts:
            size, tokens = (self.state.count_bytes(text), None) if isinstance(text, str) else (0, len(text))
            asks.append(Ask(size, tokens, params.max_tokens, params.n, tenant.name, priority, deadline_s))
        return asks

    async def _generate(
        self, body: Any, texts: Sequence[Text], ticket: Ticket, out: EventStream, trace: RequestTrace
    ) -> None:
        prompts = await self._away(body, texts, self._tokens, texts, body)
        trace.mark("preprocess")
        ticket.confirm(*(len(ids) for _, ids in prompts), deadline_s=time_left(body, trace))
        trace.mark("admit")
        kind, prefix = (
            (ChatReply, "chatcmpl-") if isinstance(body, ChatCompletionRequest) else (CompletionReply, "cmpl-")
        )
        name, tokenizer = prefix + trace.request_id, self.state.tokenizer
        reply = kind(name, self.state.model_name, body, tokenizer, created=int(time.time()))
        results: dict[int, RequestOutput] = {}
        streams = [self._run(body, ticket, i, prompt) for i, prompt in enumerate(prompts)]
        try:
            async with contextlib.aclosing(merged(streams)) as outputs:  # type: ignore[type-var]
                async for i, output in outputs:
                    results[i] = output
                    failed = failure(output)
                    if body.stream and (failed is None or out.begun) and (chunks := reply.chunks(i, output)):
                        await out.write(b"".join(map(event, chunks)))
                    if failed is not None and failed.status != 500:  # told behind the text that came before it
                        raise failed  # (what a step failed of, the stream itself raises next: that is logged)
        except RequestError as error:
            raise body.api_error(error) from None
        except MinillmError as error:
            raise dead_error() if self.state.llm.dead is not None else StepFailed(str(error)) from error
        finally:
            trace.engine(list(results.values()))
        if (failed := next(filter(None, map(failure, results.values())), None)) is not None:
            raise failed
        if not body.stream:
            await out.whole(200, reply.full([results[i] for i in range(len(prompts))]))
            return
        await out.write((event(reply.usage_chunk()) if body.include_usage else b"") + DONE)
        await out.close()

    def _run(self, body: Any, ticket: Ticket, i: int, prompt: Prompt) -> AsyncIterator[RequestOutput]:
        text, ids = prompt
        return self.state.llm.generate(
            {"prompt": text, "prompt_token_ids": ids}, body.sampling_params(), ticket.names[i],
            priority=ticket.asks[i].priority, tenant=ticket.tenant.name, deadline_s=ticket.asks[i].deadline_s,
        )  # fmt: skip

    async def _away(self, body: Any, texts: Sequence[Text], work: Callable[..., Any], *args: Any) -> Any:
        """work(*args); for long texts in a thread, so that nobody's stream waits for it."""
        size = sum(len(t) for t in texts if isinstance(t, str))
        try:
            return await (asyncio.to_thread if size > IN_THREAD else _here)(work, *args)
        except RequestError as error:
            raise body.api_error(error) from None
        except MinillmError as error:
            raise ApiError(400, f"{_field(body)}: {error}", param=_field(body)) from None

    async def _texts(self, body: Any) -> list[Text]:
        """Each prompt, not tokenised yet: admission first looks at what its bytes prove."""
        if not isinstance(body, ChatCompletionRequest):
            return body.prompts()
        return [await self._away(body, [m["content"] for m in body.chat_messages()], self.state.render, body)]

    def _tokens(self, texts: Sequence[Text], body: Any) -> list[Prompt]:
        """A template writes its own special tokens, so none are added to a chat."""
        encode, add = self.state.tokenizer.encode, not isinstance(body, ChatCompletionRequest)
        return [(t, encode(t, add_special_tokens=add)) if isinstance(t, str) else (None, t) for t in texts]


def time_left(body: Any, trace: RequestTrace) -> float | None:
    """Seconds until the deadline, which runs from the first byte of the request on. Raises ApiError when it is over."""
    if body.deadline_s is None:
        return None
    left: float = body.deadline_s - (time.perf_counter() - trace.start)
    if left <= 0:
        raise too_late(f"its deadline of {body.deadline_s:g} s passed while it was read and tokenised")
    return left


class StepFailed(Exception):
    """A step failed, or a part did. The log says where; the client gets 500."""


async def _here(work: Callable[..., Any], *args: Any) -> Any:
    """In place of asyncio.to_thread, for what takes no longer than the way there."""
    return work(*args)


def _field(body: Any) -> str:
    return "messages" if isinstance(body, ChatCompletionRequest) else "prompt"


def _told(error: BaseException, rid: str) -> ApiError:
    """What the client is told. What is nobody's input goes into the log, with the request's id and no text of it."""
    api = as_api_error(error)
    if api.status == 500:
        log.error("request %s failed: %s", rid, without_text(error))
    return api
