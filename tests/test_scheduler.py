"""The rules of the scheduler, one by one, over the shadow engine (minillm.shadow): budgets, order, admission, memory.

Nothing here looks at a clock: what a step costs is counted, and a deadline is on a clock of the test's own.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_mutants import RARE, slip
from schedules import Play, Setup, add_random, random_setup

from minillm.cache.paged import PagedCache
from minillm.cache.prefix import RadixPrefixCache
from minillm.cache.tiers import HostTier, Tiers
from minillm.events import EventLog
from minillm.policy import Deadline, FirstCome, Priority
from minillm.request import Status
from minillm.scheduler import Limits, Scheduler
from minillm.shadow import ShadowCore


def rows(core, last=True):
    """[(request id, new tokens, computed before)] of each step, or of the last."""
    all_rows = [[tuple(row) for row in e.data["rows"]] for e in core.events.of("step")]
    return all_rows[-1] if last else all_rows


def play(setup=None, **options):
    return Play(setup or Setup(**options))


def add(core, *requests):
    for r in requests:
        core.add(r)


def right(core, requests):
    for r in requests:
        assert r.finish_reason == "length", r.stop_reason
        assert r.output_token_ids == core.shadow.expected(r.prompt_token_ids, r.max_tokens)


# The budget (lesson 10) -------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_parts_beside_streams_that_lose_no_step():
    core = ShadowCore(64, 4, limits=Limits(4, 8))
    streams = [core.request([i], 20) for i in range(3)]
    add(core, *streams)
    core.step()
    core.add(long := core.request(range(40), 2))
    for _ in range(8):
        before = [len(r.output_token_ids) for r in streams]
        core.step()
        assert [len(r.output_token_ids) for r in streams] == [n + 1 for n in before]
        assert rows(core)[-1][1] == 5  # what three streams leave of 8
    assert long.num_computed_tokens == 40
    core.finish_all()
    right(core, [*streams, long])


def test_tokens_of_streams_behind_a_long_prompt_are_set_aside_before_it():
    """The long prompt comes first in the order, and still may not take what the others need."""
    core = ShadowCore(64, 4, policy=Priority(100.0), limits=Limits(4, 4))
    streams = [core.request([i], 20) for i in range(3)]
    add(core, *streams)
    core.step()
    core.add(long := core.request(range(9), 2, priority=-1))
    core.step()
    assert core.scheduler.running[0] is long
    for _ in range(8):
        core.step()
        assert sorted(rows(core))[:3] == [(r.request_id, 1, r.num_computed_tokens - 1) for r in streams]
        assert sum(n for _, n, _ in rows(core)) <= 4


def test_a_budget_of_one_token_serves_everybody():
    core = ShadowCore(64, 4, limits=Limits(4, 1))
    requests = [core.request(range(n), 3) for n in (1, 9, 4)]
    add(core, *requests)
    core.finish_all()
    assert all(sum(n for _, n, _ in step) == 1 for step in rows(core, last=False))
    right(core, requests)


def test_without_chunks_whole_prompts_have_steps_of_their_own():
    core = ShadowCore(64, 4, limits=Limits(8, 10, enable_chunked_prefill=False))
    requests = [core.request(range(n), 3) for n in (4, 5, 6, 30, 3)]
    add(core, *requests)
    core.step()
    assert rows(core) == [("1", 4, 0), ("2", 5, 0)]
    core.step()
    assert rows(core) == [("3", 6, 0)]
    core.step()
    assert rows(core) == [("4", 30, 0)], "a prompt over the budget is computed, alone"
    core.step()
    assert rows(core) == [("5", 3, 0)]
    core.step()
    assert {n for _, n, _ in rows(core)} == {1}
    core.finish_all()
    right(core, requests)


def test_a_whole_prompt_that_must_wait_for_its_own_step_is_not_admitted_for_nothing():
    """Admitting and taking it back would tell of a hit that never was, once a step."""
    game = play(budget=4, chunked=False, prefix="radix", blocks=32)
    core = game.core
    game.add([1] * 9, 1)
    while core.has_work:
        game.step()
    game.add([2, 2], 1)
    game.add([1] * 20, 1)  # hits two blocks and is still over the budget
    game.step()
    assert rows(core) == [("2", 2, 0)]
    assert not game.events.of("hit")
    game.step()
    assert rows(core) == [("3", 12, 8)]
    assert len(game.events.of("hit")) == 1
    game.end()


# Order ------------------------------------------------------------------------------------------------------------


def started(core):
    """Request ids in the order of their first row."""
    return list(dict.fromkeys(name for step in rows(core, last=False) for name, *_ in step))


def test_first_come_first_served():
    core = ShadowCore(64, 4, limits=Limits(2, 8))
    requests = [core.request(range(n), 2, arrival=at) for n, at in ((3, 5.0), (20, 1.0), (1, 4.0), (9, 2.0), (2, 3.0))]
    add(core, *requests)
    core.finish_all()
    assert started(core) == ["2", "4", "5", "3", "1"]


def test_priority_with_ageing():
    core = ShadowCore(64, 4, policy=Priority(10.0), limits=Limits(1, 8))
    ways = ((0, 0.0), (2, 1.0), (-1, 15.0), (0, 20.5), (2, 0.5))
    add(core, *[core.request([1], 2, arrival=at, priority=p) for p, at in ways])
    core.finish_all()
    # Keys 0, 21, 5, 20.5, 20.5: twenty seconds of waiting make up for two steps of priority.
    assert started(core) == ["1", "3", "4", "5", "2"]


def test_earliest_deadline_first():
    core = ShadowCore(64, 4, policy=Deadline(60.0), limits=Limits(1, 8), events=EventLog(clock=lambda: 0.0))
    add(core, *[core.request([1], 2, arrival=0.1 * i, deadline=d) for i, d in enumerate((90.0, 10.0, None, 30.0))])
    core.finish_all()
    assert started(core) == ["2", "4", "3", "1"]


@settings(max_examples=60)
@given(st.integers(0, 10**9))
def test_no_request_is_overtaken_by_one_that_comes_later_than_the_ageing_allows(seed):
    """The bound of `Priority`: nobody who arrives more than (priority - theirs) * ageing seconds later is first."""
    rng = random.Random(seed)
    ageing = rng.choice([0.5, 3.0, 20.0])
    core = ShadowCore(rng.randint(4, 12), 4, Priority(ageing), Limits(rng.randint(1, 3), 8))
    made, at = [], 0.0
    for _ in range(60):
        for _ in range(rng.choice([0, 0, 1, 3])):
            at += rng.uniform(0, 2)
            r = core.request(range(rng.randint(1, 9)), rng.randint(1, 6), priority=rng.randint(-3, 3), arrival=at)
            made.append(r)
            core.add(r)
        core.step()
    core.finish_all()
    right(core, made)
    first = {name: i for i, name in enumerate(started(core))}
    joined = {}  # request -> number of the step
    for number, step in enumerate(rows(core, last=False)):
        for name, *_ in step:
            joined.setdefault(name, number)
    for a in made:
        for b in made:
            if b.arrival > a.arrival + (a.priority - b.priority) * ageing and b.arrival > a.arrival:
                assert first[b.request_id] > first[a.request_id]
                assert joined[b.request_id] >= joined[a.request_id]


def test_a_large_request_at_the_head_is_not_starved_by_small_ones():
    core = ShadowCore(8, 4, limits=Limits(8, 64))
    add(core, *[core.request([i], 6) for i in range(4)])
    core.step()
    core.add(large := core.request(range(28), 2))
    for i in range(100):  # small ones come without end
        core.add(core.request([i], 6))
        core.step()
        if large.finished:
            break
    assert large.finish_reason == "length"
    assert started(core)[:5] == ["1", "2", "3", "4", "5"]
    assert core.scheduler.num_waiting + len(core.scheduler.running) > 0


def test_a_running_request_is_not_cut_off_by_an_urgent_one_that_waits():
    core = ShadowCore(4, 4, policy=Priority(10.0), limits=Limits(4, 64))
    core.add(first := core.request(range(12), 4))
    core.step()
    core.add(core.request(range(12), 2, priority=-9))
    core.finish_all()
    assert first.num_preemptions == 0


# Deadlines --------------------------------------------------------------------------------------------------------


def test_what_expires_while_it_waits_never_runs():
    game = play(seqs=1)
    game.add([1], 5)
    late = game.add([2], 5, due_in=2.5)
    in_time = game.add([3], 5, due_in=50.0)
    game.end()
    assert late.finish_reason == "abort"
    assert "its deadline passed" in late.stop_reason
    assert late.output_token_ids == []
    assert in_time.finish_reason == "length"


def test_a_request_that_has_begun_outlives_its_deadline_though_it_is_preempted():
    """A deadline says when a request must have begun. One that lost its memory has, and its reader has text."""
    game = play(blocks=4, block_size=1, seqs=2, budget=8)
    game.add([1, 1], 3)
    r = game.add([2, 2], 3, due_in=2.0)
    game.end()
    assert r.num_preemptions > 0
    assert r.finish_reason == "length", r.stop_reason


def test_what_is_paused_before_it_begins_expires_when_it_is_resumed():
    game = play()
    r = game.add([1], 5, due_in=2.0)
    game.pause(r, True)
    for _ in range(4):
        game.step()
    assert not r.finished
    game.pause(r, False)
    game.step()
    assert r.finish_reason == "abort"
    game.end()


# Memory (lesson 12) -----------------------------------------------------------------------------------------------


def test_the_last_one_gives_way():
    core = ShadowCore(6, 1, limits=Limits(3, 64))
    requests = [core.request([i], 5) for i in range(3)]
    add(core, *requests)
    while not core.events.of("preempted"):
        core.step()
    assert [e.request_id for e in core.events.of("preempted")] == ["3"]
    assert requests[2].status == Status.PREEMPTED
    core.finish_all()
    right(core, requests)
    assert requests[0].num_preemptions == 0, "the first in the order never loses its memory"


def test_a_victim_comes_back_under_its_old_key():
    core = ShadowCore(6, 1, limits=Limits(3, 64))
    add(core, *[core.request([i], 5) for i in range(3)])
    while not core.events.of("preempted"):
        core.step()
    core.add(core.request([9], 2))
    assert [r.request_id for r in core.scheduler.waiting] == ["3", "4"]
    core.finish_all()
    assert core.idle


@pytest.mark.parametrize("blocks", [2, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("budget", [1, 2, 64])
def test_pools_of_two_blocks(blocks, size, budget):
    core = ShadowCore(blocks, size, limits=Limits(4, budget))
    most = blocks * size
    requests = [core.request([i] * n, most - n + 1) for i in range(3) for n in range(1, most + 1)]
    add(core, *requests)
    core.finish_all()
    right(core, requests)
    assert core.idle


@pytest.mark.parametrize("size", [1, 2, 4, 16])
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_prompts_of_exactly_whole_blocks_and_one_token_beside(size, blocks, extra):
    """The last token is always computed: a full hit is cut to whole blocks below num_tokens."""
    prompt = list(range(size * blocks + extra))
    if not prompt:
        return
    make = lambda pool, events: PagedCache(pool, prefix=RadixPrefixCache(size), namespace="shadow", events=events)
    core = ShadowCore(2 * blocks + 4, size, limits=Limits(4, 64), make_cache=make)
    for again in range(3):
        core.add(r := core.request(prompt, 2))
        core.finish_all()
        right(core, [r])
        assert r.num_cached_tokens == ((len(prompt) - 1) // size * size if again else 0)


def test_the_watermark_is_left_free_for_those_that_run():
    core = ShadowCore(8, 1, limits=Limits(4, 64, keep_free=3))
    first, second = core.request([1] * 3, 3), core.request([2] * 3, 3)
    core.add(first)
    core.step()
    core.add(second)
    core.step()
    assert second.status == Status.WAITING  # 3 blocks of the 4 that are free would leave 1
    core.finish_all()
    right(core, [first, second])
    assert not core.events.of("preempted")
    core.add(alone := core.request([1] * 8, 1))  # alone, nobody needs it
    core.finish_all()
    right(core, [alone])


def test_a_request_that_can_never_fit_is_refused_at_once_and_the_next_proceeds():
    core = ShadowCore(2, 4)
    big, small = core.request(range(9), 2), core.request([1], 2)
    add(core, big, small)
    core.step()
    assert big.finish_reason == "error"
    assert "even alone" in big.stop_reason
    core.step()
    assert small.output_token_ids
    core.finish_all()
    right(core, [small])


# Many waiting: what a step costs ----------------------------------------------------------------------------------


class Counted(float):
    """A key that counts how often it is compared."""

    compared = 0

    def __lt__(self, other):
        Counted.compared += 1
        return float(self) < float(other)

    def __eq__(self, other):
        Counted.compared += 1
        return float(self) == float(other)

    __hash__ = float.__hash__


class CountedPolicy(FirstCome):
    keys = 0

    def key(self, request):
        CountedPolicy.keys += 1
        return Counted(request.arrival)


def costs(waiting, due):
    """Comparisons and keys of 50 steps with so many in the queue, most of them with a deadline if `due`."""
    core = ShadowCore(64, 4, CountedPolicy(), Limits(4, 8), events=EventLog(clock=lambda: 0.0))
    for i in range(waiting):
        core.add(core.request([i % 7] * 3, 6, deadline=1e9 + i if due else None))
    Counted.compared = CountedPolicy.keys = 0
    for _ in range(50):
        core.step()
    assert core.scheduler.num_waiting > waiting - 40
    return Counted.compared, CountedPolicy.keys


@pytest.mark.parametrize("due", [False, True])
def test_a_step_costs_the_same_whatever_waits(due):
    few, many = costs(50, due), costs(10_000, due)
    assert many[1] == few[1]  # a key is asked for at joining, never of those that wait
    # A pop from a heap of n compares some 2 log2(n) keys: 2.4 times as many at 10,000 as at 50. A scan: 200 times.
    assert many[0] <= 4 * few[0]


def test_five_thousand_waiting_all_end():
    core = ShadowCore(32, 4, limits=Limits(16, 64))
    requests = [core.request([i % 5, i % 3], 2) for i in range(5000)]
    add(core, *requests)
    assert core.scheduler.num_waiting == 5000
    core.finish_all(20_000)
    assert all(r.finish_reason == "length" for r in requests)
    assert started(core) == [r.request_id for r in requests]
    assert core.idle


@pytest.mark.parametrize("slipped", [False, True])
def test_those_who_have_left_do_not_pile_up_in_the_queue(slipped):
    """An entry of a heap is skipped, not sought, when its request leaves; both heaps must be swept in time."""
    make = slip(*RARE["who has left piles up among the deadlines"]).scheduler if slipped else Scheduler
    core = ShadowCore(32, 4, Priority(100.0), Limits(1, 8), None, EventLog(clock=lambda: 0.0), make)
    core.add(stays := core.request([1], 2, priority=1000, deadline=1.0))  # the earliest deadline, and last in the order
    for i in range(2000):
        core.add(core.request([i % 5], 1, deadline=1000.0 + i))
        core.step()
    assert not stays.finished
    waiting = core.scheduler.waiting
    assert len(waiting) == 1
    assert len(waiting._heap) <= 64
    assert (len(waiting._deadlines) <= 64) != slipped
    for r in [core.request([1], 1, priority=2000, deadline=9.0) for _ in range(500)]:
        core.add(r)
        core.abort(r)
    assert len(waiting._heap) <= 64
    assert len(waiting._deadlines) <= 64 or slipped


# Ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_random_workloads_end_within_the_bound(seed):
    """No livelock, by a bound on steps: (n + 1) (T + 1) for n requests of T tokens together, prompts and answers.

    Let r be the one with the smallest key of those that run. Victims are the last in the order, so r loses its blocks
    to nobody but one that is admitted and comes before it. Each step either adds an output token to somebody, which is
    never lost (at most T such steps in all), or computes tokens of r: only streams come before r's chunk.

    Whoever comes first among all runs, or is at the head of the queue. If it runs, it keeps what it has, and ends after
    at most T steps of the second kind. If it waits, nobody is admitted before it, so those that run end one after the
    other, the smallest key first, in at most T steps together. So at most T + 1 steps of the second kind lie between
    two ends of whoever comes first, n times.
    """
    rng = random.Random(seed)
    game = Play(random_setup(rng))
    for _ in range(12):
        add_random(game, rng)
    game.end()  # raises if `Play.bound()` does not suffice, and looks at every law after each step


@pytest.mark.parametrize("slipped", [False, True])
def test_a_token_that_was_set_aside_for_a_stream_that_gave_way_is_not_lost(slipped):
    """A stream that is last, and finds no block, gives way to itself; the chunk that waited for it goes on at once."""
    make = slip(*RARE["a token that was set aside is lost"]).scheduler if slipped else Scheduler
    core = ShadowCore(4, 1, policy=Priority(100.0), limits=Limits(2, 1), make_scheduler=make)
    core.add(stream := core.request([1], 4))
    core.step()
    core.scheduler.pause(stream)
    core.add(long := core.request([2] * 3, 2, priority=-1))
    core.step()
    core.scheduler.pause(stream, False)
    assert core.scheduler.running == [long, stream]
    idle = 0
    for _ in range(60):
        if not core.has_work:
            break
        number = core.events.step
        core.step()
        idle += core.events.step == number
    assert idle == slipped
    assert stream.num_preemptions
    right(core, [stream, long])


def test_a_thousand_mixed_requests_leave_the_pool_as_it_began():
    rng = random.Random(0)
    game = play(blocks=24, block_size=4, seqs=8, budget=16, policy="priority", prefix="radix", host=20_000)
    for _ in range(1000):
        add_random(game, rng)
        game.step()
        if rng.random() < 0.05:
            game.abort(rng.choice(game.alive or game.made))
    game.end(look_every=50)  # free + cached == total, nothing live, and every cached block can be given back


# Aborts, at every boundary and in every state ---------------------------------------------------------------------


def busy(tiers=False):
    """Six requests over a small pool: queued, half computed, decoding, preempted, paused, and (tiers) swapped ones."""
    host = Tiers([HostTier(100_000)]) if tiers else None
    make = lambda pool, events: PagedCache(pool, tiers=host, preemption_mode="swap", namespace="s", events=events)
    core = ShadowCore(6, 2, limits=Limits(3, 3), make_cache=make)
    requests = [core.request([i] * n, 4) for i, n in enumerate((1, 7, 3, 2, 5, 4))]
    add(core, *requests)
    core.scheduler.pause(requests[3])
    return core, requests, host


def state(core, r):
    if r.paused:
        return "paused"
    if r.status == Status.RUNNING:
        return "decoding" if r.output_token_ids else "chunking"
    return str(r.status)


class CountedFrees:
    """How often each request's blocks were freed: the lists that went to the allocator."""

    def __init__(self, core):
        self.freed, inner = [], core.kv.allocator.free

        def free(ids):
            ids = list(ids)
            self.freed += ids
            inner(ids)

        core.kv.allocator.free = free


