"""A client's side of HTTP for a replica elsewhere: one request a connection, and events with back-pressure. Lesson 14.

Each request has a connection of its own: closing it is how a request is cancelled, and one that was kept for later
might just then be closed by its server, which would look like that server's death.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from minillm.errors import MinillmError
from minillm.trace.wire import FAULTS, MOST, Connection, Events, Reply, words_of

MOST_BUFFERED = 64  # events that a stream may be ahead of its reader
Fields = list[tuple[str, str]]


class Unreachable(MinillmError):
    """No answer, or one that is none: nobody is there, or the connection broke."""


@dataclass(frozen=True)
class Answer:
    """A whole answer. headers: names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """None if it is no JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):  # of a server of others
            return None


class Refused(Exception):
    """An answer in place of a stream."""

    def __init__(self, answer: Answer):
        super().__init__(answer.status)
        self.answer = answer


class Address:
    """Where a server is: http(s)://host:port, with or without /v1."""

    def __init__(self, url: str):
        try:
            parts = urlsplit(url)
            port = parts.port
        except (ValueError, AttributeError) as error:
            raise MinillmError(f"url {url!r:.80} cannot be read ({error})") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise MinillmError(f"url must look like http://127.0.0.1:8000, got {url!r:.80}")
        self.url, self.host, self.port = url, parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self.root = parts.path.rstrip("/").removesuffix("/v1")
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host_header = parts.netloc.rpartition("@")[2]

    def fields(self, api_key: str | None = None, request_id: str | None = None) -> Fields:
        found = [("Host", self._host_header), ("Content-Type", "application/json"), ("Connection", "close")]
        found += [("Authorization", f"Bearer {api_key}")] if api_key else []
        return found + ([("X-Request-Id", request_id)] if request_id else [])

    @contextlib.asynccontextmanager
    async def connection(self, timeout_s: float) -> AsyncIterator[Connection]:
        """A fresh one, closed at the end of the block. Raises OSError, TimeoutError among them."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(Connection, self.host, self.port, ssl=self.tls)
        try:
            yield connection
        finally:
            connection.close()

    async def ask(self, method: str, path: str, fields: Fields, timeout_s: float, body: Any = None) -> Answer:
        """One request and its whole answer. Raises Unreachable."""
        raw = b"" if body is None else json.dumps(body).encode()
        data = bytearray()

        def hear(now: float, reply: Reply, piece: bytes) -> bool:
            data.extend(piece)
            return len(data) > MOST

        try:
            async with asyncio.timeout(timeout_s), self.connection(timeout_s) as connection:
                await connection.request(method, self.root + path, fields, raw, hear)
                assert connection.reply is not None
                return Answer(connection.reply.status, connection.reply.headers, bytes(data))
        except TimeoutError:
            raise Unreachable(f"{self.host}:{self.port} does not answer within {timeout_s:g} s") from None
        except FAULTS as error:
            raise Unreachable(f"{self.host}:{self.port}: {words_of(error)}") from None

    async def events(self, path: str, fields: Fields, body: Any, connect_s: float) -> AsyncIterator[list[str]]:
        """POST, and the server-sent events of the answer: what has come since the last look, at least one.

        A reader that stalls stops the connection, and so the server's stream. Raises Refused for an answer that is no
        stream, Unreachable for a connection that breaks.
        """
        arrived: deque[str] = deque()
        wake, events, other = asyncio.Event(), Events(), bytearray()

        def hear(now: float, reply: Reply, piece: bytes) -> bool:
            kind = reply.headers.get("content-type", "").partition(";")[0].strip()
            if reply.status != 200 or kind != "text/event-stream":
                other.extend(piece)
                return len(other) > MOST
            arrived.extend(events.feed(piece))
            if len(arrived) > MOST_BUFFERED and connection.transport is not None:
                with contextlib.suppress(RuntimeError):  # it is closing
                    connection.transport.pause_reading()
            wake.set()
            return False

        try:
            async with self.connection(connect_s) as connection:
                raw = json.dumps(body).encode()
                task = asyncio.ensure_future(connection.request("POST", self.root + path, fields, raw, hear))
                task.add_done_callback(lambda _: wake.set())
                try:
                    while True:
                        await wake.wait()
                        wake.clear()
                        ended = task.done()  # before the look: all that it brought is there
                        if arrived:
                            found = list(arrived)
                            arrived.clear()
                            yield found
                            if connection.transport is not None and not connection.lost:
                                with contextlib.suppress(RuntimeError):
                                    connection.transport.resume_reading()
                        if ended and not arrived:
                            task.result()
                            break
                        if arrived or task.done():
                            wake.set()
                finally:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                reply = connection.reply
            assert reply is not None
            if other or reply.status != 200:
                raise Refused(Answer(reply.status, reply.headers, bytes(other)))
        except TimeoutError:
            raise Unreachable(f"{self.host}:{self.port} takes no connection within {connect_s:g} s") from None
        except FAULTS as error:
            if isinstance(error, MinillmError):
                raise
            raise Unreachable(f"{self.host}:{self.port}: {words_of(error)}") from None
