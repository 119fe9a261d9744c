"""A tiny OpenAI-style server that does as it is told, for the load client: raw bytes, known pieces, no engine."""

from __future__ import annotations

import asyncio
import json
import threading

USUAL = object()


def event(data) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def piece(text, chat=False, **extra) -> bytes:
    choice = {"index": 0, "finish_reason": None} | ({"delta": {"content": text}} if chat else {"text": text})
    return event({"id": "cmpl-7", "choices": [choice], **extra})


def usual(body) -> list:
    """max_tokens pieces, each after a pause; role chunk, finish chunk, usage and [DONE] as OpenAI sends them."""
    chat, n = "messages" in body, body["max_tokens"]
    parts = (
        [event({"id": "cmpl-7", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})]
        if chat
        else []
    )
    for i in range(n):
        parts += [0.002, piece(f"w{i} ", chat)]
    parts.append(event({"id": "cmpl-7", "choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "length"}]}))
    usage = {"prompt_tokens": 5, "completion_tokens": n, "total_tokens": 5 + n}
    return [*parts, event({"id": "cmpl-7", "choices": [], "usage": usage}), event(b"[DONE]")]


class FakeServer:
    """`with FakeServer(behave) as server: server.url`.

    behave(body) -> a list of: bytes (a chunk of the stream), seconds to wait, a function to wait for until it is true,
    "hang up"; or (status, headers, bytes), a plain answer. All bodies are kept in `seen`; `left` counts clients that
    went away in the middle; `most` is how many requests were answered at once.
    """

    def __init__(self, behave=usual):
        self.behave, self.seen, self.left, self.connections, self.most, self.now = behave, [], 0, 0, 0, 0
        self.paths, self.headers = [], []

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        ready = threading.Event()

        def work():
            asyncio.set_event_loop(self.loop)
            self.server = self.loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
            ready.set()
            self.loop.run_forever()
            self.server.close()
            pending = asyncio.all_tasks(self.loop)
            for task in pending:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
            self.loop.close()

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()
        assert ready.wait(60)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

    async def _serve(self, reader, writer):
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _one(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}
        path = lines[0].split()[1]
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        self.paths.append(path)
        self.headers.append(headers)
        if path.endswith("/v1/models"):
            return await self._plain(writer, 200, {}, b'{"data": [{"id": "fake"}]}')
        if path.endswith("/health"):
            return await self._plain(writer, 200, {}, b"")
        if lines[0].startswith("GET "):
            return await self._plain(writer, 404, {}, b"")
        body = json.loads(raw)
        self.seen.append(body)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            answer = self.behave(body)
            if isinstance(answer, tuple):
                return await self._plain(writer, *answer)
            return await self._stream(reader, writer, answer)
        finally:
            self.now -= 1

    async def _plain(self, writer, status, headers, body):
        lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *(f"{k}: {v}" for k, v in headers.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()
        return True

    async def _stream(self, reader, writer, parts):
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        gone = asyncio.ensure_future(
            reader.read(1)
        )  # the next request would wait: this client sends none before the end
        for part in parts:
            if part == "hang up":
                gone.cancel()
                return False
            if isinstance(part, bytes):
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                await writer.drain()
            else:
                await asyncio.wait([gone], timeout=0.001 if callable(part) else part)
                while callable(part) and not part() and not gone.done():
                    await asyncio.wait([gone], timeout=0.001)
                if gone.done():
                    self.left += 1
                    return False
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True
