"""`AsyncLLM`: the same engine for many callers at once, each with a stream. Lesson 13 puts a server on it.

>>> llm = AsyncLLM()
>>> async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=64)):
...     print(output.outputs[0].text)

The step loop runs in a thread of its own and owns the engine; callers only send it commands (add, abort, resume) and
get what a step gave. Two things follow. Cancelling is leaving the `async for`: the next step no longer has the request,
and its blocks are free. And back-pressure: a reader that stalls fills its own bounded buffer, its request is paused,
and nobody else notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import secrets
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from minillm.core import Delta, EngineCore
from minillm.errors import MinillmError, RequestError
from minillm.inbox import Inbox
from minillm.llm import Face, Given, Prompt
from minillm.models.hub import EMBEDDED
from minillm.models.tokenizer import Message
from minillm.request import Request, RequestOutput, SamplingParams
from minillm.stream import Delivery, Item, Stream, deliver

MAX_BUFFERED = 64  # tokens that a stream may be ahead of its reader
IDLE_WAIT_S = 0.02  # between looks at deadlines and paused requests when nothing can run
Command = tuple[Callable[[Any], None], Stream | None]


class Remote(Protocol):
    """Another engine that may compute prompts for this one: `cluster.remote_prefill.RemotePrefill` (lesson 15)."""

    def take(self, request: Request) -> bool:
        """Whether it has taken the request, which the core then holds. In the engine's thread."""

    def close(self) -> None: ...