@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize("which", range(6))
def test_an_abort_at_any_boundary_frees_exactly_once(which, tiers):
    seen = set()
    for k in range(80):
        core, requests, host = busy(tiers)
        for _ in range(k):
            core.step()
        r = requests[which]
        over = r.finished
        if not over:
            seen.add(state(core, r))
        held, frees = list(r.block_ids), CountedFrees(core)
        free = core.kv.num_free
        core.abort(r)
        assert sorted(frees.freed) == sorted(held)
        assert core.kv.num_free == free + len(held)
        core.abort(r)
        core.scheduler.finish(r)
        assert len(frees.freed) == len(held), "blocks were freed a second time"
        core.kv.check()
        core.scheduler.pause(requests[3], False) if not requests[3].finished else None
        core.finish_all()
        right(core, [x for x in requests if x is not r])
        assert core.idle
        assert host is None or len(host) == 0
        if over:
            break
    else:
        assert which == 3, "80 steps are not enough for this request to end"  # it is paused, and never does
    assert seen >= STATES[which]


# Which states an abort finds each of `busy`'s requests in, at one boundary or another.
STATES = {
    0: {"waiting", "decoding"}, 1: {"waiting", "chunking", "decoding"}, 2: {"waiting", "decoding", "preempted"},
    3: {"paused"}, 4: {"waiting"}, 5: {"waiting", "decoding"},
}  # fmt: skip


