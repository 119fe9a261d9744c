"""A fleet on a virtual clock: the very Scheduler, PagedCache and EngineCore, in steps that take predicted seconds.

What the split planner predicts, this runs (lesson 15): requests come, engines step, blocks are taken and freed by the
code that serves. Two things are not real. The model is a shadow (shadow.py), whose slots hold numbers of prefixes, so a
block that got lost on its way raises; and a step lasts what the roofline says of its rows. So a fleet judges what the
planner says of queues, batches and memory, and says nothing about the roofline itself.

An engine computes or listens: what reaches it during a step is done after the step, as in one thread.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minillm.cluster.data_parallel import least_outstanding
from minillm.cluster.migration import Engine
from minillm.cluster.replica import ReplicaState
from minillm.events import EventLog
from minillm.request import Request
from minillm.scheduler import Limits
from minillm.shadow import ShadowCore, ShadowError, ShadowPool, ShadowRunner
from minillm.trace.latency import SLO, Stamps

PRIME = (1 << 61) - 1
WARM_UP = 0.2  # of the requests: they meet a fleet that is emptier than it will be


class Timeline:
    """Virtual seconds. What is due at the same time happens in the order in which it was planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def at(self, time: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._due, (max(time, self.now), next(self._count), work))

    def run(self, until: float = float("inf")) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, work = heapq.heappop(self._due)
            work()


