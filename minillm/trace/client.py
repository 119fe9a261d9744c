"""A load client for any OpenAI-style server: sends streamed requests on time and stamps what comes back. Lesson 13.

>>> stamps = load("http://127.0.0.1:8000", calls(poisson(100, 5.0), prompt_tokens=64, max_tokens=32))

Open loop: every request goes out when it is due, whether or not others are answered. Closed loop: so many users, each
sends its next request when the last is answered; such a load slows down with the server and hides its queue.

A client shares the machine with the server here, and whatever it costs for each chunk is missing there: so it speaks
HTTP by itself (wire.py). Chunks that one read brings have one stamp. Nothing is ever tried twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from minillm.errors import MinillmError
from minillm.trace.answer import Answer
from minillm.trace.latency import Stamps
from minillm.trace.wire import FAULTS, MOST, Connection, Reply, words_of

WORDS = (  # common ones: about one token each
    "time year people way day man thing woman life child world school state family student group country problem hand",
    "part place case week company system program question work number night point home water room mother area money",
    "story fact month lot right study book eye job word business issue side kind head house service friend father",
    "power hour game line end member law car city name team minute idea body back parent face level office door health",
)


@dataclass(frozen=True)
class Call:
    """One request to send.

    prompt        text or token ids for /v1/completions; [{"role", "content"}, ...] for /v1/chat/completions
    time          seconds after the start at which it is due; a closed loop has no use for it
    cancel_after  tokens after which the client leaves: 0 as soon as the request is sent, None never
    extra         further fields of its body
    """

    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]
    max_tokens: int
    time: float = 0.0
    cancel_after: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def chat(self) -> bool:
        return not isinstance(self.prompt, str) and bool(self.prompt) and isinstance(self.prompt[0], Mapping)


def calls(
    times: Iterable[float], *, prompt_tokens: int | Sequence[int], max_tokens: int | Sequence[int], chat: bool = False,
    seed: int = 0, cancel: float = 0.0, extra: Mapping[str, Any] | None = None,
) -> list[Call]:  # fmt: skip
    """Requests of random common words, about one token each, that share no beginning.

    prompt_tokens, max_tokens: one number, or one for each request. cancel: the share of clients that leave half-way.
    """
    rng, due, vocabulary = random.Random(seed), list(times), " ".join(WORDS).split()
    each = lambda n: [n] * len(due) if isinstance(n, int) else list(n)
    made = []
    for at, words, most in zip(due, each(prompt_tokens), each(max_tokens), strict=True):
        text = " ".join(rng.choices(vocabulary, k=words))
        leaves = rng.random() < cancel
        made.append(
            Call(
                [{"role": "user", "content": text}] if chat else text,
                most,
                at,
                most // 2 if leaves else None,
                extra or {},
            )
        )
    return made


class Client:
    """Connections to one server. `send` one call, or use `open_loop`, `closed_loop` or `load`.

    url        http(s)://host:port, with or without /v1
    model      its name there; None asks the server for its first
    timeout_s  for one whole request
    extra      fields of every body, such as {"ignore_eos": True}; {"temperature": 0} unless told otherwise
    """

    def __init__(
        self, url: str, model: str | None = None, *, api_key: str | None = None, timeout_s: float = 600.0,
        extra: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise MinillmError(f"url {url!r:.80} cannot be read ({error})") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise MinillmError(f"url must look like http://127.0.0.1:8000, got {url!r:.80}")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise MinillmError("api_key must be printable ASCII text: it goes into a header")
        self.host, self.port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self.root = parts.path.rstrip("/").removesuffix("/v1")
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.model, self.timeout_s = model, timeout_s
        self.extra = {"temperature": 0, **(extra or {})}
        self._headers = [("Host", parts.netloc.rpartition("@")[2]), ("Content-Type", "application/json")]
        self._headers += [("Authorization", f"Bearer {api_key}")] if api_key else []
        self._idle: list[Connection] = []

    async def __aenter__(self) -> Client:
        if self.model is None:
            self.model = await self.first_model()
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().close()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET, such as "/health". Raises MinillmError when nobody answers."""
        body, status = b"", 0

        def hear(now: float, reply: Reply, data: bytes) -> bool:
            nonlocal body, status
            body, status = body + data, reply.status
            return len(body) > MOST

        try:
            async with asyncio.timeout(self.timeout_s), self._connection() as connection:
                await connection.request("GET", self.root + path, self._headers, b"", hear)
        except FAULTS as error:
            raise MinillmError(
                f"no answer from {self.host}:{self.port} ({words_of(error)}); is a server there?"
            ) from None
        return status, body

    async def first_model(self) -> str:
        status, body = await self.get("/v1/models")
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError, RecursionError):
            if status in (401, 403):
                raise MinillmError(
                    f"{self.host}:{self.port} does not know the key it was given, or was given none (status {status}); "
                    "give one that it knows as api_key (--api-key)"
                ) from None
            raise MinillmError(f"/v1/models names no model (status {status}); give one") from None

    async def send(
        self, call: Call, scheduled: float | None = None, on_text: Callable[[str], None] | None = None
    ) -> Stamps:  # fmt: skip
        """One call, now. Whatever goes wrong is in the stamps; only cancelling the task raises."""
        sent = time.perf_counter()
        answer = Answer(sent if scheduled is None else scheduled, sent, call.cancel_after, on_text)
        path = "/v1/chat/completions" if call.chat else "/v1/completions"
        try:
            async with asyncio.timeout(self.timeout_s), self._connection() as connection:
                answer.cancelled = call.cancel_after == 0
                hear = None if answer.cancelled else answer.hear
                await connection.request("POST", self.root + path, self._headers, self._body(call), hear)
                answer.judge()
        except TimeoutError:
            answer.error = "timeout"
        except FAULTS as error:
            answer.error = words_of(error)
        return answer.stamps()

    def _body(self, call: Call) -> bytes:
        body = {
            "model": self.model, "messages" if call.chat else "prompt": call.prompt, "max_tokens": call.max_tokens,
            "stream": True, "stream_options": {"include_usage": True}, **self.extra, **call.extra,
        }  # fmt: skip
        return json.dumps(body).encode()

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """One that is idle, or a new one. Afterwards it is kept if it can be used again, and else closed."""
        connection = None
        while self._idle and (connection is None or not connection.usable):
            if connection is not None:
                connection.close()
            connection = self._idle.pop()
        if connection is None or not connection.usable:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(Connection, self.host, self.port, ssl=self.tls)
        try:
            yield connection
        finally:
            if connection.release():
                self._idle.append(connection)


