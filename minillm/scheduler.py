"""Which tokens a step computes. Lessons 09 (joining and leaving), 10 (the token budget), 12 (preemption) build it.

There is no prefill and no decode here: a request is behind by `num_new_tokens`, and a step makes up for some of it.
B' = (B \\ F) + A (Orca; Yu et al., 2022): between two steps the finished F leave and the admitted A join.

Each `schedule()` walks through the running requests in the order of the policy's keys, then admits waiting ones:

1. a request that is behind by one token gets it; longer ones share what the budget leaves (Sarathi-Serve; Agrawal et
   al., 2024). Tokens of decoding requests further down are set aside first, so a long prompt cannot freeze a stream
2. whoever needs a block and finds none takes it from the policy's victim among those that have not begun this step.
   A victim goes back to the queue under its old key; its blocks stay hittable until they are reused
3. admission gives a request the blocks of all its tokens at once, or leaves it at the head of the queue. It stops at
   the first that does not fit, so a large request is not starved by small ones, and takes a rest in a step that
   preempted

Progress: the running request with the smallest key can take the blocks of all the others, and one that needs more than
the pool is refused, so each step with a request that may run computes at least a token, or refuses one in words.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from minillm.cache.paged import PagedCache
from minillm.errors import MinillmError
from minillm.events import EventLog
from minillm.policy import FirstCome, SchedulerPolicy, judged_key, judged_victim
from minillm.request import Request, Status


class ScheduledRow(NamedTuple):
    """A request, and how many of its missing tokens this step computes."""

    request: Request
    num_new: int


@dataclass
class SchedulerOutput:
    """One step. `refused`: requests that cannot go on, and why (in words, or what a part raised for them); they have
    left the scheduler."""

    rows: list[ScheduledRow] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    refused: list[tuple[Request, Exception]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(n for _, n in self.rows)


@dataclass(frozen=True)
class Limits:
    """What bounds a step. keep_free: blocks that admission leaves free for those that run (the watermark)."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    enable_chunked_prefill: bool = True
    keep_free: int = 0


class SchedulerLike(Protocol):
    """The part that `LLM(parts={"scheduler": MyScheduler})` replaces; called with (cache, policy, limits, events).

    Two things it may leave out, and what needs them is then refused: pause(request, paused), which bounds the streams
    of `AsyncLLM`, and waiting.expired(now), which a request with a deadline needs.
    """

    running: list[Request]

    def add(self, request: Request) -> None:
        """Queue a new request."""

    def schedule(self) -> SchedulerOutput:
        """The next step. Every row has the blocks that it needs."""

    def finish(self, request: Request) -> None:
        """Forget the request, wherever it is, and free what it holds. A second time, nothing."""

    @property
    def num_waiting(self) -> int: ...


class Keys:
    """The policy's keys, each asked for once: a key never changes. No reference back to the scheduler: a cycle would
    hold a pool's memory after `del llm`."""

    def __init__(self, policy: SchedulerPolicy):
        self._policy = policy
        self._known: dict[Request, float] = {}

    def of(self, request: Request) -> float:
        if request not in self._known:
            self._known[request] = judged_key(self._policy, request)
        return self._known[request]

    def forget(self, request: Request) -> None:
        self._known.pop(request, None)


