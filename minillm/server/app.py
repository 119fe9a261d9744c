"""The server as an ASGI application: which path does what. Lesson 13.

>>> app = make_app(AsyncLLM())          # any ASGI server can run it; `minillm serve` runs it with uvicorn

POST /v1/chat/completions, /v1/completions   generate (`generation.Answer`)
GET  /v1/models                              the one model
POST /tokenize, /detokenize                  text to token ids and back (tokens.py)
GET  /health                                 200 while the engine lives
GET  /ready                                  200 while it should get traffic (lifecycle.py)
GET  /metrics                                Prometheus
GET  /state                                  the engine at a moment, for who balances load (cluster/replica.py)
POST /drain                                  take nothing new, end what runs in time (admin key)
GET  /, /timeline                            a page to chat with, and what the scheduler did (page.py)
GET  /openapi.json                           all of it as an OpenAPI document (schema.py, reply_schema.py)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from minillm import __version__
from minillm.async_llm import AsyncLLM
from minillm.cluster.in_process import snapshot
from minillm.errors import MinillmError
from minillm.server.admission import Admission, BoundedQueue
from minillm.server.byte_bounds import byte_bound
from minillm.server.config import ServerConfig
from minillm.server.counted import Counted
from minillm.server.door import Door
from minillm.server.errors import GONE, ApiError, as_api_error, without_text
from minillm.server.generation import Answer
from minillm.server.http import Bodies, ClientGone, log
from minillm.server.lifecycle import Lifecycle, dead_error, warm_up
from minillm.server.meter import LoadMeter
from minillm.server.metrics import CONTENT_TYPE, Metrics
from minillm.server.page import add_page
from minillm.server.protocol import ChatCompletionRequest, CompletionRequest
from minillm.server.reply_schema import CARD, DRAINING, MODELS, STATE, TEXT, documented, openapi, status
from minillm.server.state import State, model_name
from minillm.server.tenants import Tenants
from minillm.server.tokens import add_tokens
from minillm.server.tracing import Traces


def make_app(
    llm: AsyncLLM, config: ServerConfig | None = None, *, admission: Admission | Callable[..., Admission] | None = None,
    tenants: Tenants | None = None, on_ready: Callable[[], None] | None = None,
) -> FastAPI:  # fmt: skip
    """The whole server over an engine that runs. The caller shuts the engine down.

    admission: in place of `BoundedQueue`: an object with admit(ask, queue), or a class called as BoundedQueue is.
    tenants: what `make_tenants(config)` gave, from a caller who has asked already.
    Raises MinillmError for a tenants file or a trace file that cannot be used.
    """
    state = make_state(llm, config or ServerConfig(), admission, tenants)
    # FastAPI's own pages of documentation load scripts from another host; /openapi.json says the same without.
    app = FastAPI(
        title="minillm", version=__version__, lifespan=_lifespan(state, on_ready), docs_url=None, redoc_url=None,
        redirect_slashes=False,  # to wherever the request's Host header says
    )  # fmt: skip
    app.openapi = functools.partial(openapi, app)  # type: ignore[method-assign]
    app.state.minillm = state
    _handle_errors(app, state.metrics)
    # FastAPI keeps the functions behind its routes for good; with the state they would keep the model of a past server.
    borrowed: State = weakref.proxy(state)
    _add_openai(app, borrowed)
    add_tokens(app, borrowed)
    _add_operations(app, borrowed)
    state.timeline = add_page(app, borrowed)
    return app


def make_tenants(config: ServerConfig) -> Tenants:
    """Who is let in. Raises MinillmError for a tenants file, or a key, that cannot be used."""
    if config.tenants is not None:
        return Tenants.from_toml(config.tenants, config.admin_key)
    return Tenants.single(config.api_key, config.admin_key) if config.api_key else Tenants.open(config.admin_key)


def make_state(llm: AsyncLLM, config: ServerConfig, admission: Any = None, tenants: Tenants | None = None) -> State:
    engine = llm.engine
    tenants = tenants or make_tenants(config)
    name = model_name(llm, config)
    lifecycle = Lifecycle(llm, config.stall_s)
    ec = engine.config
    meter = LoadMeter(ec.max_num_seqs, ec.max_num_batched_tokens, by_priority=ec.scheduling_policy == "priority")
    bound = byte_bound(llm.get_tokenizer().backend)
    longest = None if bound is None else bound.longest
    if admission is None or isinstance(admission, type):
        make = admission or BoundedQueue
        admission = make(
            config.max_queued_requests, config.max_queued_tokens, max_model_len=engine.max_model_len,
            longest_token=longest,
        )  # fmt: skip
    if not callable(getattr(admission, "admit", None)):
        raise MinillmError(f"admission must have admit(ask, queue), got {admission!r:.80}")
    door = Door(
        admission, meter, max_model_len=engine.max_model_len, longest_token=longest,
        max_sequences=ec.max_num_seqs + config.max_queued_requests,
    )  # fmt: skip
    salt = None if config.hash_salt is None else config.hash_salt.encode()
    exporter = None
    if config.otlp_traces_endpoint is not None:
        from minillm.server.otel import make_exporter

        exporter = make_exporter(config.otlp_traces_endpoint)
    traces = Traces(config.trace_file, salt, exporter=exporter)
    metrics = Metrics(engine, name, ready=lambda: lifecycle.not_ready() is None, traces=traces)
    bodies = Bodies(config.body_bytes(engine.max_model_len, longest), config.body_timeout_s)
    return State(llm, config, name, lifecycle, tenants, door, metrics, traces, bound, bodies, int(time.time()))


def _lifespan(state: State, on_ready: Callable[[], None] | None) -> Any:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        events = state.llm.engine.events
        ends = [events.subscribe(state.door.meter.observe)]
        if state.timeline is not None:
            ends.append(events.subscribe(state.timeline.follow))
        warming = asyncio.create_task(_warm(state, on_ready))
        try:
            yield
        finally:
            warming.cancel()
            await asyncio.gather(warming, return_exceptions=True)
            for end in ends:
                end()
            state.metrics.close()
            await asyncio.to_thread(state.traces.close)

    return lifespan


async def _warm(state: State, on_ready: Callable[[], None] | None) -> None:
    try:
        await warm_up(state.llm, state.lifecycle, on_ready or (lambda: None))
    except Exception as error:  # of on_ready: the server is ready all the same
        log.error("nobody could be told that the server is ready: %s", error)


# Errors ------------------------------------------------------------------------------------------------------------


def _handle_errors(app: FastAPI, metrics: Metrics) -> None:
    def answer(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, headers=error.headers())

    async def api_error(request: Request, error: Exception) -> Response:
        return answer(as_api_error(error))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        see = "/openapi.json lists what there is"
        what = {404: f"there is nothing at this path; {see}", 405: f"this path does not take this method; {see}"}
        made = answer(ApiError(error.status_code, what.get(error.status_code, str(error.detail))))
        made.headers.update(error.headers or {})
        return made

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=GONE)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(MinillmError, api_error)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(HTTPException, http_error)
    app.add_middleware(_Guard)
    app.add_middleware(Counted, count=metrics.http)  # outside of the guard: what that answers is counted too


class _Guard:
    """Any other exception is 500. A handler for all would be called outside of the others, and the exception would then
    be passed on to uvicorn, which logs its message."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
            return
        except Exception as error:
            if scope["type"] != "http":
                raise
            log.error("a %s failed: %s", scope["method"], without_text(error))
            told = as_api_error(error)
        await JSONResponse(told.body(), told.status)(scope, receive, send)  # refused by uvicorn if one has begun