async def open_loop(
    client: Client, calls: Sequence[Call], *, max_concurrency: int | None = None, progress: bool = False
) -> list[Stamps]:  # fmt: skip
    """Every call when it is due. Stamps in the order of `calls`.

    max_concurrency: no more at once. A call that has to wait for that is sent late, which its stamps tell.
    """
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else contextlib.nullcontext()
    start = time.perf_counter()

    async def one(call: Call, step: Callable[[], Any]) -> Stamps:
        await asyncio.sleep(max(0.0, start + call.time - time.perf_counter()))
        async with gate:
            stamps = await client.send(call, scheduled=start + call.time)
        step()
        return stamps

    with _bar(len(calls), progress) as step:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(call, step)) for call in calls]
    return [task.result() for task in tasks]


async def closed_loop(
    client: Client, calls: Sequence[Call], concurrency: int, *, think_s: float = 0.0, progress: bool = False
) -> list[Stamps]:  # fmt: skip
    """So many users; each sends its next call think_s seconds after its last answer. In the order of `calls`."""
    found, queue = {}, iter(enumerate(calls))

    async def user(step: Callable[[], Any]) -> None:
        for i, call in queue:
            found[i] = await client.send(call)
            step()
            await asyncio.sleep(think_s)

    with _bar(len(calls), progress) as step:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(user(step))
    return [found[i] for i in range(len(calls))]


def load(
    url: str, calls: Sequence[Call], *, concurrency: int | None = None, progress: bool = False, **client: Any
) -> list[Stamps]:  # fmt: skip
    """Send all calls and wait: when due, or in a closed loop of `concurrency` users. Works in a notebook too.

    client: options of `Client`.
    """

    async def work() -> list[Stamps]:
        async with Client(url, **client) as c:
            if concurrency is None:
                return await open_loop(c, calls, progress=progress)
            return await closed_loop(c, calls, concurrency, progress=progress)

    return run(work)


def run(work: Callable[[], Any]) -> Any:
    """asyncio.run in a thread of its own: a notebook's loop is running already."""
    result: list[Any] = []

    def body() -> None:
        try:
            result.append((asyncio.run(work()), None))
        except BaseException as error:
            result.append((None, error))

    thread = threading.Thread(target=body, name="minillm-load", daemon=True)
    thread.start()
    thread.join()
    value, error = result[0]
    if error is not None:
        raise error
    return value


@contextlib.contextmanager
def _bar(total: int, wanted: bool) -> Iterator[Callable[[], Any]]:
    """A function to call after each request; it moves a progress bar where one is wanted and tqdm is installed."""
    bar: Any = None
    if wanted:
        with contextlib.suppress(ImportError):
            from tqdm.auto import tqdm

            bar = tqdm(total=total, desc="requests", leave=False)
    try:
        yield bar.update if bar is not None else lambda: None
    finally:
        if bar is not None:
            bar.close()
