"""What the tests of a server's life share: a tiny model behind a real socket, and clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import re
import shutil
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from minillm import LLM, AsyncLLM
from minillm.request import SamplingParams

pytest.importorskip("fastapi")
from minillm.server import connection
from minillm.server.local import LocalServer

WORDS = 211
SMALL = {"num_kv_blocks": 64, "max_model_len": 512, "dtype": "float32", "threads": 1, "enable_prefix_caching": True,
         "scheduling_policy": "priority"}  # fmt: skip
WAIT_S = 300.0  # of a machine that is busy with other things; what is waited for takes far less


def tiny_model(tiny_folder: Callable[[str], Any], folder: Any) -> Any:
    """A random Qwen3 of 211 words that can tell long stories, with a template for conversations."""
    shutil.copytree(tiny_folder("qwen3"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    backend = Backend(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@contextlib.contextmanager
def serving(folder: Any, *, engine: dict[str, Any] | None = None, **options: Any) -> Iterator[LocalServer]:
    """A server that must leave nothing behind."""
    with AsyncLLM(folder, **(SMALL | (engine or {}))) as llm:
        with LocalServer(llm, served_model_name="tiny", **options) as server:
            yield server
        assert not server._thread.is_alive()
        assert server.failure is None


@functools.cache
def reference(folder: Any) -> LLM:
    return LLM(folder, **(SMALL | {"max_model_len": 8192, "num_kv_blocks": 512}))


def expected(folder: Any, prompt: list[int], max_tokens: int) -> str:
    """The text that greedy decoding gives."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return reference(folder).generate([prompt], params, use_tqdm=False)[0].outputs[0].text


def lasting_port() -> int:
    """A free port that the kernel gives to nobody: who closes it for a while finds it free again.

    One that the kernel chose may become the near end of any connection that somebody opens in between.
    """
    ranges = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(ranges.read_text().split()[0]) if ranges.exists() else 32768
    own = random.Random(time.time_ns() ^ os.getpid())  # two runs of the tests on one machine
    for port in own.sample(range(min(10_000, first - 1000), first), 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no port below {first} is free")


class web:
    """httpx with patience: by itself it waits for five seconds."""

    get = functools.partial(httpx.get, timeout=WAIT_S)
    post = functools.partial(httpx.post, timeout=WAIT_S)
    request = functools.partial(httpx.request, timeout=WAIT_S)


def wait_for(true: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + WAIT_S
    while not (result := true()):
        assert time.monotonic() < end, f"it never happened: {what}"
        time.sleep(0.002)
    return result


def body(prompt: Any = (5, 6), max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": list(prompt) if isinstance(prompt, tuple) else prompt, "temperature": 0,
            "max_tokens": max_tokens, "ignore_eos": True, **fields}  # fmt: skip


class Steps:
    """The engine's steps, which wait until a test lets them through. What they are held for is then no race.

    While a step is held, the engine's thread hears no commands, as in a long step.
    """

    def __init__(self, server: LocalServer):
        self.core, self._commands = server.state.llm.core, server.state.llm._commands
        self.waits = False
        self._step, self._gate = self.core.step, threading.Semaphore(0)

    def _held(self) -> Any:
        self.waits = True
        self._gate.acquire()
        return self._step()

    def hear(self, count: int = 1) -> None:
        """While a step is held, wait until so many commands have come; then let the engine hear them. Waited for with
        `until`, they might come after any number of steps."""
        wait_for(lambda: self._commands.qsize() >= count, "it is on its way to the engine")
        heard = threading.Event()
        self._commands.put((lambda _: heard.set(), None))  # type: ignore[arg-type]
        self.until(heard.is_set, "the engine has it")

    def until(self, true: Callable[[], Any], what: str) -> None:
        """Let steps through, one by one. When it returns the next one is held, so no command is heard by itself, or
        there is nothing to compute."""
        while not true():
            wait_for(lambda: self.waits or true(), what)
            if self.waits:
                self.waits = False
                self._gate.release()
                wait_for(lambda: self.waits or true(), what)
        # what was waited for may have come about in the middle of a step, behind which the engine hears commands
        wait_for(lambda: self.waits or not self.core.has_work, "the next step is held")

    def close(self) -> None:
        self.core.step = self._step
        self._gate.release()


@contextlib.contextmanager
def held(server: LocalServer) -> Iterator[Steps]:
    """Hold all steps that have not begun. At the end of the block they go on."""
    steps = Steps(server)
    steps.core.step = steps._held
    try:
        yield steps
    finally:
        steps.close()


class Clock:
    """Time that passes when a test says so: for what the server's loop, its connections and the engine wait for.

    The loop's and the engine's goes on by itself too; the connections' stands still in between.
    """

    def __init__(self, server: LocalServer, monkeypatch: Any):
        assert server.loop is not None
        self.loop, self.core = server.loop, server.state.llm.core
        self.ahead, self.now = 0.0, time.monotonic()
        self.connections: set[Any] = set()  # those that are open, of those made from now on
        loop_time, engine_time = self.loop.time, self.core.clock
        monkeypatch.setattr(self.loop, "time", lambda: loop_time() + self.ahead)
        monkeypatch.setattr(self.core, "clock", lambda: engine_time() + self.ahead)
        monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: self.now))
        made, lost = connection.Connection.connection_made, connection.Connection.connection_lost
        kept = self.connections
        monkeypatch.setattr(connection.Connection, "connection_made", lambda c, t: (kept.add(c), made(c, t))[1])
        monkeypatch.setattr(connection.Connection, "connection_lost", lambda c, e: (kept.discard(c), lost(c, e))[1])

    def advance(self, seconds: float) -> None:
        """What is so now has been so for that long."""

        async def advance() -> None:
            for c in list(self.connections):
                c.look(self.now)
            self.ahead, self.now = self.ahead + seconds, self.now + seconds
            for c in list(self.connections):
                c.look(self.now)

        asyncio.run_coroutine_threadsafe(advance(), self.loop).result(WAIT_S)


