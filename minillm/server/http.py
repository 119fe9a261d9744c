"""The wire: bodies that are bounded in size and time, events as they come, clients that leave. Lesson 13.

A generation is one task (the pump, which sends) beside three things that may end it: the client leaves, its time is up,
or the server shuts down. Whichever it is, the pump is cancelled, which aborts the request in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request

from minillm.server.errors import ApiError

log = logging.getLogger("minillm.server")
Send = Callable[[dict[str, Any]], Awaitable[None]]
BODIES_TOGETHER = 64 << 20  # bytes
LAST_WORDS_S = 1.0  # to send an error to a reader that may have stalled


class ClientGone(Exception):
    """Nobody reads the answer any more."""


class Bodies:
    """Reads the bodies of requests: each bounded in size and time, and all that are under way in memory.

    max_bytes of one, timeout_s of its arrival, together: bytes of all at once.
    """

    def __init__(self, max_bytes: int, timeout_s: float, together: int = BODIES_TOGETHER):
        self.max_bytes, self.timeout_s, self.together = max_bytes, timeout_s, max(together, max_bytes)
        self.held = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body; until the end of the block its bytes count. Raises ApiError 413 for one beyond max_bytes, 408
        for a slow sender, 415 for what is not JSON, 503 when all have too many bytes together."""
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"content-type must be application/json, got {kind[:60]!r}")
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > self.max_bytes:
            raise ApiError(413, f"the body has {int(length):,} bytes; at most {self.max_bytes:,} are taken")
        parts: list[bytes] = []
        try:
            await self._collect(request, parts)
            yield b"".join(parts)
        finally:
            self.held -= sum(map(len, parts))

    async def _collect(self, request: Request, parts: list[bytes]) -> None:
        size = 0
        try:
            async with asyncio.timeout(self.timeout_s):
                async for part in request.stream():
                    size += len(part)
                    if size > self.max_bytes:
                        raise ApiError(413, f"the body is longer than {self.max_bytes:,} bytes; no more are taken")
                    if self.held + len(part) > self.together:
                        raise ApiError(503, "this server reads as many bodies as its memory allows; try again later",
                                       code="too_many_bodies", retry_after_s=1.0)  # fmt: skip
                    self.held += len(part)
                    parts.append(part)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {self.timeout_s:g} s") from None
        except ClientDisconnect:
            raise ClientGone from None


class Call:
    """One generation under way, and what may end it early."""

    def __init__(self, request: Request, timeout_s: float):
        self._receive, self.timeout_s = request.receive, timeout_s
        self._ended: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()

    def end(self, error: ApiError) -> None:
        """From the server's loop: this call ends now, with this error."""
        if not self._ended.done():
            self._ended.set_result(error)

    async def run(self, pump: Awaitable[Any]) -> Any:
        """The pump's result. Raises ClientGone or an ApiError when it was ended early; then it runs no longer."""
        work = asyncio.ensure_future(pump)
        gone = asyncio.ensure_future(self._left())
        try:
            watched: set[asyncio.Future[Any]] = {work, gone, self._ended}
            done, _ = await asyncio.wait(watched, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if work in done:
                return work.result()
            if self._ended in done:
                raise self._ended.result()
            if gone in done:
                raise ClientGone
            raise ApiError(504, f"the answer took longer than the {self.timeout_s:g} s that a request may take",
                           code="request_timeout")  # fmt: skip
        finally:
            for task in (work, gone):
                task.cancel()
            # Waited for, so that when this call is over its request is out of the engine, or on its way out.
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _left(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def event(data: Any) -> bytes:
    """One server-sent event (WHATWG HTML, 9.2). JSON has no line breaks of its own, so one data line is enough."""
    return b"data: " + to_json(data) + b"\n\n"


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # made once: this runs for every token


def to_json(data: Any) -> bytes:
    return _encode(data).encode("utf-8", "replace")


DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy that collects a stream undoes it
}  # fmt: skip


class EventStream:
    """One answer on its way out: server-sent events, or a whole JSON object.

    The status line waits for the first event. So what goes wrong before it (a full queue, a passed deadline) is told by
    its status, and a client may try elsewhere.
    """

    def __init__(self, send: Send, headers: dict[str, str]):
        self._send, self.headers = send, headers
        self.begun = self.closed = False
        self.sent = 0  # bytes, heads not counted

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.begun = True
        raw = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in {**headers, **self.headers}.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes) -> None:
        """Waits while the client reads too slowly: that is where back-pressure begins."""
        if not self.begun:
            await self._begin(200, STREAM_HEADERS)
        self.sent += len(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def close(self) -> None:
        self.closed = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        self.closed = True
        raw = to_json(body)
        size = {"Content-Type": "application/json", "Content-Length": str(len(raw))}
        await self._begin(status, {**size, **(headers or {})})
        self.sent += len(raw)
        await self._send({"type": "http.response.body", "body": raw, "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """With its status if nothing was sent yet. Otherwise the error is an event, and [DONE] does not come."""
        if self.closed:  # the client has its answer
            return
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(LAST_WORDS_S):
                if not self.begun:
                    await self.whole(error.status, error.body(), error.headers())
                    return
                await self.write(event(error.body()))
                await self.close()


async def merged(streams: list[AsyncIterator[Any]]) -> AsyncIterator[tuple[int, Any]]:
    """(which, item) from several streams as they come. None runs ahead of the reader by more than one item."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:  # type: ignore[type-var]
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Any, BaseException | None]] = asyncio.Queue(maxsize=1)

    async def forward(i: int, stream: AsyncIterator[Any]) -> None:
        try:
            async with contextlib.aclosing(stream) as items:  # type: ignore[type-var]
                async for item in items:
                    await queue.put((i, item, None))
            await queue.put((i, None, None))
        except Exception as error:
            await queue.put((i, None, error))

    tasks = [asyncio.ensure_future(forward(i, s)) for i, s in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            i, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                left -= 1
            else:
                yield i, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
