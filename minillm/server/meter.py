"""How loaded the engine is, counted as it happens. Lesson 13.

`LoadMeter` follows every sequence from the door to its end: reserved (let in, on its way through tokenisation), then
waiting in the engine, running, gone. It hears of the last three from the engine's event log, and gives `Queue`
snapshots to `admission.Admission`. Because the reserved count, a burst of a thousand simultaneous requests cannot all
pass a bound of ten. An event costs O(rows of the step); a snapshot O(places).
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from minillm.errors import MinillmError
from minillm.events import Event, work
from minillm.request import sequence_names
from minillm.server.admission import Queue
from minillm.server.step_costs import CostFit

SHARE_MEMORY = 32  # sequences after which one counts 1/e in a share; the first ones count more


@dataclass(eq=False)
class _Request:
    """What was reserved, until it is released."""

    names: list[str]
    begun: bool = False  # a step has computed something for it
    generated: int = 0  # tokens, of all its sequences


@dataclass(eq=False)
class _Sequence:
    name: str
    request: _Request
    tenant: str
    priority: int
    prompt: int
    max_tokens: int
    arrived: bool = False  # at the engine
    runs: bool = False
    begun: bool = False
    computed: int = 0
    generated: int = 0

    def grow(self, generated: int) -> None:
        """So many tokens are generated, or more already."""
        more = max(0, generated - self.generated)
        self.generated += more
        self.request.generated += more

    @property
    def prefill_left(self) -> int:
        return max(0, self.prompt + max(0, self.generated - 1) - self.computed)

    @property
    def output_left(self) -> int:
        return max(0, self.max_tokens - self.generated)


@dataclass
class _Class:
    """Sums over those of one priority that wait."""

    count: int = 0
    prefill: int = 0
    output: int = 0

    def add(self, s: _Sequence, sign: int) -> None:
        self.count += sign
        self.prefill += sign * s.prefill_left
        self.output += sign * s.output_left


class _Share:
    """What recent sequences used of what they might have; 1 until something else is seen."""

    def __init__(self) -> None:
        self.value, self._seen = 1.0, 1

    def observe(self, used: int, most: int) -> None:
        if most > 0:
            self._seen += 1
            self.value += (min(1.0, used / most) - self.value) / min(SHARE_MEMORY, self._seen)


class LoadMeter:
    """max_num_seqs, max_num_batched_tokens: the engine's. by_priority: whether it serves smaller priorities first.

    Connect it with `events.subscribe(meter.observe)`. Thread-safe: the engine's thread observes, the server's reserves.
    What it cannot know it takes from the engine: a sequence that nobody reserved is counted from its "queued" event on.
    """

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int | None = None, *, by_priority: bool = False):
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.by_priority = by_priority
        self.fit = CostFit()
        self.output_share = _Share()  # of max_tokens, what is generated before something stops it
        self.prompt_share = _Share()  # of a prompt, what is not found in the prefix cache
        self.entered = self.left = 0  # sequences, since the start
        self._lock = threading.Lock()
        self._requests: dict[str, _Request] = {}
        self._waiting: dict[str, _Sequence] = {}  # reserved ones too, in order
        self._running: dict[str, _Sequence] = {}
        self._classes: dict[int, _Class] = {}
        self._streams: Counter[str] = Counter()
        self._places = max_num_seqs

    # The server's side ---------------------------------------------------------------------------------------

    def reserve(
        self, request_id: str, prompt_tokens: int, max_tokens: int, n: int = 1, tenant: str = "", priority: int = 0
    ) -> None:
        """Count a request from now on, until `release`. It reaches the engine under sequence_names(request_id, n).

        Raises MinillmError if the id, or one of those names, is under way.
        """
        with self._lock:
            request = _Request(sequence_names(request_id, n))
            taken = [m for m in request.names if m in self._waiting or m in self._running]
            if request_id in self._requests or taken:
                raise MinillmError(f"request {request_id!r} is under way; give each request an id of its own")
            self._requests[request_id] = request
            for name in request.names:
                self._enter(_Sequence(name, request, tenant, priority, prompt_tokens, max_tokens))

    def resize(self, request_id: str, prompt_tokens: int, max_tokens: int) -> None:
        """The exact sizes of a reserved request, after tokenisation."""
        with self._lock:
            for s in self._reserved(self._requests.get(request_id)):
                self._class(s).add(s, -1)
                s.prompt, s.max_tokens = prompt_tokens, max_tokens
                self._class(s).add(s, +1)

    def release(self, request_id: str) -> int | None:
        """The server is done with a request. Returns the tokens generated for it, which may be more than its client
        took; None if no step has computed anything for it.

        What has reached the engine leaves when the engine says so; what has not leaves now.
        """
        with self._lock:
            request = self._requests.pop(request_id, None)
            for s in self._reserved(request):
                self._leave(s)
            return request.generated if request is not None and request.begun else None

    def _reserved(self, request: _Request | None) -> list[_Sequence]:
        found = [self._waiting.get(m) for m in (request.names if request is not None else ())]
        return [s for s in found if s is not None and s.request is request and not s.arrived]

    def streams(self, tenant: str) -> int:
        """Sequences of a tenant between the door and their end."""
        with self._lock:
            return self._streams[tenant]

    def left_of(self, tenant: str) -> list[tuple[bool, int, float]]:
        """Of each sequence of a tenant: whether it runs, and the prompt and output tokens that it has likely left."""
        with self._lock:
            mine = [s for s in (*self._running.values(), *self._waiting.values()) if s.tenant == tenant]
            return [(s.runs, s.prefill_left, self.output_share.value * s.output_left) for s in mine]

    def queue(self, priority: int = 0, without: Iterable[str] = ()) -> Queue:
        """The load as a request of this priority sees it. without: ids of reserved requests to leave out (its own)."""
        with self._lock:
            own = [s for request_id in without for s in self._reserved(self._requests.get(request_id))]
            places, names = max(1, self._places), {s.name for s in own}
            others = (s for s in self._waiting.values() if s.name not in names)
            next_up = list(itertools.islice(others, max(0, places - len(self._running))))  # their place is free
            sums = {p: replace(c) for p, c in self._classes.items()}
            for s in (*own, *next_up):
                sums[s.priority].add(s, -1)
            return self._snapshot(next_up, sums, priority, places)

    def _snapshot(self, next_up: list[_Sequence], waiting: dict[int, _Class], priority: int, places: int) -> Queue:
        """next_up: those that will take a free place. waiting: the sums of those without one, by priority."""
        comes_before = lambda p: p <= priority or not self.by_priority
        before = [c for p, c in waiting.items() if comes_before(p)]
        have = [*self._running.values(), *(s for s in next_up if comes_before(s.priority))]
        waiting_tokens = sum(c.prefill + c.output for c in waiting.values())
        prefill, output = sum(s.prefill_left for s in have), [s.output_left for s in have]
        begun = sum(s.prefill_left for s in self._running.values())  # of these it is known what the cache had
        behind = sum(s.prefill_left + s.output_left for s in next_up if not comes_before(s.priority))
        return Queue(
            waiting=sum(c.count for c in waiting.values()),
            waiting_tokens=waiting_tokens,
            running=len(self._running) + len(next_up),
            max_num_seqs=places,
            tokens_left=waiting_tokens + prefill + sum(output) + behind,
            drain_rate=self.fit.rate(),
            running_left=tuple(self.output_share.value * left for left in output),
            decoding=sum(s.runs and not s.prefill_left for s in have),
            ahead=sum(c.count for c in before),
            ahead_output=self.output_share.value * sum(c.output for c in before),
            prefill_left=begun + self.prompt_share.value * (prefill - begun + sum(c.prefill for c in before)),
            costs=self.fit.costs(),
            step_tokens=self.max_num_batched_tokens,
        )

    # The engine's side -----------------------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """For `EventLog.subscribe`. Ids that it does not know, and events that come twice, change nothing."""
        with self._lock:
            if event.kind == "step":
                self._step(event)
            elif event.kind == "queued":
                self._queued(event)
            elif event.kind == "preempted":
                if (s := self._running.pop(event.request_id, None)) is not None:
                    s.runs, s.computed = False, 0
                    self._wait(s)
            elif event.kind in ("finished", "refused"):
                self._finished(event)

    def _queued(self, event: Event) -> None:
        name, data = event.request_id, event.data
        if name not in self._waiting and name not in self._running:
            self._enter(_Sequence(
                name, _Request([name]), data.get("tenant", ""), data.get("priority", 0), data.get("prompt_tokens", 0),
                data.get("max_tokens", 0),
            ))  # fmt: skip
        if (s := self._waiting.get(name)) is not None:
            s.arrived = True

    def _finished(self, event: Event) -> None:
        s = self._running.get(event.request_id) or self._waiting.get(event.request_id)
        if s is None:
            return
        generated = event.data.get("output_tokens", 0)
        if event.data.get("reason") in ("stop", "length"):
            self.output_share.observe(generated, s.max_tokens)
        self._leave(s)  # before it grows: the sums have it as it was
        s.grow(generated)
        s.request.begun |= generated > 0  # its only step is told after its end

    def _step(self, event: Event) -> None:
        data = event.data
        prefill, decode = work(data["rows"])
        for name, new, before in data["rows"]:
            s = self._running.get(name) or self._waiting.get(name)
            if s is None:  # it has finished in this very step
                continue
            if not s.runs:
                if not s.begun:
                    self.prompt_share.observe(max(0, s.prompt - before), s.prompt)
                self._unwait(s)
                self._running[name] = s
                s.arrived = s.runs = s.begun = s.request.begun = True
            s.computed = before + new
            s.grow(s.computed - s.prompt + 1)
        if data["rows"]:
            self.fit.observe(prefill, decode, data["seconds"])
        self._see_places(data, prefill, decode)

    def _see_places(self, data: Mapping[str, Any], prefill: int, decode: int) -> None:
        """Memory may hold fewer than max_num_seqs: then some wait, and neither places nor the budget is used up.

        `running` is told after a step's end; its rows count those that have just finished too.
        """
        waiting, in_step = data.get("waiting", 0), max(data.get("running", 0), len(data["rows"]))
        budget = self.max_num_batched_tokens
        if not waiting or in_step > self._places:
            self._places = self.max_num_seqs
        elif in_step < self.max_num_seqs and decode and budget is not None and prefill + decode < budget:
            self._places = in_step

    # Counting ------------------------------------------------------------------------------------------------

    def _class(self, s: _Sequence) -> _Class:
        return self._classes.setdefault(s.priority, _Class())

    def _wait(self, s: _Sequence) -> None:
        self._waiting[s.name] = s
        self._class(s).add(s, +1)

    def _unwait(self, s: _Sequence) -> None:
        if self._waiting.pop(s.name, None) is not None:
            self._class(s).add(s, -1)
            if not self._class(s).count:
                del self._classes[s.priority]

    def _enter(self, s: _Sequence) -> None:
        self.entered += 1
        self._streams[s.tenant] += 1
        self._wait(s)

    def _leave(self, s: _Sequence) -> None:
        self.left += 1
        self._unwait(s)
        self._running.pop(s.name, None)
        self._streams[s.tenant] -= 1
        if not self._streams[s.tenant]:
            del self._streams[s.tenant]