class AsyncLLM(Face):
    """Takes the options of `LLM`, and max_buffered: tokens that a stream may be ahead of its reader (64).

    A scheduler of your own may leave `pause` out. Then streams are not bounded, and max_buffered is refused.
    """

    def __init__(
        self, model: str | os.PathLike[str] = EMBEDDED, *, parts: Mapping[str, Any] | None = None,
        max_buffered: int | None = None, **config: Any,
    ):  # fmt: skip
        if max_buffered is not None and (
            isinstance(max_buffered, bool) or not isinstance(max_buffered, int) or max_buffered < 1
        ):
            raise MinillmError(f"max_buffered must be a whole number of tokens, at least 1, got {max_buffered!r}")
        super().__init__(model, parts=parts, **config)
        if self.engine.core is None:
            raise MinillmError(
                "AsyncLLM serves requests as they come; it needs kv_cache='paged' and no static batching"
            )
        self.core: EngineCore = self.engine.core
        pauses = callable(getattr(self.core.scheduler, "pause", None))
        if max_buffered is not None and not pauses:
            raise MinillmError("max_buffered needs a scheduler with pause(request, paused), and parts' has none")
        self.max_buffered = (max_buffered or MAX_BUFFERED) if pauses else None
        self.epoch = secrets.token_hex(8)  # of this engine: another one has nothing of what is cached here
        self.dead: BaseException | None = None  # why the engine's thread has ended, if it has
        self._lost: BaseException | None = None  # why it must end
        self.remote: Remote | None = None  # who may compute prompts instead; they are then submitted through it
        self._commands: Inbox[Command | None] = Inbox()
        self._streams: dict[Request, Stream] = {}  # engine's thread
        self._paused: set[Stream] = set()  # engine's thread
        self._ids: set[str] = set()  # of requests under way
        self._number = itertools.count()
        self._door = threading.Lock()  # make_request counts, and callers may be in several threads
        self._thread = threading.Thread(target=self._work, name="minillm-engine", daemon=True)
        self._thread.start()
        if self.engine.spread is not None:
            end = weakref.WeakMethod(self._end_soon)  # the engine outlives nobody by who watches its ranks
            self.engine.spread.launched.on_lost = lambda why: (call := end()) and call(why)

    # For callers --------------------------------------------------------------------------------------------

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None, *,
        priority: int = 0, tenant: str = "", deadline_s: float | None = None,
    ) -> AsyncIterator[RequestOutput]:  # fmt: skip
        """The output so far, again and again until it is finished. Leaving the loop early cancels the request.

        Raises RequestError for bad input, and MinillmError when a step failed. priority, tenant, deadline_s: as in
        `LLM.generate`; a request whose deadline passed before it began ends with finish_reason "abort".
        """
        params = sampling_params if sampling_params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise RequestError("sampling_params", f"expected SamplingParams, got {params!r:.80}")
        text, ids = self._tokens(prompt)
        name = self._claim(request_id)
        try:
            whose: dict[str, Any] = {"priority": priority, "tenant": tenant, "deadline_s": deadline_s}
            with self._door:
                requests = self._requests(ids, params, name, **whose)
            stream = Stream(name, requests, asyncio.get_running_loop(), self.max_buffered)
            self._send(self._add, stream)
            try:
                async for output in self._read(text, stream):
                    output.request_id = name
                    yield output
            finally:
                if not self._commands.take_back((self._add, stream)):  # else nobody has heard of it
                    self._send(self._abort, stream, even_if_dead=True)
        finally:
            self._ids.discard(name)

    async def chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None,
        request_id: str | None = None, *, add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None, priority: int = 0, tenant: str = "",
        deadline_s: float | None = None,
    ) -> AsyncIterator[RequestOutput]:  # fmt: skip
        """Answer one conversation, [{"role": ..., "content": ...}, ...]. Otherwise as `generate`."""
        (prompt,) = self._conversations([messages], add_generation_prompt, chat_template_kwargs)
        whose: dict[str, Any] = {"priority": priority, "tenant": tenant, "deadline_s": deadline_s}
        async with contextlib.aclosing(self.generate(prompt, sampling_params, request_id, **whose)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                yield output

    async def _read(self, text: str | None, stream: Stream) -> AsyncIterator[RequestOutput]:
        given = {r: Given() for r in stream.requests}
        while not all(g.ended for g in given.values()):
            await stream.wake.wait()
            stream.wake.clear()
            items, stream.arrived = stream.arrived, []
            for r, piece, count, last in items:
                given[r].take(r, piece, count, last)
            if items:
                yield self._output(text, given)
                stream.taken += len(items)  # only now: the reader has come back for more
                if stream.paused and stream.limit and stream.given - stream.taken <= stream.limit // 2:
                    self._send(self._resume, stream, even_if_dead=True)
            if stream.failure is not None:
                raise MinillmError(_words(stream.failure)) from stream.failure

    def stalled_s(self) -> float:
        """Seconds since a step last got on, while somebody waits for one; else 0. From any thread."""
        return max(0.0, self.core.clock() - self.core.progressed) if self.core.has_work else 0.0

    def make_request(self, prompt_token_ids: Sequence[int], params: SamplingParams, name: str, **whose: Any) -> Request:
        """A request that is not queued, for who adds it by `call`. Raises RequestError. From any thread."""
        with self._door:
            return self.engine.make_request(prompt_token_ids, params, request_id=name, **whose)

    def call(self, work: Callable[[], None]) -> None:
        """work() in the engine's thread, between two steps: there, the core and its cache may be changed. From any
        thread. Once the engine has ended, nothing."""
        self._commands.put((lambda _: work(), None))

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """End every request, the engine's thread and its other processes. A second time, nothing."""
        self._commands.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            if self.remote is not None:  # by now it was told of all that ended
                self.remote.close()
            self.engine.close()

    def _end_soon(self, why: BaseException) -> None:
        """A rank is gone while nobody computes. From any thread."""
        self._lost = why
        self._commands.put(None)

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _claim(self, request_id: str | None) -> str:
        if request_id is not None and not isinstance(request_id, str):
            raise RequestError("request_id", f"expected text, got {request_id!r:.80}")
        name = f"request-{next(self._number)}" if request_id is None else request_id
        if name in self._ids:
            raise RequestError("request_id", f"{name!r} is under way; give each request an id of its own")
        self._ids.add(name)
        return name

    def _send(self, command: Callable[[Stream], None], stream: Stream, even_if_dead: bool = False) -> None:
        if self.dead is not None and not even_if_dead:
            raise MinillmError(f"the engine has ended: {self.dead}") from self.dead
        self._commands.put((command, stream))
        if self.dead is not None and not even_if_dead:  # it ended in between, and nobody will hear
            raise MinillmError(f"the engine has ended: {self.dead}") from self.dead

    # In the engine's thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._obey(wait=not self.core.has_work):
                self._distribute(self.core.step())
                for stream in [s for s in self._paused if s.loop.is_closed()]:  # it will not ask for more
                    self._forget(stream)
                # Nothing could run: everybody is paused, or the scheduler is at fault, which the core counts and tells.
                if self.core.idle_steps and not self._obey(wait=True, timeout=IDLE_WAIT_S):
                    break
            self._end(self._lost or MinillmError("it was shut down"))
        except BaseException as error:  # nothing may be left waiting for a thread that is gone
            self._end(error)

    def _obey(self, wait: bool, timeout: float | None = None) -> bool:
        """Carry out the commands that have come; with `wait`, wait for one. False: shut down."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get(block=wait, timeout=timeout)
                if command is None:
                    return False
                self._guarded(*command)
                wait = False
        return True

    def _guarded(self, command: Callable[[Any], None], stream: Stream | None) -> None:
        """A command may fail in a learner's part. That is its stream's end, and nobody else's."""
        try:
            command(stream)
        except Exception as error:
            if stream is None:
                return
            with contextlib.suppress(Exception):  # one fault is told at a time
                self._abort(stream)
            self._tell(stream, error)

    def _add(self, stream: Stream) -> None:
        for r in stream.requests:
            self._streams[r] = stream
            if self.remote is None or not self.remote.take(r):
                self.core.add(r)

    def _abort(self, stream: Stream) -> None:
        self._paused.discard(stream)
        for r in stream.requests:
            self._streams.pop(r, None)
        for r in stream.requests:
            self.core.abort(r)
            self.core.failures.pop(r, None)

    def _resume(self, stream: Stream) -> None:
        if stream.paused:
            self._pause(stream, False)

    def _pause(self, stream: Stream, paused: bool = True) -> None:
        stream.paused = paused
        (self._paused.add if paused else self._paused.discard)(stream)
        for r in stream.requests:
            if r in self.core.outputs:
                self.core.scheduler.pause(r, paused)  # type: ignore[attr-defined]

    def _distribute(self, step: list[Delta]) -> None:
        """Hand a step's text to its readers: one call a loop, since each wakes it by a write to a socket."""
        told: dict[asyncio.AbstractEventLoop, list[Delivery]] = {}
        shares: dict[Stream, list[Item]] = {}
        for r, text in step:
            if (stream := self._streams.get(r)) is not None:
                shares.setdefault(stream, []).append((r, text, len(r.output_token_ids), r.finished))
        for stream, items in shares.items():
            failure = next((f for r, *_ in items if (f := self.core.failures.pop(r, None)) is not None), None)
            for r, _, _, last in items:
                if last:
                    self._streams.pop(r, None)
            stream.given += len(items)
            if stream.limit and not stream.paused and stream.given - stream.taken >= stream.limit:
                try:  # before its reader is told, who would otherwise not know that there is something to resume
                    self._pause(stream)
                except Exception as error:  # a learner's scheduler
                    failure = failure or error
                    with contextlib.suppress(Exception):
                        self._abort(stream)
            told.setdefault(stream.loop, []).append((stream, items, failure))
        for loop, deliveries in told.items():
            self._send_out(loop, deliveries)

    def _tell(self, stream: Stream, failure: BaseException) -> None:
        self._send_out(stream.loop, [(stream, [], failure)])

    def _send_out(self, loop: asyncio.AbstractEventLoop, deliveries: list[Delivery]) -> None:
        try:
            loop.call_soon_threadsafe(deliver, deliveries)
        except RuntimeError:  # the loop is closed: nobody reads any more
            for stream, _, _ in deliveries:
                self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        """Nobody is there to cancel it: its generator died with its loop."""
        self._ids.discard(stream.name)
        with contextlib.suppress(Exception):
            self._abort(stream)

    def _end(self, error: BaseException) -> None:
        self.dead = error
        failure = MinillmError(f"the engine has ended: {error}")
        streams = set(self._streams.values())
        with contextlib.suppress(queue.Empty):  # those that were sent and not yet heard
            while True:
                command = self._commands.get(block=False)
                if command is not None:
                    self._guarded(*command)
        streams |= set(self._streams.values())
        for r in list(self.core.outputs):
            with contextlib.suppress(Exception):
                self.core.abort(r, str(failure))
        for stream in streams:
            self._tell(stream, failure)


def _words(failure: BaseException) -> str:
    return str(failure) if isinstance(failure, MinillmError) else f"{type(failure).__name__}: {failure}"