class WaitingQueue:
    """Requests by key, smallest first; O(log n) to push, pop or remove. Nobody is in it twice."""

    def __init__(self, key: Callable[[Request], float]):
        self.key = key
        self._heap: list[tuple[float, int, Request]] = []
        self._deadlines: list[tuple[float, int, Request]] = []
        self._ticket: dict[Request, int] = {}  # whose entry in the heaps is valid; removed ones are skipped later
        self._next = itertools.count()

    def __len__(self) -> int:
        return len(self._ticket)

    def __contains__(self, request: Request) -> bool:
        return request in self._ticket

    def push(self, request: Request) -> None:
        if request in self._ticket:
            raise MinillmError(f"request {request.request_id} is queued already")
        key, ticket = self.key(request), next(self._next)  # a policy may raise: then nothing has happened
        self._ticket[request] = ticket
        heapq.heappush(self._heap, (key, ticket, request))
        if request.deadline is not None and request.status == Status.WAITING:  # one that has begun goes on
            heapq.heappush(self._deadlines, (request.deadline, ticket, request))

    def remove(self, request: Request) -> None:
        self._ticket.pop(request, None)
        most = max(len(self._heap), len(self._deadlines))
        if most > 64 and most > 4 * len(self._ticket):  # mostly ghosts: O(1) a removal, amortised
            self._heap, self._deadlines = (
                [e for e in heap if self._ticket.get(e[2]) == e[1]] for heap in (self._heap, self._deadlines)
            )
            heapq.heapify(self._heap)
            heapq.heapify(self._deadlines)

    def head(self) -> Request | None:
        return self._first(self._heap)

    def expired(self, now: float) -> Request | None:
        """A request that has not begun, and whose deadline has passed."""
        first = self._first(self._deadlines)
        return first if first is not None and first.deadline is not None and first.deadline < now else None

    def _first(self, heap: list[tuple[float, int, Request]]) -> Request | None:
        while heap and self._ticket.get(heap[0][2]) != heap[0][1]:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def __iter__(self) -> Iterator[Request]:
        """In order; for people and tests, O(n log n)."""
        return iter([r for _, t, r in sorted(self._heap, key=lambda e: e[:2]) if self._ticket.get(r) == t])


class Scheduler:
    """Continuous batching with chunked prefill and preemption, over a paged cache."""

    def __init__(
        self, cache: PagedCache, policy: SchedulerPolicy | None = None, limits: Limits | None = None,
        events: EventLog | None = None,
    ):  # fmt: skip
        self.cache, self.policy, self.limits = cache, policy or FirstCome(), limits or Limits()
        self.events = events if events is not None else EventLog(0)
        self._keys = Keys(self.policy)
        self.waiting = WaitingQueue(self._keys.of)
        self.running: list[Request] = []  # in the order of their keys: the same on every rank
        self.parked: set[Request] = set()  # not running, and their reader has stalled

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def add(self, request: Request) -> None:
        request.status = Status.WAITING
        self.waiting.push(request)

    def finish(self, request: Request) -> None:
        self.waiting.remove(request)
        self.parked.discard(request)
        self._keys.forget(request)
        if request in self.running:
            self.running.remove(request)
        self.cache.release(request)
        self.cache.forget(request)
        request.status = Status.FINISHED

    def pause(self, request: Request, paused: bool = True) -> None:
        """Back-pressure: a paused request keeps its blocks while nobody needs them, and gets no tokens."""
        request.paused = paused
        if paused and request in self.waiting:
            self.waiting.remove(request)
            self.parked.add(request)
        elif not paused and request in self.parked:
            self.parked.remove(request)
            self.waiting.push(request)

    def schedule(self) -> SchedulerOutput:
        out = SchedulerOutput()
        budget = self.limits.max_num_batched_tokens
        if not self.limits.enable_chunked_prefill:
            self._admit(out, budget)
            if out.rows:  # whole prompts have a step of their own
                return out
        budget = self._advance(out, budget)
        if not out.rows and out.preempted:  # a stream gave way to itself, and the token set aside for it is free again
            budget = self._advance(out, budget)
        if not out.rows or (self.limits.enable_chunked_prefill and not out.preempted):
            self._admit(out, budget)
        if not out.rows and not out.preempted and not self.running:
            self._refuse_head(out)
        return out

    # Running requests ---------------------------------------------------------------------------------

    def _advance(self, out: SchedulerOutput, budget: int) -> int:
        """Give running requests their tokens. Returns what is left of the budget."""
        order = [(r, r.num_new_tokens) for r in self.running if not r.paused]
        reserved = sum(n == 1 for _, n in order)  # of the budget, for streams further down
        for r, n in order:
            reserved -= n == 1
            if r.status != Status.RUNNING:  # it was a victim of an earlier one
                continue
            if n == 1:
                n = min(n, budget)
            elif self.limits.enable_chunked_prefill:
                n = min(n, budget - reserved)
            if n > 0 and self._make_room(r, r.num_computed_tokens + n, out):
                out.rows.append(ScheduledRow(r, n))
                budget -= n
        return budget

    def _make_room(self, request: Request, num_tokens: int, out: SchedulerOutput) -> bool:
        """Blocks for so many tokens, if need be from others. False: the request itself had to give way."""
        while not self._ask(self.cache.grow, request, num_tokens, out):
            if request.status != Status.RUNNING:
                return False
            begun = {r for r, _ in out.rows}
            candidates = [r for r in self.running if r not in begun]
            try:
                victim = judged_victim(self.policy, [r for r in candidates if r.paused] or candidates)
            except Exception as error:  # a learner's policy
                self._refuse(request, error, out)
                return False
            self._preempt(victim, out)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request, out: SchedulerOutput) -> None:
        computed, blocks = request.num_computed_tokens, len(request.block_ids)
        how, copied = self.cache.preempt(request)
        self.events.record("preempted", request.request_id, how=how, computed=computed, blocks=blocks, copied=copied)
        self.running.remove(request)
        request.status = Status.PREEMPTED
        request.num_preemptions += 1
        if request.paused:
            self.parked.add(request)
        else:
            self.waiting.push(request)
        out.preempted.append(request)

    # Waiting requests ---------------------------------------------------------------------------------

    def _admit(self, out: SchedulerOutput, budget: int) -> None:
        while budget > 0 and (r := self.waiting.head()) is not None:
            if len(self.running) >= self.limits.max_num_seqs and not self._oust_paused(out):
                return
            if out.rows and not self.limits.enable_chunked_prefill and not self._ask(self._within, r, budget, out):
                if r in self.waiting:
                    return
                continue
            while not self._ask(self.cache.admit, r, self.limits.keep_free if self.running else 0, out):
                if r not in self.waiting or not self._oust_paused(out):
                    break
            if not r.block_ids:
                if r in self.waiting:
                    return
                continue
            n = r.num_new_tokens
            if self.limits.enable_chunked_prefill:
                n = min(n, budget)
            self.waiting.remove(r)
            r.status = Status.RUNNING
            insort(self.running, r, key=self._keys.of)
            out.rows.append(ScheduledRow(r, n))
            budget -= n

    def _within(self, request: Request, budget: int) -> bool:
        """A whole prompt may exceed the budget only alone."""
        return self.cache.missing(request) <= budget

    def _oust_paused(self, out: SchedulerOutput) -> bool:
        """A request whose reader has stalled makes room for one that would run."""
        victim = next((r for r in reversed(self.running) if r.paused), None)
        if victim is not None:
            self._preempt(victim, out)
        return victim is not None

    def _refuse_head(self, out: SchedulerOutput) -> None:
        """Nothing runs, and still the first in the queue does not fit: it never will."""
        r = self.waiting.head()
        if r is not None:
            self._refuse(r, MinillmError(self.cache.why_not(r)), out)

    def _ask(self, what: Callable[[Request, int], bool], request: Request, n: int, out: SchedulerOutput) -> bool:
        """what(request, n). If it raises, this request ends, and nobody else: the fault may lie in a learner's part."""
        try:
            return what(request, n)
        except Exception as error:
            self._refuse(request, error, out)
            return False

    def _refuse(self, request: Request, error: Exception, out: SchedulerOutput) -> None:
        try:
            self.finish(request)
        except Exception:  # one fault is told at a time
            request.status = Status.FINISHED
        out.refused.append((request, error))


