"""What enters leaves exactly once, whatever comes in whichever order; and what steps cost is learnt from them."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from queue_simulation import COSTS, Simulation

from minillm.errors import MinillmError
from minillm.events import Event
from minillm.request import sequence_names
from minillm.roofline.capacity import StepModel
from minillm.server.meter import LoadMeter
from minillm.server.step_costs import ENOUGH, WARM, CostFit

PLACES = 3


def event(kind, name="", **data):
    return Event(0, 0.0, kind, name, data)


def step(*rows, waiting=0, running=None, seconds=0.01):
    return event("step", rows=rows, waiting=waiting, running=len(rows) if running is None else running, seconds=seconds)


class Meter(RuleBasedStateMachine):
    """Against a model that keeps a plain dict of sequences. Ids are few, so that they come again, and out of order."""

    make = staticmethod(lambda: LoadMeter(PLACES, 64, by_priority=True))
    ids, tenants = st.sampled_from("abcd"), st.sampled_from(["", "t", "u"])

    def __init__(self):
        super().__init__()
        self.meter = self.make()
        self.held: dict[str, list[str]] = {}  # reserved requests and their names
        self.inside: dict[str, list] = {}  # name -> [tenant, request or None, arrived, runs]

    @rule(
        id=ids,
        n=st.integers(1, 3),
        tenant=tenants,
        prompt=st.integers(0, 50),
        new=st.integers(1, 50),
        p=st.integers(-1, 1),
    )
    def reserve(self, id, n, tenant, prompt, new, p):
        names = sequence_names(id, n)
        if id in self.held or any(m in self.inside for m in names):
            with pytest.raises(MinillmError, match="under way"):
                self.meter.reserve(id, prompt, new, n, tenant, p)
            return
        self.meter.reserve(id, prompt, new, n, tenant, p)
        self.held[id] = names
        self.inside.update({m: [tenant, id, False, False] for m in names})

    @rule(id=ids, prompt=st.integers(0, 50), new=st.integers(1, 50))
    def resize(self, id, prompt, new):
        self.meter.resize(id, prompt, new)

    @rule(id=ids)
    def release(self, id):
        self.meter.release(id)
        for m in self.held.pop(id, []):
            if m in self.inside and self.inside[m][1] == id and not self.inside[m][2]:
                del self.inside[m]
        for entry in self.inside.values():
            if entry[1] == id:
                entry[1] = None

    @rule(id=ids, n=st.integers(1, 3), i=st.integers(0, 2), tenant=tenants)
    def queued(self, id, n, i, tenant):
        name = sequence_names(id, n)[min(i, n - 1)]
        self.meter.observe(event("queued", name, prompt_tokens=7, priority=0, tenant=tenant))
        self.inside.setdefault(name, [tenant, None, True, False])[2] = True

    @rule(
        rows=st.lists(st.tuples(ids, st.integers(1, 3), st.integers(0, 2)), max_size=4),
        new=st.integers(1, 9),
        at=st.integers(0, 60),
    )
    def step(self, rows, new, at):
        names = {sequence_names(id, n)[min(i, n - 1)] for id, n, i in rows}
        self.meter.observe(step(*((m, new, at) for m in names), waiting=len(self.inside)))
        for m in names & self.inside.keys():
            self.inside[m][2] = self.inside[m][3] = True

    @rule(
        id=ids,
        n=st.integers(1, 3),
        i=st.integers(0, 2),
        kind=st.sampled_from(["preempted", "hit", "first_token", "aborted"]),
    )
    def passing(self, id, n, i, kind):
        name = sequence_names(id, n)[min(i, n - 1)]
        self.meter.observe(event(kind, name))
        if kind == "preempted" and name in self.inside:
            self.inside[name][3] = False

    @rule(
        id=ids, n=st.integers(1, 3), i=st.integers(0, 2), kind=st.sampled_from(["finished", "refused"]),
        reason=st.sampled_from(["stop", "length", "abort", "error"]), tokens=st.integers(0, 99),
    )  # fmt: skip
    def end(self, id, n, i, kind, reason, tokens):
        name = sequence_names(id, n)[min(i, n - 1)]
        for _ in range(2):  # twice is once
            self.meter.observe(event(kind, name, reason=reason, output_tokens=tokens))
        self.inside.pop(name, None)

    @invariant()
    def counts(self):
        meter, inside = self.meter, self.inside
        assert meter.entered - meter.left == len(inside)
        assert set(meter._running) == {m for m, e in inside.items() if e[3]}
        assert set(meter._waiting) == inside.keys() - meter._running.keys()
        for tenant in ("", "t", "u"):
            assert meter.streams(tenant) == Counter(e[0] for e in inside.values())[tenant] >= 0
        queue = meter.queue()
        assert queue.waiting + queue.running == len(inside)
        assert queue.waiting == 0 or queue.running >= queue.max_num_seqs
        assert 1 <= queue.max_num_seqs <= PLACES
        everybody = [*meter._running.values(), *meter._waiting.values()]
        assert queue.tokens_left == sum(s.prefill_left + s.output_left for s in everybody)
        assert 0 <= queue.waiting_tokens <= queue.tokens_left
        assert 0 <= queue.ahead <= queue.waiting
        assert len(self.meter.queue(1).running_left) == queue.running >= len(queue.running_left) >= queue.decoding >= 0
        assert min([queue.prefill_left, queue.ahead_output, *queue.running_left]) >= 0
        assert min(meter.output_share.value, meter.prompt_share.value) >= 0
        assert max(meter.output_share.value, meter.prompt_share.value) <= 1
        assert meter.queue() == queue  # looking changes nothing

    @invariant()
    def without_itself(self):
        for id in self.held:
            mine = [m for m, e in self.inside.items() if e[1] == id and not e[2]]
            queue = self.meter.queue(without=id)
            assert queue.waiting + queue.running == len(self.inside) - len(mine)

    def teardown(self):
        for name in list(self.inside):
            self.meter.observe(event("finished", name, reason="abort", output_tokens=0))
        for id in list(self.held):
            self.meter.release(id)
        meter = self.meter
        assert meter.entered == meter.left
        assert not any([meter._waiting, meter._running, meter._requests, meter._classes, meter._streams])
        assert (meter.queue().waiting, meter.queue().running, meter.queue().tokens_left) == (0, 0, 0)


TestMeter = Meter.TestCase
TestMeter.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


class ForgetsPreempted(LoadMeter):
    def observe(self, event):
        if event.kind != "preempted":
            super().observe(event)


class LeavesTwice(LoadMeter):
    def _finished(self, event):
        super()._finished(event)
        self._streams[""] -= 1


class ReleasesWhatRuns(LoadMeter):
    def _reserved(self, request):
        found = [self._waiting.get(m) or self._running.get(m) for m in (request.names if request else ())]
        return [s for s in found if s is not None]


@pytest.mark.parametrize("mutant", [ForgetsPreempted, LeavesTwice, ReleasesWhatRuns])
def test_a_meter_that_miscounts_is_found_out(mutant):
    class Broken(Meter):
        make = staticmethod(lambda: mutant(PLACES, 64, by_priority=True))

    quick = settings(  # the first failure will do: no search for the smallest
        max_examples=3000, stateful_step_count=40, deadline=None, database=None, phases=[Phase.generate],
        report_multiple_bugs=False, derandomize=True,
    )  # fmt: skip
    with pytest.raises((AssertionError, KeyError, MinillmError)):
        run_state_machine_as_test(Broken, settings=quick)


def test_a_burst_is_counted_before_the_engine_has_seen_any_of_it():
    meter = LoadMeter(4)
    for i in range(1000):
        meter.reserve(f"r{i}", 10, 20)
    queue = meter.queue()
    assert (queue.running, queue.waiting, queue.waiting_tokens) == (4, 996, 996 * 30)


def test_those_that_will_take_a_free_place_do_not_wait_and_their_tokens_do_not_either():
    meter = LoadMeter(2)
    meter.reserve("small", 1, 1)
    meter.reserve("big", 1000, 1)
    meter.reserve("next", 5, 6)
    queue = meter.queue()
    assert (queue.running, queue.waiting, queue.waiting_tokens, queue.tokens_left) == (2, 1, 11, 1014)


def test_one_request_is_followed_to_its_end():
    meter = LoadMeter(2, 64)
    meter.reserve("a", 3, 10)
    meter.resize("a", 8, 4)
    assert meter.queue().tokens_left == 12
    meter.observe(event("queued", "a", prompt_tokens=8, priority=0, tenant=""))
    meter.observe(step(("a", 5, 0)))
    assert (meter.queue().prefill_left, meter.queue().decoding, meter.queue().running_left) == (3, 0, (4,))
    meter.observe(step(("a", 3, 5)))
    assert (meter.queue().prefill_left, meter.queue().decoding, meter.queue().running_left) == (0, 1, (3,))
    meter.observe(event("preempted", "a", how="recompute", computed=8, blocks=1, copied=0))
    assert (meter.queue().prefill_left, meter.queue().tokens_left) == (8, 11)
    meter.observe(step(("a", 9, 0)))
    assert (meter.queue().prefill_left, meter.queue().running_left) == (0, (2,))
    meter.observe(event("finished", "a", reason="stop", output_tokens=2))
    assert (meter.queue().running, meter.output_share.value) == (0, 0.75)  # of 1, before anything, and 2 of 4
    assert meter.release("a")
    assert not meter.release("a")
    assert not meter.release("nobody")


def test_what_the_prefix_cache_has_is_expected_to_be_there_for_the_next():
    meter = LoadMeter(1, 64)
    for i in range(4):
        meter.reserve(str(i), 100, 1)
    assert meter.queue().prefill_left == 400
    meter.observe(step(("0", 10, 80)))  # 80 were found, 10 are left of its own
    assert meter.prompt_share.value == pytest.approx((1 + 0.2) / 2)
    queue = meter.queue()
    assert queue.prefill_left == pytest.approx(10 + 0.6 * 300)
    assert queue.tokens_left == 10 + 1 + 3 * 101  # bounds go by what may come
    meter.observe(event("preempted", "0"))
    meter.observe(step(("0", 10, 90)))  # it has begun before, and found what it had itself
    assert meter.prompt_share.value == pytest.approx(0.6)


def test_what_was_let_in_and_never_ran_has_not_begun():
    meter = LoadMeter(1)
    meter.reserve("a", 1, 1)
    meter.reserve("b", 1, 1, n=2)
    meter.observe(event("queued", "b-1", prompt_tokens=1, priority=0, tenant=""))
    assert not meter.release("a")
    assert not meter.release("b")
    assert set(meter._waiting) == {"b-1"}  # the engine has it, and will say when it ends
    meter.observe(event("finished", "b-1", reason="abort", output_tokens=0))
    assert meter.entered == meter.left == 3


def test_memory_that_holds_fewer_makes_fewer_places_and_more_again():
    meter = LoadMeter(8, 64)
    for name in "abcd":
        meter.reserve(name, 4, 8)
    rows = [("a", 1, 4), ("b", 1, 4)]
    meter.observe(step(*rows, waiting=2, running=1))  # one of the two has just finished: both had a place
    assert (meter.queue().max_num_seqs, meter.queue().waiting) == (2, 2)
    meter.observe(step(*rows, ("c", 4, 0), waiting=1))
    assert meter.queue().max_num_seqs == 8
    meter.observe(step(("a", 60, 0), ("b", 4, 0), waiting=2))  # the budget is used up: nothing is told about memory
    assert meter.queue().max_num_seqs == 8


def test_an_interactive_request_sees_only_what_is_served_before_it():
    meter = LoadMeter(1, by_priority=True)
    for i, priority in enumerate((0, 0, 10, 100, 10)):
        meter.reserve(str(i), 10, 5, priority=priority)
    see = {p: (q.ahead, q.ahead_output, q.prefill_left) for p in (-1, 0, 10, 100) for q in [meter.queue(p)]}
    assert see == {-1: (0, 0, 0), 0: (1, 5, 20), 10: (3, 15, 40), 100: (4, 20, 50)}
    assert meter.queue(0).waiting == 4  # bounds are about everybody
    first_come = LoadMeter(1)
    first_come.reserve("0", 10, 5, priority=100)
    first_come.reserve("1", 10, 5, priority=100)
    assert first_come.queue(0).ahead == 1


def test_many_threads_lose_nothing():
    meter = LoadMeter(4, 64)

    def client(k):
        for i in range(200):
            name = f"{k}-{i}"
            meter.reserve(name, 5, 5, tenant=str(k % 2))
            meter.observe(event("queued", name, prompt_tokens=5, priority=0, tenant=str(k % 2)))
            meter.observe(step((name, 5, 0)))
            meter.queue()
            meter.observe(event("finished", name, reason="stop", output_tokens=1))
            meter.release(name)

    threads = [threading.Thread(target=client, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert meter.entered == meter.left == 1200
    assert not meter._streams


@given(seed=st.integers(0, 1000), places=st.integers(1, 6), blocks=st.integers(8, 60), budget=st.integers(4, 40))
@settings(max_examples=25, deadline=None)
def test_the_meter_agrees_with_the_engine_itself(seed, places, blocks, budget):
    """Over the real scheduler, with preemption: between two steps both count the same."""
    s = Simulation(places, budget, blocks, seed=seed)
    for _ in range(12):
        s.send(s.random.randint(1, 60), s.random.randint(1, 30))
    for _ in range(400):
        queue, core = s.meter.queue(), s.core
        assert queue.running + queue.waiting == len(core.outputs)
        assert set(s.meter._running) == {r.request_id for r in core.scheduler.running}
        left = {r.request_id: r.max_tokens - len(r.output_token_ids) for r in core.outputs}
        assert {m: q.output_left for m, q in {**s.meter._running, **s.meter._waiting}.items()} == left
        if not core.has_work:
            break
        core.step()
    assert not core.has_work
    assert core.events.faults == {}
    assert s.meter.entered == s.meter.left == 12


# What a step costs -----------------------------------------------------------------------------------------------


@given(
    costs=st.builds(StepModel, st.floats(1e-3, 0.1), st.floats(1e-6, 1e-2), st.floats(1e-5, 1e-2)),
    steps=st.lists(st.tuples(st.integers(0, 512), st.integers(0, 64)), min_size=30, max_size=80, unique=True),
)
def test_costs_are_found_again_and_predict_steps_that_were_not_seen(costs, steps):
    fit = CostFit()
    for p, d in [(0, 1)] * WARM + steps[:-10]:
        fit.observe(p, d, costs.seconds(p, d))
    found = fit.costs()
    for p, d in steps[-10:]:
        assert found.seconds(p, d) == pytest.approx(costs.seconds(p, d), rel=0.15)


def test_noise_does_not_move_them_far_and_old_steps_are_forgotten():
    import random

    draw, fit = random.Random(0), CostFit()
    for slower in (10.0, 1.0):
        for _ in range(800):
            p, d = draw.choice([0, 0, 64, 200]), draw.randint(1, 16)
            fit.observe(p, d, COSTS.seconds(p, d) * slower * draw.uniform(0.9, 1.1))
    found = fit.costs()
    for p, d in ((0, 16), (200, 8), (64, 1)):
        assert found.seconds(p, d) == pytest.approx(COSTS.seconds(p, d), rel=0.15)


def test_nothing_is_told_before_enough_was_measured():
    fit = CostFit()
    for i in range(WARM + ENOUGH):
        assert fit.costs() is None
        assert fit.rate() is None
        fit.observe(0, 1 + i % 3, 0.02 if i >= WARM else 5.0)  # the first steps compile, allocate, page in
    assert fit.costs() is not None
    assert fit.rate() == pytest.approx(2 / 0.02, rel=0.15)


def test_always_the_same_step_puts_its_cost_into_the_step():
    """One stream tells nothing about many: a guess must not make a fuller step dear."""
    fit = CostFit()
    for _ in range(50):
        fit.observe(0, 1, 0.02)
    found = fit.costs()
    assert found.w == pytest.approx(0.02)
    assert found.seconds(0, 64) == pytest.approx(0.02)


@given(steps=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 1000), st.floats(0, 100)), max_size=60))
def test_no_cost_is_ever_negative(steps):
    fit = CostFit()
    for p, d, seconds in steps:
        fit.observe(p, d, seconds)
    found = fit.costs()
    if found is not None:
        assert min(found.w, found.a, found.d) >= 0
    assert (found is None) == (len(steps) < WARM + ENOUGH or not any(s for _, _, s in steps[WARM:]))