class Wire:
    """A client that does only what it is told to, one socket."""

    def __init__(self, port: int, receive_buffer: int | None = None):
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(("127.0.0.1", port))
        self.bytes = b""

    def post(self, data: Any, path: str = "/v1/completions", headers: str = "", cut: int | None = None) -> Wire:
        """Send a request, or its first `cut` bytes."""
        raw = json.dumps(data).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
        self.socket.sendall((head.encode() + headers.encode() + b"\r\n" + raw)[:cut])
        return self

    def get(self, path: str) -> Wire:
        self.socket.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return self

    def more(self) -> bool:
        """Read something. False: the server has closed."""
        try:
            data = self.socket.recv(65536)
        except ConnectionError:
            return False
        self.bytes += data
        return bool(data)

    def until(self, end: bytes) -> bytes:
        """What comes up to `end`, which must come."""
        while end not in self.bytes:
            assert self.more(), f"closed before {end!r}: {self.bytes[-300:]!r}"
        out, _, self.bytes = self.bytes.partition(end)
        return out

    def head(self) -> tuple[int, dict[str, str]]:
        first, *lines = self.until(b"\r\n\r\n").decode().split("\r\n")
        return int(first.split()[1]), {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}

    def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers and the whole body: JSON, or the list of its events."""
        status, headers = self.head()
        if "content-length" in headers:
            size = int(headers["content-length"])
            while len(self.bytes) < size:
                assert self.more(), "closed in the middle of a body"
            raw, self.bytes = self.bytes[:size], self.bytes[size:]
            return status, headers, json.loads(raw) if "json" in headers["content-type"] else raw.decode()
        return status, headers, list(self.events())

    def events(self) -> Iterator[Any]:
        """The events of a stream as they come; "[DONE]" as it is. After it, the next answer may begin."""
        text = b""
        while True:
            size = int(self.until(b"\r\n"), 16)
            while len(self.bytes) < size + 2:
                assert self.more(), "closed in the middle of a chunk"
            text, self.bytes = text + self.bytes[:size], self.bytes[size + 2 :]
            while b"\n\n" in text:
                event, _, text = text.partition(b"\n\n")
                data = event.removeprefix(b"data: ").decode()
                yield data if data == "[DONE]" else json.loads(data)
            if not size:
                return

    def closed(self) -> bool:
        """Whether the server closes, once all that it sent is read."""
        while self.more():
            pass
        return True

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """Close without a goodbye, as a client whose process is killed with data unread."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def text_of(events: list[Any]) -> str:
    return "".join(c["text"] for e in events if e != "[DONE]" for c in e.get("choices", ()))