# Routes --------------------------------------------------------------------------------------------------------------

GENERATION_ERRORS = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)


def _add_openai(app: FastAPI, state: State) -> None:
    for path, kind, summary in (
        ("/v1/chat/completions", ChatCompletionRequest, "Answer a conversation."),
        ("/v1/completions", CompletionRequest, "Complete a prompt, or several."),
    ):

        def generate(path: str = path, kind: type[Any] = kind) -> Callable[[], Any]:
            async def endpoint() -> Response:
                return Answer(state, path, kind)

            return endpoint

        app.add_api_route(path, generate(), methods=["POST"], summary=summary, **documented(kind, *GENERATION_ERRORS))

    @app.get("/v1/models", summary="The model that is served.", **documented(MODELS, 401))
    async def models(request: Request) -> dict[str, Any]:
        state.tenants.authenticate(request.headers.get("authorization"))
        return {"object": "list", "data": [state.card()]}

    @app.get("/v1/models/{name:path}", summary="One model.", **documented(CARD, 401, 404))
    async def model(request: Request, name: str) -> dict[str, Any]:
        state.tenants.authenticate(request.headers.get("authorization"))
        state.check_model(name)
        return state.card()


def _add_operations(app: FastAPI, state: State) -> None:
    @app.get("/health", summary="Whether the engine lives.", **documented(status("ok"), 503))
    async def health() -> dict[str, str]:
        if state.llm.dead is not None:
            raise dead_error()
        return {"status": "ok"}

    @app.get("/ready", summary="Whether this server should get traffic.", **documented(status("ready"), 503))
    async def ready() -> dict[str, str]:
        if (why := state.lifecycle.not_ready()) is not None:
            raise ApiError(503, f"not ready: {why}", code="not_ready", retry_after_s=1.0)
        return {"status": "ready"}

    @app.get("/metrics", summary="Prometheus metrics.", **documented(TEXT))
    def metrics() -> Response:  # not async: it takes milliseconds, which a thread has and the loop has not
        return Response(state.metrics.render(), media_type=CONTENT_TYPE)

    @app.get("/state", summary="The engine at a moment.", **documented(STATE))
    def engine_state() -> dict[str, Any]:  # not async: it walks through all requests
        """For who balances load over several servers. It answers whatever its state is."""
        now = snapshot(state.llm, state.model_name, state.lifecycle.stall_s)
        why, dead = state.lifecycle.not_ready(), state.lifecycle.failed
        alive = now.alive and dead is None
        # Not the engine's own words about its death: they may hold a user's text.
        told = replace(now, model=state.model_name, alive=alive, ready=why is None, why=why or "").to_dict()
        return {name: told[name] for name in STATE["properties"]}

    @app.post("/drain", summary="Take nothing new, and end what runs in time.", **documented(DRAINING, 401, 403))
    async def drain(request: Request) -> dict[str, Any]:
        state.tenants.admin(request.headers.get("authorization"))
        running = state.lifecycle.under_way
        state.lifecycle.start_drain(state.config.grace_s)
        return {"status": "draining", "running": running, "grace_s": state.config.grace_s}