# Pauses -----------------------------------------------------------------------------------------------------------


def test_a_paused_request_keeps_its_memory_until_somebody_needs_it():
    core = ShadowCore(4, 1, limits=Limits(4, 64))
    core.add(stalled := core.request([1, 1], 2))
    core.step()
    core.scheduler.pause(stalled)
    core.step()
    assert len(stalled.block_ids) == 2
    core.add(other := core.request([2, 2, 2], 2))
    for _ in range(5):
        core.step()
    right(core, [other])
    assert stalled.status == Status.PREEMPTED
    assert core.scheduler.num_waiting == 0
    core.scheduler.pause(stalled, False)
    core.finish_all()
    right(core, [stalled])


def test_a_change_of_mind_leaves_no_trace():
    core = ShadowCore()
    core.add(r := core.request([1], 3))
    for _ in range(3):
        core.scheduler.pause(r)
        core.scheduler.pause(r)
        core.scheduler.pause(r, False)
        core.scheduler.pause(r, False)
    assert [*core.scheduler.waiting] == [r]
    core.step()
    core.scheduler.pause(r)
    core.scheduler.pause(r, False)
    core.finish_all()
    right(core, [r])


# The log ----------------------------------------------------------------------------------------------------------


def test_the_log_tells_what_happened():
    """Rows sum up to what was computed; hits and rows of each stay in memory sum up to its tokens."""
    rng = random.Random(1)
    game = play(blocks=6, block_size=2, seqs=3, budget=5, prefix="radix", host=2000, mode="swap")
    game.events.clear = lambda: None  # `look` reads and forgets; here the whole log is read at the end
    game._log = lambda: None
    for _ in range(20):
        add_random(game, rng)
        game.step()
    game.end()
    log = list(game.events)
    computed = sum(n for e in log if e.kind == "step" for _, n, _ in e.data["rows"])
    assert computed == sum(game.core.shadow.computed)
    for r in game.made:
        own = [e for e in log if e.request_id == r.request_id]
        rows = [row for e in log if e.kind == "step" for row in e.data["rows"] if row[0] == r.request_id]
        lost = sum(e.data["computed"] for e in own if e.kind == "preempted")
        hits = sum(e.data["tokens"] for e in own if e.kind == "hit")
        if r.finish_reason == "length":  # the last token is drawn, and never computed
            assert hits + sum(n for _, n, _ in rows) - lost == r.num_tokens - 1
        assert sum(e.kind == "preempted" for e in own) == r.num_preemptions
        assert sum(e.kind == "first_token" for e in own) == bool(r.output_token_ids)
        kinds = [e.kind for e in own]
        assert kinds[0] == "queued"
        assert kinds[-1] == "finished"
        assert own[-1].data == {"reason": r.finish_reason, "output_tokens": len(r.output_token_ids)}
    assert {"hit", "preempted"} <= {e.kind for e in log}
