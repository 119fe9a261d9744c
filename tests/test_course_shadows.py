"""The graders' random schedules: the engine's own parts pass, and each broken one is found, in words."""

from functools import partial

import pytest

from minillm.cache.blocks import BlockAllocator
from minillm.cache.prefix import RadixPrefixCache
from minillm.cache.prefix_hash import HashPrefixCache
from minillm.course.candidate import NotAttempted, OverTimeError
from minillm.course.checks.shadows import Game, first_fault
from minillm.policy import FirstCome, Priority
from minillm.scheduler import Limits, ScheduledRow, Scheduler, SchedulerOutput

ROOMY = Game(roomy=True, whole=True)


@pytest.mark.parametrize("game", [Game(), ROOMY, Game(whole=True), Game(roomy=True)], ids=str)
@pytest.mark.parametrize("prefix", [None, RadixPrefixCache, HashPrefixCache])
def test_the_engine_s_own_parts_have_no_fault(game, prefix):
    assert first_fault(range(8), game, prefix=prefix, tiers=prefix is not None) == ""


def test_a_hundred_schedules_of_the_engine():
    assert first_fault(range(100, 200)) == ""


class Kept(Scheduler):
    """A finished request stays in the batch."""

    def finish(self, request):
        self.waiting.remove(request)
        self.cache.release(request)


class Holds(Scheduler):
    """The blocks of who ended are never given back."""

    def finish(self, request):
        self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)


class Early(Scheduler):
    """The blocks of a request that will end in this step are freed before the step reads them."""

    def schedule(self):
        out = super().schedule()
        for r, _ in out.rows:
            if len(r.output_token_ids) + 1 == r.max_tokens:
                ids = list(r.block_ids)
                self.cache.release(r)
                r.block_ids = ids
        return out


class Static(Scheduler):
    """Nobody joins before everybody has left."""

    def _admit(self, out, budget):
        if not self.running:
            super()._admit(out, budget)


class TooMany(Scheduler):
    def __init__(self, cache, policy, limits, events):
        more = Limits(limits.max_num_seqs + 1, limits.max_num_batched_tokens, limits.enable_chunked_prefill)
        super().__init__(cache, policy, more, events)


class Shuffled(Scheduler):
    """The batch in the order of joining."""

    def schedule(self):
        before = list(self.running)
        out = super().schedule()
        self.running.sort(key=lambda r: before.index(r) if r in before else len(before))
        return out


class Lazy(Scheduler):
    """Never schedules anybody."""

    def schedule(self):
        return SchedulerOutput()


class Greedy(Scheduler):
    """Gives decode steps a second token."""

    def schedule(self):
        out = super().schedule()
        return SchedulerOutput([ScheduledRow(r, n + 1) for r, n in out.rows], out.preempted, out.refused)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (Kept, "ended and is still in"), (Holds, "still holds"), (Early, "not held"), (Static, "a place that is free"),
        (TooMany, "at most"), (Shuffled, "order of the keys"), (Lazy, "are in the step and"), (Greedy, "behind by"),
    ],
)  # fmt: skip
def test_a_broken_scheduler_is_found(broken, words):
    fault = first_fault(range(20), ROOMY, scheduler=broken, policy=partial(Priority, 3.0))
    assert words in fault
    assert fault.startswith("schedule ")


class Reversed(FirstCome):
    """The newest first: no fault of a scheduler, as long as everybody comes in the end."""

    def key(self, request):
        return -request.arrival


class Overtakes(Scheduler):
    """A request that does not fit is passed by a smaller one behind it."""

    def _admit(self, out, budget):
        kept = []
        while (r := self.waiting.head()) is not None and len(self.running) < self.limits.max_num_seqs:
            before = len(out.rows)
            super()._admit(out, budget - out.num_tokens)
            if len(out.rows) == before:
                self.waiting.remove(r)
                kept.append(r)
        for r in kept:
            self.waiting.push(r)


def test_any_order_is_a_policy_but_overtaking_is_a_fault():
    assert first_fault(range(10), policy=Reversed) == ""
    assert "was left waiting" in first_fault(range(40), Game(whole=True), scheduler=Overtakes, policy=FirstCome)


class Twice(BlockAllocator):
    """A freed block stands on the free list twice."""

    def __init__(self, n):
        super().__init__(n)
        self.given = 0

    def allocate(self, n):
        self.given += 1
        got = super().allocate(n)
        return [1] * n if self.given > 5 else got


class Leaks(BlockAllocator):
    def free(self, ids):
        super().free(list(ids)[1:])


@pytest.mark.parametrize(("broken", "words"), [(Twice, "nobody holds"), (Leaks, "lost or doubled")])
def test_a_broken_allocator_is_found(broken, words):
    assert words in first_fault(range(10), allocator=broken)


class Anybody(RadixPrefixCache):
    """A hit is not verified: the first block of anybody fits everybody."""

    def insert(self, tokens, namespace, ids, known=0):
        got = super().insert(tokens, namespace, ids, known=known)
        self.first = getattr(self, "first", None) or (list(ids[:1]) or None)
        return got

    def peek(self, tokens, namespace):
        first = getattr(self, "first", None)
        if first and first[0] in self and len(tokens) >= self.block_size:
            return list(first), self.block_size
        return super().peek(tokens, namespace)


def test_a_broken_prefix_cache_is_found():
    assert "would read block" in first_fault(range(20), prefix=Anybody)


class Stub(Scheduler):
    error = NotAttempted("not attempted")

    def schedule(self):
        raise self.error


class Slow(Stub):
    error = OverTimeError("late")


class Bug(Stub):
    error = KeyError("x")


def test_a_stub_is_not_a_fault():
    with pytest.raises(NotAttempted):
        first_fault(range(3), scheduler=Stub)
    with pytest.raises(OverTimeError):
        first_fault(range(3), scheduler=Slow)
    assert "'x'" in first_fault(range(3), scheduler=Bug)