class StaticScheduler:
    """Static batching, for comparison (lesson 09): a group starts together, and the next waits for its last member.

    fits(members) says whether a group's memory suffices; start(members) reserves it. Prompts are computed one at a
    time, since each is enough work for the machine; then everybody decodes together.
    """

    def __init__(
        self, fits: Callable[[Sequence[Request]], bool], start: Callable[[Sequence[Request]], None],
        release: Callable[[Request], None], max_num_seqs: int,
    ):  # fmt: skip
        self.fits, self.start, self.release, self.max_num_seqs = fits, start, release, max_num_seqs
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._fresh: list[Request] = []  # of the group, not begun

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        for queue in (self.waiting, self.running, self._fresh):
            if request in queue:
                queue.remove(request)
        self.release(request)
        request.status = Status.FINISHED

    def schedule(self) -> SchedulerOutput:
        if not self.running and self.waiting:
            group = [self.waiting.pop(0)]
            while self.waiting and len(group) < self.max_num_seqs and self.fits([*group, self.waiting[0]]):
                group.append(self.waiting.pop(0))
            self.running, self._fresh = list(group), list(group)
            for r in group:
                r.status = Status.RUNNING
            self.start(group)
        rows = [self._fresh.pop(0)] if self._fresh else self.running
        return SchedulerOutput([ScheduledRow(r, r.num_new_tokens) for r in rows])
