"""HTTP/1.1 and server-sent events as a client sees them, with the time of each read. Lesson 13; `client.py` uses it.

By hand, because a load client takes from the cores of the server that it measures, and general clients do much more for
each chunk of a stream. Only what an answer to GET or POST can be is understood; all else is an error.
"""

from __future__ import annotations

import asyncio
import email.utils
import re
import time
from collections.abc import Callable, Sequence

MOST_HEAD = 1 << 16  # bytes of status and headers
MOST = 1 << 22  # bytes of one event, or of the body of a refusal
IDLE_S = 2.0  # a connection that was idle for longer may be closed by the server at any moment: uvicorn waits 5 s
SIZE = re.compile(rb"[0-9a-fA-F]{1,8}")


class Reply:
    """One response (RFC 9112), fed as it arrives; `feed` gives the bytes of its body. Raises ValueError if it is none.

    status, headers (names in lower case) are there once the head is complete; done once the body is.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.done = False
        self._rest = b""
        self._left = 0
        self._next: Callable[[], bytes | None] = self._head  # what comes now; None: not all of it is there

    def feed(self, data: bytes) -> bytes:
        self._rest += data
        found = []
        while not self.done and (piece := self._next()) is not None:
            found.append(piece)
        return b"".join(found)

    def eof(self) -> None:
        """The server has closed the connection: the end of a body without a length, and an error anywhere else."""
        if self._next == self._to_the_end:
            self.done = True
        if not self.done:
            raise ConnectionError("the connection broke before the end of the answer")

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection can be used again."""
        return (
            self.done and self._next != self._to_the_end and "close" not in self.headers.get("connection", "").lower()
        )

    def _line(self, most: int) -> bytes | None:
        line, found, rest = self._rest.partition(b"\r\n")
        if len(line) > most:
            raise ValueError("a line of the answer is too long to be HTTP")
        if not found:
            return None
        self._rest = rest
        return line

    def _head(self) -> bytes | None:
        head, found, rest = self._rest.partition(b"\r\n\r\n")
        if len(head) > MOST_HEAD:
            raise ValueError("the head of the answer is too long")
        if not found:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if not words[0].startswith("HTTP/1.") or len(words) < 2 or not words[1].isdecimal():
            raise ValueError(f"the answer is no HTTP/1.1: {first[:40]!r}")
        self._rest, self.status = rest, int(words[1])
        self.headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        if self.status < 200:  # more is to come
            return b""
        if words[0] == "HTTP/1.0":
            self.headers.setdefault("connection", "close")
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._next = self._chunk
        elif (length := self.headers.get("content-length")) is not None:
            if not length.isdecimal():
                raise ValueError(f"the answer's length is no number: {length[:40]!r}")
            self._left, self._next = int(length), self._length
            self.done = not self._left
        elif self.status in (204, 304):
            self.done = True
        else:
            self._next = self._to_the_end
        return b""

    def _chunk(self) -> bytes | None:
        end = self._rest.find(b"\r\n")
        if end < 0 and len(self._rest) > MOST_HEAD:
            raise ValueError("the size of a chunk is too long")
        if end < 0:
            return None
        word = self._rest[:end].partition(b";")[0].strip()
        if SIZE.fullmatch(word) is None:
            raise ValueError(f"the size of a chunk is no number: {word[:40]!r}")
        size = int(word, 16)
        if not size:
            self._rest, self._next = self._rest[end + 2 :], self._trailer
            return b""
        begin = end + 2
        if len(self._rest) < begin + size + 2:
            if size > MOST:
                raise ValueError(f"a chunk of more than {MOST} bytes")
            return None
        if self._rest[begin + size : begin + size + 2] != b"\r\n":
            raise ValueError("a chunk does not end where it says")
        piece, self._rest = self._rest[begin : begin + size], self._rest[begin + size + 2 :]
        return piece

    def _trailer(self) -> bytes | None:
        line = self._line(MOST_HEAD)
        self.done = line == b""
        return b"" if line is not None else None

    def _length(self) -> bytes | None:
        piece, self._rest = self._rest[: self._left], self._rest[self._left :]
        self._left -= len(piece)
        self.done = not self._left
        return piece or None

    def _to_the_end(self) -> bytes | None:
        piece, self._rest = self._rest, b""
        return piece or None


Hear = Callable[[float, Reply, bytes], bool]  # (when it was read, the answer so far, new bytes of the body) -> enough


class Connection(asyncio.Protocol):
    """One connection. What arrives is heard in the very call that brings it: no task has to wake up for a chunk."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle_since = time.perf_counter()
        self.lost = False
        self.reply: Reply | None = None
        self._hear: Hear | None = None
        self._done: asyncio.Future[None] | None = None

    @property
    def usable(self) -> bool:
        closing = self.lost or self.transport is None or self.transport.is_closing()
        return not closing and time.perf_counter() - self.idle_since < IDLE_S

    async def request(
        self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes, hear: Hear | None
    ) -> None:  # fmt: skip
        """Send, and wait for the end of the answer, or until `hear` has enough. Without hear: only send.

        Raises OSError or ValueError for whatever a server does that it should not.
        """
        assert self.transport is not None
        fields = [*headers, ("Content-Length", str(len(body)))]
        lines = [f"{method} {target} HTTP/1.1", *(f"{k}: {v}" for k, v in fields), "", ""]
        self.reply, self._hear = Reply(), hear
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write("\r\n".join(lines).encode("latin-1") + body)
        if self.lost:
            raise ConnectionError("the connection was closed")
        while hear is None and self.transport.get_write_buffer_size() and not self.lost:
            await asyncio.sleep(0.001)
        if hear is not None:
            await self._done

    def release(self) -> bool:
        """Whether it can take another request. If not, it is closed: the server hears that its client has left."""
        whole = self.reply is not None and self.reply.keeps_alive and not self.lost
        self.reply = self._hear = self._done = None
        self.idle_since = time.perf_counter()
        if not whole:
            self.close()
        return whole

    def close(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._done is None or self._done.done() or self.reply is None or self._hear is None:
            return
        try:
            piece = self.reply.feed(data)
            enough = self.reply.status >= 200 and self._hear(now, self.reply, piece)
            if enough or self.reply.done:
                self._done.set_result(None)
        except Exception as error:
            self._done.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self._done is None or self._done.done() or self.reply is None:
            return
        try:
            if exc is not None:
                raise exc
            self.reply.eof()
            self._done.set_result(None)
        except Exception as error:
            self._done.set_exception(error)


class Events:
    """Server-sent events (WHATWG HTML, 9.2), fed as they arrive: the text of each complete one."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[str]:
        """Raises ValueError for an event that is too long to be one."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MOST:
            raise ValueError(f"an event of more than {MOST} bytes")
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data).decode("utf-8", "replace"))
                self._data = []
        return found


def retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number, or a date. None for none, and for nonsense."""
    if value is None:
        return None
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


# What a server or a network can do to a request.
FAULTS = (OSError, ValueError, TypeError, LookupError, AttributeError)


def words_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300].rstrip(": ")
