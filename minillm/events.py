"""What the engine did and when: one plain record an event. Lessons 09 to 12 draw them, metrics count them.

A log is a list, bounded in events and in rows of steps. `minillm.viz.timeline(log)` is its picture,
`EventLog.to_jsonl` its file.

kind         data
queued       prompt_tokens, max_tokens, priority, tenant,
             arrival                                      when it was made, a little before it is queued
refused      field, reason                                at the door: never queued. Or later, with field "prompt": it
                                                          can never run; "finished" with reason "error" follows
hit          tokens, source ("prefix", "host", "disk",    KV found instead of computed, at admission
             "transfer")                                  with cached: of these, not computed for it there either
transfer     outcome, reason, tokens, bytes, seconds of   KV asked of another engine, when that has ended (lesson 15):
             queue_s, allocate_s, transfer_s, layout_s,   submitted to begun there, to room given here; first piece to
             exposed_s                                    last word, writing of it; and what was not hidden behind the
                                                          prefill
first_token  -
preempted    how, computed, blocks, copied                blocks it lost, and how many were copied. how: "swap"
                                                          (its beginning is in a tier), "cached" (full blocks stay
                                                          in the prefix cache till evicted) or "recompute"
finished     reason, output_tokens
aborted      computed
step         rows ([request_id, new tokens, computed before] each), waiting, running, free, cached, live, seconds,
             schedule_seconds                             one a step, request_id "", recorded when it retires
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from minillm.errors import MinillmError

MAX_EVENTS = 100_000
MAX_ROWS = 1_000_000  # of all steps in a log: 100,000 steps of 256 requests would be gigabytes
KINDS = ("queued", "refused", "hit", "transfer", "first_token", "preempted", "finished", "aborted", "step")


@dataclass(frozen=True, slots=True)
class Event:
    """step counts from 0; time is in seconds of `clock` (time.perf_counter unless told otherwise)."""

    step: int
    time: float
    kind: str
    request_id: str = ""
    data: dict[str, Any] = field(default_factory=dict)


class EventLog:
    """The last events, oldest first: at most `maxlen`, with at most `max_rows` rows of steps between them.

    The newest is kept whatever it holds. maxlen 0 keeps none: recording then costs next to nothing. Any thread may
    record, read and clear.
    """

    def __init__(
        self, maxlen: int = MAX_EVENTS, clock: Callable[[], float] = time.perf_counter, max_rows: int = MAX_ROWS
    ):
        self.events: deque[Event] = deque(maxlen=maxlen)
        self.clock, self.max_rows = clock, max_rows
        self.step = 0
        self.faults: Counter[str] = Counter()  # of subscribers, by the error's type
        self._rows = 0
        self._lock = threading.Lock()  # a server refuses in its loop's thread while the engine's records a step
        self._subscribers: list[Callable[[Event], None]] = []

    @property
    def wanted(self) -> bool:
        """Whether anybody would see an event."""
        return bool(self.events.maxlen or self._subscribers)

    def subscribe(self, follow: Callable[[Event], None]) -> Callable[[], None]:
        """follow(event) for every event from now on, in the thread that records it. Returns a function that ends this.

        What watches the engine must not hurt it: a subscriber that raises is counted in `faults`, and goes on.
        """
        self._subscribers = [*self._subscribers, follow]  # a new list: another thread may be walking through the old

        def cancel() -> None:
            self._subscribers = [f for f in self._subscribers if f is not follow]

        return cancel

    def record(self, kind: str, request_id: str = "", **data: Any) -> None:
        if not self.wanted:
            return
        event = Event(self.step, self.clock(), kind, request_id, data)
        if self.events.maxlen:
            self._append(event)
        for follow in self._subscribers:
            try:
                follow(event)
            except Exception as error:
                self.faults[type(error).__name__] += 1

    def _append(self, event: Event) -> None:
        with self._lock:
            self._rows += _rows(event)
            while self.events and (len(self.events) == self.events.maxlen or self._rows > self.max_rows):
                self._rows -= _rows(self.events.popleft())
            self.events.append(event)

    def __iter__(self) -> Iterator[Event]:
        return iter(list(self.events))

    def __len__(self) -> int:
        return len(self.events)

    def of(self, *kinds: str) -> list[Event]:
        return [e for e in self if e.kind in kinds]

    def clear(self) -> None:
        with self._lock:
            self.events.clear()
            self._rows = 0

    def to_jsonl(self) -> str:
        return "".join(json.dumps(asdict(e)) + "\n" for e in self)

    @classmethod
    def from_jsonl(cls, text: str) -> EventLog:
        """Raises MinillmError naming the line that is no event."""
        log = cls()
        for n, line in enumerate(text.splitlines(), 1):
            try:
                log._append(Event(**json.loads(line)))
            except (ValueError, TypeError, AttributeError) as error:
                raise MinillmError(f"line {n} is not an event ({error}): {line:.80}") from None
        log.step = max((e.step for e in log), default=0)
        return log


def _rows(event: Event) -> int:
    return len(event.data.get("rows", ()))


def work(rows: Iterable[Sequence[Any]]) -> tuple[int, int]:
    """(tokens of prompts, requests that decode) in a step's rows, for whoever fits what a step costs.

    A row that begins a request, or has more than one token, is a piece of a prompt, also where a request that was
    preempted computes again what it had. One token behind others is a decode: that the last piece of a prompt may be
    such a row too makes no difference to its cost.
    """
    prompts = decodes = 0
    for _, new, before in rows:
        if new > 1 or before == 0:
            prompts += new
        else:
            decodes += 1
    return prompts, decodes


def by_request(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Each request's own events, in order; requests in order of their first event."""
    out: dict[str, list[Event]] = {}
    for e in events:
        if e.request_id:
            out.setdefault(e.request_id, []).append(e)
    return out
