"""The load of `bench serving`, the same on both sides, and the process from which it reaches the server. Lesson 13.

A side is a function that sends one `Call` and returns its stamps: `AsyncLLM` asked directly, or a `Client`. The client
has a process of its own, so that what it costs is not the server's. On two cores it still takes its share, which is why
every answer of that process says how many seconds of processor it has used.

`python -m minillm.bench.streams URL` reads a job a line from stdin and answers each with a line; `Remote` is its
caller. It imports neither torch nor the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from minillm.errors import MinillmError
from minillm.trace import latency
from minillm.trace.client import Call, Client
from minillm.trace.latency import Stamps

PROBE_TOKENS = 3  # a probe's answer: only its first token is looked at
PATIENCE = 600.0  # seconds for one job


class Send(Protocol):
    async def __call__(
        self, call: Call, scheduled: float | None = None, on_text: Callable[[str], None] | None = None
    ) -> Stamps: ...


async def burst(send: Send, prompts: Sequence[Sequence[int]], new: int) -> list[Stamps]:
    """All streams at once."""
    return await asyncio.gather(*(send(Call(p, new)) for p in prompts))


async def probes(
    send: Send, background: Sequence[Sequence[int]], new: int, prompts: Sequence[Sequence[int]]
) -> tuple[list[Stamps], int]:
    """While `background` streams run, one newcomer after another. Returns their stamps and how many streams still ran.

    The streams begin first and are left at the end: every newcomer finds the engine as full as the one before.
    """
    begun = [asyncio.Event() for _ in background]
    tasks = [
        asyncio.create_task(send(Call(p, new), on_text=lambda _, e=event: e.set()))  # type: ignore[misc]
        for p, event in zip(background, begun, strict=True)
    ]
    try:
        while not all(event.is_set() for event in begun) and not any(task.done() for task in tasks):  # one may fail
            await asyncio.sleep(0.01)
        found = [await send(Call(p, PROBE_TOKENS)) for p in prompts]
        return found, sum(not t.done() for t in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def alone(send: Send, prompt: Sequence[int], new: int) -> tuple[str, Stamps]:
    """The text of one stream with nothing beside it, and its stamps."""
    text: list[str] = []
    stamps = await send(Call(prompt, new), on_text=text.append)
    return "".join(text), stamps


# The client's process ---------------------------------------------------------------------------------------------


class Worker:
    """What the client's process does for its caller."""

    def __init__(self, client: Client):
        self.client = client
        self.held: list[asyncio.StreamWriter] = []

    async def do(self, job: dict[str, Any]) -> dict[str, Any]:
        before = time.process_time()
        found = await getattr(self, "do_" + job.pop("do"))(**job)
        return found | {"cpu": time.process_time() - before}

    async def do_burst(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        return {"stamps": latency.to_jsonl(await burst(self.client.send, prompts, new))}

    async def do_probes(self, background: list[list[int]], new: int, prompts: list[list[int]]) -> dict[str, Any]:
        found, ran = await probes(self.client.send, background, new, prompts)
        return {"stamps": latency.to_jsonl(found), "ran": ran}

    async def do_alone(self, prompt: list[int], new: int) -> dict[str, Any]:
        text, stamps = await alone(self.client.send, prompt, new)
        return {"text": text, "stamps": latency.to_jsonl([stamps])}

    async def do_hold(self, connections: int, path: str) -> dict[str, Any]:
        """Open so many connections, ask each one thing, and keep them open. Returns how many were answered with 200."""
        answered = 0
        for _ in range(connections):
            reader, writer = await asyncio.open_connection(self.client.host, self.client.port)
            self.held.append(writer)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {self.client.host}\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
            await reader.readexactly(length)
            answered += b" 200 " in head.partition(b"\r\n")[0]
        return {"answered": answered, "open": sum(not w.transport.is_closing() for w in self.held)}

    async def do_drop(self) -> dict[str, Any]:
        for writer in self.held:
            writer.close()
        for writer in self.held:
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        self.held.clear()
        return {}


async def main(url: str) -> None:
    async with Client(url, extra={"ignore_eos": True}) as client:
        worker = Worker(client)
        print(json.dumps({"ready": True}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                answer = await worker.do(json.loads(line))
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)


class Remote:
    """The client's process, from outside: `with Remote(url) as client: client.do("burst", prompts=..., new=64)`."""

    def __init__(self, url: str):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minillm.bench.streams", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Remote:
        try:
            self._answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def do(self, what: str, **job: Any) -> dict[str, Any]:
        """The answer of one job; its stamps as `Stamps`, cpu in seconds. Raises MinillmError when it failed."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # then there is no answer, which is said in words
            self.process.stdin.write(json.dumps({"do": what, **job}) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"it ended with exit code {self.process.wait(10)}"}
        if "error" in answer:
            raise MinillmError(f"the client's process failed: {answer['error']}")
        if "stamps" in answer:
            answer["stamps"] = latency.from_jsonl(answer["stamps"])
        return answer


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
