"""What HTTP and server-sent events cost alone: an application without an engine, for `bench serving`. Lesson 13.

It streams ready-made pieces, those of all streams at the same moments, as the steps of an engine do. What a chunk, a
request and an idle connection cost here is what `bench serving` predicts from.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minillm.bench.streams import Remote

PIECES, GAP_S = 50, 0.02  # of each stream, and between them
CONNECTIONS = 100


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """An application without an engine: streams of ready-made pieces, all of them one step at a time."""
    body = b"{}"
    if scope["path"].endswith("/v1/models"):
        body = b'{"data": [{"id": "bare"}]}'
    elif scope["method"] == "POST":
        asked = b""
        while (message := await receive())["type"] == "http.request":
            asked += message.get("body", b"")
            if not message.get("more_body"):
                break
        return await _pieces(send, json.loads(asked)["max_tokens"])
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})
    return None


async def _pieces(send: Any, count: int) -> None:
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    loop = asyncio.get_running_loop()
    for i in range(count):
        if i:
            await asyncio.sleep(GAP_S - loop.time() % GAP_S)  # all streams at the same moments, as in a step
        choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "stop_reason": None}
        piece = {"id": "cmpl-bare", "object": "text_completion", "created": 0, "model": "bare", "choices": [choice]}
        await send(
            {"type": "http.response.body", "body": b"data: %s\n\n" % json.dumps(piece).encode(), "more_body": True}
        )
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


@contextmanager
def serve() -> Iterator[str]:
    """The bare application under uvicorn in a thread; its url."""
    import uvicorn

    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # said in full: else asyncio leaves
    # Nagle's algorithm on, and a chunk waits for the acknowledgement of the one before
    sock.bind(("127.0.0.1", 0))
    sock.listen()  # from here on a client may come, and waits
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        sock.close()


def costs(count: int) -> dict[str, float]:
    """chunk_s: processor seconds of server and client for a chunk of `count` streams; request_s: TTFT of one request.

    connection_bytes: memory of an idle connection, 0 where the system does not say.
    """
    with serve() as url, Remote(url) as client:
        client.do("burst", prompts=[[1]] * count, new=2)  # warm
        before = time.process_time()
        answer = client.do("burst", prompts=[[1]] * count, new=PIECES)
        spent = time.process_time() - before + answer["cpu"]
        one = [client.do("alone", prompt=[1], new=1)["stamps"][0].ttft for _ in range(9)]
        memory = resident()
        client.do("hold", connections=CONNECTIONS, path="/")
        more = resident()
        client.do("drop")
    each = max(0, more - memory) / (CONNECTIONS) if memory is not None and more is not None else 0.0
    return {"chunk_s": spent / (count * PIECES), "request_s": statistics.median(one), "connection_bytes": each}


def resident() -> int | None:
    """Bytes of memory of this process that are in use now; None where /proc does not say."""
    gc.collect()
    try:
        words = Path("/proc/self/status").read_text(encoding="ascii").partition("VmRSS:")[2].split()
    except OSError:
        return None
    return int(words[0]) * 1024 if words else None
