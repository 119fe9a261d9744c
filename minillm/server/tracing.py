"""One record a request: where its time went, under one id, with nothing that the user wrote. Lesson 13 builds it.

A trace is a row of marks on one clock. Each mark ends a stage and begins the next, so there is no gap, and the stages
sum to the whole by construction. The app marks what happens in front of the engine and behind it; the engine's own
stamps (Request.times, the same clock) divide the middle.

stage       ends when (or when the request fails in it)
auth        the key is known, or refused
ingress     the body has been read
preprocess  it is parsed and templated; and once more, behind admission: tokenised
admit       admission has judged what the bytes prove; and once more: the exact number of tokens
queue       the first step that computes it begins
prefill     its first token is drawn
decode      its last token is drawn
post        the last byte is sent, or the client is gone

Of what a client wrote, one thing is kept: the X-Request-Id that it chose, by which it can ask about its request, and of
which only a hash is kept if it is no plain word. All else is a fixed list of numbers and codes. `user` and key are
salted hashes, and the salt is random for each process unless given, so that a list of users cannot be tried against the
file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minillm.errors import MinillmError
from minillm.server.trace_file import MAX_BYTES, TraceFile
from minillm.server.trace_file import read_traces as read_traces

STAGES = ("auth", "ingress", "preprocess", "admit", "queue", "prefill", "decode", "post")
FRONT = ("auth", "ingress", "preprocess", "admit", "preprocess", "admit")  # those before the engine, as they are marked
NUMBERS = (
    "n", "prompt_tokens", "cached_tokens", "output_tokens", "max_tokens", "request_bytes", "response_bytes",
)  # fmt: skip
FLAGS = ("stream",)
CODES = ("finish_reason", "model")  # words of the server's own
_CODE = re.compile(r"[A-Za-z0-9_.:/{}+-]{1,128}")
MAX_QUEUED = 10_000  # records; a disk that hangs costs records, not memory


class RequestTrace:
    """One request's marks. Made when its first byte is there; used by one thread at a time.

    All but route may be set later, when they are known, and so may error (the code of its error body), user and key, of
    which only hashes are written, and status: how it came out. That is HTTP's, 499 for a client that left, and for an
    error in the middle of a stream (whose status line had said 200) the one that it would have had in front of it.

    request_id   the same in every record, log line and header of the request
    route        the template of the path ("/v1/chat/completions"), not what the client sent
    traceparent  the W3C header of that name, if the client sent one: only the OpenTelemetry export reads it
    start        on `clock` (seconds, the engine's: time.perf_counter); now unless given
    """

    def __init__(
        self, request_id: str, route: str, tenant: str = "", *, traceparent: str | None = None,
        clock: Callable[[], float] = time.perf_counter, start: float | None = None,
    ):  # fmt: skip
        now = clock()
        self.request_id, self.route, self.tenant, self.traceparent = request_id, route, tenant, traceparent
        self.clock, self.start = clock, now if start is None else start
        self.wall = time.time() - (now - self.start)  # seconds since 1970 at the start
        self.marks: list[tuple[str, float]] = []  # stage, its end
        self.status: int | None = None
        self.error: str | None = None
        self.user: str | None = None
        self.key: str | None = None
        self.fields: dict[str, Any] = {}

    @property
    def end(self) -> float:
        """The latest mark."""
        return self.marks[-1][1] if self.marks else self.start

    @property
    def seconds(self) -> float:
        """From the start to the latest mark."""
        return self.end - self.start

    def fail(self, status: int, error: str) -> None:
        """It ends with this error, in the stage that it had reached. `post` is then the sending of the error."""
        self.status, self.error = status, error
        if len(self.marks) < len(FRONT):  # the engine marks what is behind
            self.mark(FRONT[len(self.marks)])

    def finish(self) -> None:
        """The last byte is sent, or nobody is there to take it."""
        self.mark("post")

    def mark(self, stage: str, at: float | None = None) -> None:
        """`stage` ends now, or at `at`; it began where the mark before ended. A time before that counts as that.

        A stage may come again (admission judges twice), and may be left out. Raises MinillmError for a stage that is
        none.
        """
        if stage not in STAGES:
            raise MinillmError(f"{stage!r} is no stage of a request; the stages are {', '.join(STAGES)}")
        self.marks.append((stage, max(self.end, self.clock() if at is None else at)))

    def engine(self, outputs: Sequence[Any]) -> None:
        """Mark queue, prefill and decode, and note tokens and reasons: from its `RequestOutput`s, one for each prompt.

        The first to begin ends the queue, the first token of any ends prefill, the last token of all ends decode. What
        is under way when the client leaves ends now, in the stage that it had reached; without any output that is the
        queue. Takes the engine's stamps themselves, too: `Request.times`.
        """
        stamps: list[Mapping[str, float]] = [getattr(o, "metrics", o) for o in outputs]
        of = lambda name: [t[name] for t in stamps if name in t]
        begun, first = of("scheduled"), of("first_token")
        if begun:
            self.mark("queue", min(begun))
        if first:
            self.mark("prefill", min(first))
        ended = bool(stamps) and all("finished" in t for t in stamps)
        last = of("last_token") if first else of("finished")
        stage = "decode" if first else "prefill" if begun else "queue"
        self.mark(stage, max(last) if ended and last else None)
        whole = [o for o in outputs if hasattr(o, "outputs")]
        if whole:
            choices = [c for o in whole for c in o.outputs]
            reasons = [c.finish_reason for c in choices]
            self.note(
                n=len(choices), prompt_tokens=sum(len(o.prompt_token_ids) for o in whole),
                cached_tokens=sum(o.num_cached_tokens or 0 for o in whole),
                output_tokens=sum(len(c.token_ids) for c in choices),
                finish_reason=next((r for r in ("error", "abort", "length", "stop") if r in reasons), None),
            )  # fmt: skip

    def note(self, **fields: Any) -> None:
        """Facts about the request: NUMBERS, FLAGS and CODES. Raises MinillmError for a name that is none of them.

        A value that is not what its field holds is dropped: what a client wrote must not come in by a side door.
        """
        for name, value in fields.items():
            if name in NUMBERS:
                good = isinstance(value, int | float) and not isinstance(value, bool)
            elif name in FLAGS:
                good = isinstance(value, bool)
            elif name in CODES:
                good = isinstance(value, str) and _CODE.fullmatch(value) is not None
            else:
                raise MinillmError(f"a trace has no field {name!r}; it has {', '.join((*NUMBERS, *FLAGS, *CODES))}")
            if good:
                self.fields[name] = value

    def spans(self) -> list[tuple[str, int, int]]:
        """(stage, begin, end) in whole nanoseconds after the start: contiguous, and their sum is the end exactly."""
        out: list[tuple[str, int, int]] = []
        before = 0
        for stage, at in self.marks:
            now = max(before, round((at - self.start) * 1e9))
            if out and out[-1][0] == stage:
                out[-1] = (stage, out[-1][1], now)
            else:
                out.append((stage, before, now))
            before = now
        return out


class Traces:
    """Where traces go: a JSONL file, an exporter, both or neither. `record` never raises and never waits for a disk.

    path      one process' own. Appended to, a line a request, readable by its owner alone. At max_bytes it is moved to
              "<path>.1", in place of an older one. Raises MinillmError at once if it cannot be opened
    salt      of the hashes; random unless given. Give one to compare hashes across restarts
    exporter  called with (trace, record): see `otel.OpenTelemetry`

    written, lost: records that the file and the exporter took, and records that one of them did not.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, salt: bytes | None = None, *, max_bytes: int = MAX_BYTES,
        exporter: Callable[[RequestTrace, dict[str, Any]], None] | None = None,
    ):  # fmt: skip
        self.path = None if path is None else Path(path)
        self._salt = secrets.token_bytes(16) if salt is None else salt
        self.exporter = exporter
        self.written = self.lost = 0
        self._file: TraceFile | None = None
        self._queue: queue.Queue[tuple[RequestTrace, dict[str, Any]] | None] = queue.Queue(MAX_QUEUED)
        self._thread: threading.Thread | None = None
        self._door = threading.Lock()
        if self.path is not None:
            try:
                self._file = TraceFile(self.path, max_bytes)
            except OSError as error:
                raise MinillmError(f"traces cannot be written to {self.path}: {error.strerror or error}") from None

    def hash(self, text: str) -> str:
        """Salted SHA-256, 32 hexadecimal digits: equal for equal texts within one salt."""
        return hashlib.sha256(self._salt + text.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def record(self, trace: RequestTrace) -> None:
        """Write a trace that has ended. What is marked later does not count."""
        if self.path is None and self.exporter is None:
            return
        try:
            self._start()
            self._queue.put_nowait((trace, self.line(trace)))
        except Exception:
            self.lost += 1

    def line(self, trace: RequestTrace) -> dict[str, Any]:
        """The record: what the file's line holds."""
        spans = trace.spans()
        return {
            "id": self._code(trace.request_id), "time": trace.wall, "start": trace.start,
            "route": self._code(trace.route), "tenant": self._code(trace.tenant) if trace.tenant else "",
            "status": trace.status, "error": self._code(trace.error) if trace.error else None,
            "e2e_ns": spans[-1][2] if spans else 0, "spans": [list(s) for s in spans], **trace.fields,
            **{name: self.hash(str(v)) for name, v in (("user", trace.user), ("key", trace.key)) if v},
        }  # fmt: skip

    def _code(self, text: str) -> str:
        """An id or a name: as it is if it is a plain word, else hashed. Clients may choose ids."""
        return text if _CODE.fullmatch(text) else self.hash(text)

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until everything recorded so far has been tried. False: the time was up."""
        end = time.monotonic() + timeout_s
        while self._queue.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.002)
        return not self._queue.unfinished_tasks

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is left, and end. A second time, nothing."""
        thread = self._thread
        if thread is not None:
            self.flush(timeout_s)
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
            thread.join(timeout_s)
            self._thread = None
        else:
            self._close()
        with contextlib.suppress(Exception):
            getattr(self.exporter, "close", lambda: None)()

    # In the writer's thread ---------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._door:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="minillm-traces", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._deliver(*item)
                self.written += 1
            except Exception:
                self.lost += 1
            self._queue.task_done()
        self._queue.task_done()
        self._close()

    def _deliver(self, trace: RequestTrace, record: dict[str, Any]) -> None:
        try:
            if self._file is not None:
                self._file.write(json.dumps(record, ensure_ascii=True) + "\n")
        finally:
            if self.exporter is not None:
                self.exporter(trace, record)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