def ended_well(events: list[Any]) -> bool:
    return events[-1] == "[DONE]" and not any("error" in e for e in events[:-1])


def stuck(server: LocalServer) -> None:
    """Wait until all streams are paused for good: what holds text for their readers is full, and nothing moves.

    A stream is paused as well while the loop is behind the engine, and then goes on by itself.
    """
    llm = server.state.llm

    def state() -> Any:
        heard = threading.Event()
        llm._commands.put((lambda _: heard.set(), None))  # type: ignore[arg-type]
        assert heard.wait(WAIT_S)  # the engine has had its turn,
        tasks_of(server)  # and so has the loop
        return [(s.name, s.given, s.taken, s.paused) for s in list(llm._streams.values())]

    def still() -> bool:
        first = state()
        return all(paused for *_, paused in first) and all(time.sleep(0.01) or state() == first for _ in range(10))

    wait_for(lambda: llm._paused and still(), "nothing moves any more")


def metric(server: LocalServer, name: str, **labels: str) -> float:
    """The sum of a counter's series with these labels."""
    total = 0.0
    for line in server.state.metrics.render().decode().splitlines():
        if (found := re.fullmatch(r"minillm:(\w+)\{(.*)\} (\S+)", line)) and found[1] == name:
            have = dict(re.findall(r'(\w+)="([^"]*)"', found[2]))
            total += float(found[3]) if labels.items() <= have.items() else 0.0
    return total


def steps(server: LocalServer) -> int:
    return server.state.llm.engine.events.step


def under_way(server: LocalServer) -> int:
    return len(server.state.lifecycle.calls)


def tasks_of(server: LocalServer) -> Counter[str]:
    """What runs on the server's loop, by name of coroutine."""

    async def look() -> Counter[str]:
        return Counter(t.get_coro().__qualname__ for t in asyncio.all_tasks() if t is not asyncio.current_task())

    assert server.loop is not None
    return asyncio.run_coroutine_threadsafe(look(), server.loop).result(WAIT_S)


def settled(server: LocalServer) -> None:
    """Nothing is under way, and nothing was left."""
    llm, meter = server.state.llm, server.state.door.meter
    wait_for(lambda: not under_way(server), "all calls ended")
    wait_for(lambda: not llm.core.outputs and llm._commands.empty(), "the engine has heard of all ends")
    idle = threading.Event()
    llm._commands.put((lambda _: idle.set(), None))  # type: ignore[arg-type]
    assert idle.wait(WAIT_S)  # what it did before is done
    cache = llm.engine.cache
    assert cache is not None
    cache.check()
    assert cache.num_live == 0
    assert cache.num_free + cache.num_cached == cache.pool.num_blocks
    assert [llm._streams, llm._ids, llm._paused, llm.core.failures] == [{}, set(), set(), {}]
    queue = meter.queue()
    assert (queue.waiting, queue.waiting_tokens, queue.running, queue.tokens_left) == (0, 0, 0, 0)
    assert [meter._requests, meter._waiting, meter._running, meter._streams] == [{}, {}, {}, {}]
    assert meter.entered == meter.left
    of_calls = lambda: [n for n in tasks_of(server) if "run_asgi" in n or "_left" in n or "Answer" in n]
    wait_for(lambda: not of_calls(), "no task of a call is left")