class PacedShadow(ShadowRunner):
    """A shadow for long prompts: a prefix's number is a rolling hash, and what is read is checked in part.

    All of a request's slots are checked when it begins (what came from elsewhere included) and at its end, in between
    the last block that it has written.
    """

    def __init__(self, pool: ShadowPool, vocab: int = 50):
        super().__init__(pool, vocab)
        self._begun: set[Request] = set()

    def forward(self, requests: Sequence[Request], num_new: Sequence[int] | None = None) -> list[int]:
        counts = [r.num_new_tokens for r in requests] if num_new is None else num_new
        bs, slots, drawn = self.pool.block_size, self.pool.slots, []
        found: list[list[int]] = []
        for r, n in zip(requests, counts, strict=True):
            start = r.num_computed_tokens
            end, numbers = start + n, self._numbers(r)
            if end > len(r.block_ids) * bs:
                raise ShadowError(f"request {r.request_id} would write token {end - 1} behind its last block")
            at = start
            while at < end:
                to = min(end, (at // bs + 1) * bs)
                slots[r.block_ids[at // bs]][at % bs : at % bs + to - at] = numbers[at:to]
                at = to
            found.append(numbers)
        for r, n, numbers in zip(requests, counts, found, strict=True):
            end = r.num_computed_tokens + n
            last = end == r.num_prompt_tokens + r.max_tokens - 1
            self._check_from(r, numbers, 0 if last or r not in self._begun else max(0, end - n - bs) // bs * bs, end)
            self._begun.add(r)
            r.num_computed_tokens = end
            if end == r.num_tokens:
                drawn.append(self.next_token(numbers[end - 1]))
        return drawn

    def _numbers(self, request: Request) -> list[int]:
        known = self._known.get(request)
        if known is None:
            known = self._known[request] = list(
                itertools.accumulate(request.prompt_token_ids, lambda a, t: (a * 1_000_003 + t + 1) % PRIME)
            )
        for t in request.output_token_ids[len(known) - request.num_prompt_tokens :]:
            known.append((known[-1] * 1_000_003 + t + 1) % PRIME)
        return known

    def _check_from(self, request: Request, numbers: Sequence[int], start: int, end: int) -> None:
        bs = self.pool.block_size
        for i in range(start, end, bs):
            n = min(bs, end - i)
            if self.pool.slots[request.block_ids[i // bs]][:n] != numbers[i : i + n]:
                raise ShadowError(
                    f"request {request.request_id} would read block {request.block_ids[i // bs]} as its tokens from "
                    f"{i}, and that holds something else"
                )
        self.reads += end - start

    def finish(self, request: Request) -> None:
        super().finish(request)
        self._begun.discard(request)


class StepClock:
    """Seconds of a step by its rows. Of decodes alone, to the next 32 tokens of their mean context, and remembered."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._known: dict[tuple[int, int], float] = {}

    def seconds(self, rows: Sequence[tuple[int, int]]) -> float:
        """rows: (new tokens, context before) of each request in the step."""
        if any(n > 1 for n, _ in rows):
            return self.engine.seconds(rows)
        key = (len(rows), round(sum(c for _, c in rows) / len(rows) / 32))
        if key not in self._known:
            self._known[key] = self.engine.seconds([(1, 32 * key[1])] * len(rows))
        return self._known[key]


class PacedEngine:
    """One engine on a timeline. before(rows, begun, seconds) and after(deltas) are told of each step."""

    def __init__(self, timeline: Timeline, engine: Engine, budget: int, name: str = "", clock: StepClock | None = None):
        self.timeline, self.engine, self.name = timeline, engine, name
        self.clock = clock or StepClock(engine)
        self.now, self.busy, self.busy_s, self.steps = 0.0, False, 0.0, 0
        self.inbox: list[Callable[[], None]] = []
        self.calls: dict[Request, None] = {}  # that were sent here and have not ended
        self.sent = 0
        events = EventLog(0, clock=lambda: self.now)
        limits = Limits(engine.max_num_seqs, budget)
        self.core = ShadowCore(engine.capacity // engine.block_size, engine.block_size, limits=limits, events=events)
        self.core.shadow = PacedShadow(self.core.kv.pool)  # type: ignore[arg-type]
        runner: Any = self.core.runner
        runner.shadow, self._forward = self.core.shadow, runner.forward
        runner.forward = self._paced
        self.before: Callable[[Sequence[tuple[Request, int]], float, float], None] = lambda *_: None
        self.tokens: dict[Request, list[float]] = {}

    def request(self, prompt: Sequence[int], new: int, arrival: float) -> Request:
        return self.core.request(prompt, new, arrival=arrival)

    def add(self, request: Request) -> None:
        """Whoever sends it counts it from now on; the engine sees it after the step under way."""
        self._enter(request)
        self.call(lambda: self.core.add(request))

    def hold(self, request: Request) -> None:
        """One that waits for KV, or for the message that sends it."""
        self._enter(request)
        self.core.hold(request)

    def _enter(self, request: Request) -> None:
        self.calls[request], self.sent = None, self.sent + 1

    def call(self, work: Callable[[], None]) -> None:
        """Do this now, or after the step under way."""
        if self.busy:
            self.inbox.append(work)
        else:
            self.now = self.timeline.now
            work()
            self._wake()

    def abort(self, request: Request) -> None:
        """Between two steps."""
        self.calls.pop(request, None)
        self.core.abort(request)

    @property
    def left(self) -> int:
        """Tokens outstanding here, as drivers count them: prompts until the first token, and the rest of answers."""
        return sum(
            (0 if (n := len(r.output_token_ids)) else r.num_prompt_tokens) + r.max_tokens - n for r in self.calls
        )

    def state(self) -> ReplicaState:
        return ReplicaState(self.name, requests=len(self.calls), outstanding_tokens=self.left, sent=self.sent)

    @property
    def kv_share(self) -> float:
        """Of its blocks, those in use or reserved."""
        return self.core.kv.num_live / self.core.kv.pool.num_blocks

    def _paced(self, requests: Sequence[Request], counts: Sequence[int]) -> Any:
        begun = self.now
        seconds = self.clock.seconds([(n, r.num_computed_tokens) for r, n in zip(requests, counts, strict=True)])
        out = self._forward(requests, counts)
        self.before(list(zip(requests, counts, strict=True)), begun, seconds)
        self.now = begun + seconds
        self.busy_s += seconds
        self.steps += 1
        return out

    def _wake(self) -> None:
        if self.busy or not (self.core.scheduler.running or self.core.scheduler.num_waiting):  # held ones wait for KV
            return
        self.busy, self.now = True, self.timeline.now
        running = list(self.core.outputs)
        for r, _ in self.core.step():
            self.tokens.setdefault(r, []).append(self.now)
        ended = [r for r in running if r not in self.core.outputs]
        if error := next(iter(self.core.failures.values()), None):
            raise error
        self.timeline.at(self.now, lambda: self._retire(ended))

    def _retire(self, ended: Sequence[Request]) -> None:
        self.busy, self.now = False, self.timeline.now
        for r in ended:
            self.calls.pop(r, None)
        inbox, self.inbox = self.inbox, []
        for work in inbox:
            work()
        self._wake()


@dataclass(frozen=True)
class Sample:
    """At a moment: requests whose prompt waits to be computed, requests that wait at decode, share of decode's blocks
    in use. Of a co-located fleet the first two are the same queue, counted once."""

    time: float
    input_queue: int
    decode_queue: int
    kv_share: float


@dataclass
class FleetRun:
    """What happened: stamps in order of arrival; samples, one an arrival; handoffs, by how they ended."""

    stamps: list[Stamps]
    samples: list[Sample] = field(default_factory=list)
    handoffs: dict[str, int] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)

    @property
    def steady(self) -> list[Stamps]:
        return self.stamps[int(WARM_UP * len(self.stamps)) :]

    def attained(self, slo: SLO) -> float:
        """Share of the requests after the warm-up that meet the SLO."""
        return sum(slo.met(s) for s in self.steady) / len(self.steady)


class Colocated:
    """n engines that each do both. Who gets a newcomer is decided as among real replicas (data_parallel.py)."""

    def __init__(self, engine: Engine, engines: int, budget: int):
        self.timeline, clock = Timeline(), StepClock(engine)
        self.engines = [PacedEngine(self.timeline, engine, budget, f"engine {i}", clock) for i in range(engines)]
        self.made: list[tuple[PacedEngine, Request]] = []
        self.samples: list[Sample] = []

    def send(self, prompt: Sequence[int], new: int) -> None:
        """A request comes now."""
        engine = self.least_loaded()
        request = engine.request(prompt, new, self.timeline.now)
        self.made.append((engine, request))
        engine.add(request)
        self.samples.append(self.sample())

    def least_loaded(self) -> PacedEngine:
        name = least_outstanding([e.state() for e in self.engines])
        return next(e for e in self.engines if e.name == name)

    def sample(self) -> Sample:
        waiting = sum(e.core.scheduler.num_waiting + len(e.inbox) for e in self.engines)
        share = sum(e.kv_share for e in self.engines) / len(self.engines)
        return Sample(self.timeline.now, waiting, 0, share)

    def run(self, times: Iterable[float], prompt_tokens: int, output_tokens: int) -> FleetRun:
        """Requests of one shape at these times, until the last has its answer."""
        for i, t in enumerate(times):
            prompt = [(i * 7919 + j * 31) % 50 for j in range(8)] + [i % 50] * (prompt_tokens - 8)
            self.timeline.at(t, lambda p=prompt[:prompt_tokens]: self.send(p, output_tokens))  # type: ignore[misc]
        self.timeline.run()
        return self.result()

    def result(self) -> FleetRun:
        stamps = []
        for engine, r in self.made:
            at = engine.tokens[r]
            stamps.append(Stamps(
                r.arrival, r.arrival, tuple((t, 1) for t in at), at[-1], r.num_prompt_tokens, len(at), 200,
                request_id=r.request_id,
            ))  # fmt: skip
        for e in self.engines:
            e.core.kv.check()
        return FleetRun(stamps, self.samples, busy={e.name: e.busy_s for e in self.engines})
