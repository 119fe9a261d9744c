"""uvicorn's HTTP connection, with the bounds that it leaves out. Lesson 13.

bound                what happens beyond it
idle_timeout_s       a connection with no request under way is closed. It has sent nothing, or only a part of a head
max_connections      its requests are told 503, and it is closed (health and metrics are still answered). One that asks
                     nothing is closed after DRAIN_S; one for which no file would be left is cut off (open_files.py)
WRITE_BUFFER         bytes that may wait in this process for a reader: then its stream waits
CLOSING_S            a connection that is being closed, and of which nothing has been read for so long, is cut off
READ_AHEAD           bytes of requests sent behind one that is under way. Up to it, a goodbye behind them is heard

A reader that stalls is paused when its buffers are full. That is, beyond what its own machine has taken, after

    max_buffered tokens of one sequence, and WRITE_BUFFER + 2 send_buffer_bytes of events

of AsyncLLM, of asyncio, and of the kernel (which doubles what it is asked for, for its bookkeeping); and what is on its
way. An event has some 200 bytes and one token, or several where the loop is behind the engine.

It stands on h11, not on httptools where that is installed: the head of a request is then bounded in size, and a client
that leaves while another request of its own waits is heard.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable
from typing import Any

import h11
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from minillm.server.config import ServerConfig
from minillm.server.counted import Counted
from minillm.server.errors import ApiError
from minillm.server.metrics import Metrics
from minillm.server.open_files import cut_off_beyond, most_connections

WRITE_BUFFER = 16 << 10
READ_AHEAD = 64 << 10
CLOSING_S = 5.0
LOOK_S = 0.5  # between looks at all connections
DRAIN_S = 2.0  # to read what a refused client sends, or to wait until it sends something
ALWAYS = ("/health", "/metrics")  # a probe that fails because of a burst would have the server restarted


class Connection(H11Protocol):
    """One client. What follows is set by `connection_class`."""

    limits: ServerConfig
    most: int  # connections; those beyond are told so
    cut_off: float  # and those beyond so many are not
    metrics: Metrics

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER)
        self._seen: tuple[Any, ...] = ()
        self._since = time.monotonic()
        self._patience = self.limits.idle_timeout_s
        if len(self.connections) > self.cut_off:
            transport.abort()
            self.metrics.failed(too_many())
        elif len(self.connections) > self.most:
            self.app = _TooMany(self.app, self.metrics)
            self._patience = min(self._patience, DRAIN_S)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # uvicorn stops to read at the first byte of a next request, and so would not hear that the client has left.
        behind = self.flow.read_paused and self.cycle is not None and not self.cycle.more_body
        if behind and len(self.conn.trailing_data[0]) <= READ_AHEAD:
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """What was sent is not HTTP, or its head is too long: told as every other error is."""
        content = json.dumps(ApiError(400, f"{msg.rstrip('.')}; this is an HTTP/1.1 server").body()).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode()),
                   (b"connection", b"close")]  # fmt: skip
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=content), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()
        self.metrics.http(None, "", 400)

    def look(self, now: float) -> None:
        """Called now and then: close what is idle, cut off what cannot be closed. now: of time.monotonic."""
        closing, answered = self.transport.is_closing(), self.cycle is None or self.cycle.response_complete
        state = (self.cycle, answered, closing, self.transport.get_write_buffer_size())
        if state != self._seen:  # something has moved
            self._seen, self._since = state, now
        elif closing and now - self._since > CLOSING_S:
            self.transport.abort()
        elif not closing and answered and now - self._since > self._patience:
            self.transport.close()


def connection_class(config: ServerConfig, metrics: Metrics) -> type[Connection]:
    """For uvicorn's option `http`. metrics: who is told of those turned away."""
    most = most_connections(config.max_connections)
    bounds = {"limits": config, "most": most, "cut_off": cut_off_beyond(most), "metrics": metrics}
    return type("Connection", (Connection,), bounds)


async def watch(connections: Iterable[Connection]) -> None:
    """Look at all connections again and again, until cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        for connection in list(connections):
            connection.look(time.monotonic())


def too_many() -> ApiError:
    return ApiError(503, "this server has as many connections as it takes; try again later, or elsewhere",
                    code="too_many_connections", retry_after_s=1.0)  # fmt: skip


class _TooMany:
    """In place of the application, for a connection beyond the bound."""

    def __init__(self, app: Any, metrics: Metrics):
        self.app, self.metrics = app, metrics
        self.refuse = Counted(self._refuse, metrics.http)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] in ALWAYS:
            await self.app(scope, receive, send)
        else:
            await self.refuse(scope, receive, send)

    async def _refuse(self, scope: Any, receive: Any, send: Any) -> None:
        with contextlib.suppress(TimeoutError):  # closing with bytes unread would reset: the answer could get lost
            async with asyncio.timeout(DRAIN_S):
                while (await receive()).get("more_body"):
                    pass
        error = too_many()
        self.metrics.failed(error)
        answer = JSONResponse(error.body(), error.status, {**error.headers(), "Connection": "close"})
        await answer(scope, receive, send)
