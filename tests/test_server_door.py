"""Quotas, streams, admission and the meter as one step: nothing slips through, and nothing is kept."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minillm.events import Event
from minillm.request import sequence_names
from minillm.server.admission import Ask, BoundedQueue, Refusal
from minillm.server.door import Door
from minillm.server.errors import ApiError
from minillm.server.meter import LoadMeter
from minillm.server.tenants import Tenant

CONTEXT, LONGEST = 1000, 10
ANYBODY = Tenant("a")


class Clock:
    now = 50.0

    def __call__(self):
        return self.now


def make(places=2, requests=4, tokens=None, admission=None, clock=None):
    meter = LoadMeter(places, 64)
    admission = admission or BoundedQueue(requests, tokens, max_model_len=CONTEXT, longest_token=LONGEST)
    return Door(admission, meter, max_model_len=CONTEXT, longest_token=LONGEST, clock=clock or Clock())


def ask(num_bytes=100, max_tokens=20, **options):
    return Ask(num_bytes, max_tokens=max_tokens, tenant="a", **options)


def refused(door, *arguments):
    with pytest.raises(ApiError) as caught, door.enter(*arguments):
        pass
    return caught.value


def ran(door, name, tokens=1):
    """The engine says that it has computed something."""
    door.meter.observe(Event(0, 0.0, "queued", name, {"prompt_tokens": 5, "priority": 0, "tenant": "a"}))
    door.meter.observe(Event(0, 0.0, "step", "", {"rows": [(name, 5, 0)], "waiting": 0, "running": 1, "seconds": 0.01}))
    door.meter.observe(Event(0, 0.0, "finished", name, {"reason": "stop", "output_tokens": tokens}))


def test_a_request_is_inside_from_the_door_to_the_end_of_the_block():
    door = make()
    with door.enter("r", ANYBODY, ask(n=2)) as ticket:
        assert (door.meter.streams("a"), door.meter.queue().tokens_left) == (2, 2 * (10 + 20))
        ticket.confirm(17)
        assert door.meter.queue().tokens_left == 2 * (17 + 20)
    assert (door.meter.streams("a"), door.meter.queue().tokens_left) == (0, 0)


@pytest.mark.parametrize("error", [KeyError, ApiError, KeyboardInterrupt])
def test_a_request_that_fails_has_left(error):
    door = make()
    with pytest.raises(error), door.enter("r", ANYBODY, ask()):
        raise error(500, "x") if error is ApiError else error("x")
    assert door.meter.entered == door.meter.left == 1
    with door.enter("r", ANYBODY, ask()):  # the id is free again
        pass


def test_a_thousand_at_once_do_not_all_pass_the_bound():
    door, inside, codes = make(places=2, requests=4), [], []
    start, stop = threading.Barrier(50), threading.Event()

    def client(k):
        start.wait()
        with contextlib.ExitStack() as held:
            for i in range(20):
                try:
                    inside.append(held.enter_context(door.enter(f"{k}-{i}", ANYBODY, ask())))
                except ApiError as error:
                    codes.append((error.status, error.code))
            stop.wait(600)

    threads = [threading.Thread(target=client, args=(k,)) for k in range(50)]
    for t in threads:
        t.start()
    try:
        end = time.monotonic() + 300
        while len(inside) + len(codes) < 1000 and time.monotonic() < end:
            time.sleep(0.005)
    finally:
        stop.set()
    for t in threads:
        t.join()
    assert len(inside) == 6  # two run, four wait
    assert set(codes) == {(429, "queue_full")}
    assert (door.meter.entered, door.meter.left) == (6, 6)


def test_the_exact_number_is_judged_again_and_without_itself():
    door = make(places=1, requests=1, tokens=100)
    with door.enter("runs", ANYBODY, ask()), door.enter("waits", ANYBODY, ask()) as ticket:
        ticket.confirm(80)  # 80 + 20 wait, and itself is not counted twice
        with pytest.raises(ApiError) as caught:
            ticket.confirm(81)
        assert caught.value.code == "queue_tokens_full"
        with pytest.raises(ApiError) as caught:
            ticket.confirm(CONTEXT)
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert door.meter.entered == door.meter.left == 2


def test_a_prompt_that_is_too_long_names_its_field():
    door = make()
    long = ask(num_bytes=CONTEXT * LONGEST + 1)
    assert refused(door, "r", ANYBODY, long).param == "prompt"
    assert refused(door, "r", ANYBODY, long, "messages").param == "messages"
    assert door.meter.entered == 0


def test_an_id_under_way_is_409_and_costs_nothing():
    door, tenant = make(), Tenant("a", requests_per_minute=10, tokens_per_minute=1000)
    with door.enter("r", tenant, ask()):
        error = refused(door, "r", tenant, ask())
        assert (error.status, error.code) == (409, "request_id_in_use")
        assert door._quota(tenant).level("requests") == pytest.approx(9)
        assert door._quota(tenant).level("tokens") == pytest.approx(1000 - 30)


def test_streams_of_a_tenant_are_bounded_and_of_another_not():
    door, tenant = make(places=10), Tenant("a", max_streams=3)
    with door.enter("r", tenant, ask(n=2)):
        error = refused(door, "s", tenant, ask(n=2))
        assert (error.status, error.code) == (429, "too_many_streams")
        assert "2 streams under way, this request would add 2, and it may have 3" in error.message
        assert int(error.headers()["Retry-After"]) >= 1
        with door.enter("t", tenant, ask()), door.enter("u", Tenant("b"), Ask(9, n=5, tenant="b")):
            assert refused(door, "v", tenant, ask()).code == "too_many_streams"
    never = refused(door, "r", tenant, ask(n=4))
    assert (never.status, never.param) == (400, "n")


def test_a_key_with_too_many_streams_is_told_when_its_own_will_have_ended():
    """A step takes 0.1 s whatever is in it. Somebody else's long answer and an empty queue have no part in it."""
    door, tenant = make(places=10), Tenant("a", max_streams=3)
    with contextlib.ExitStack() as held:
        for name, left, who in (("x", 100, tenant), ("y", 300, tenant), ("z", 500, tenant), ("o", 5, Tenant("b"))):
            ask_for = Ask(10, prompt_tokens=1, max_tokens=left + 20, tenant=who.name)
            held.enter_context(door.enter(name, who, ask_for)).confirm(1)
        for k in range(20):
            rows = [(name, 1, k) for name in "xyzo"]
            data = {"rows": rows, "waiting": 0, "running": 4, "seconds": 0.1}
            door.meter.observe(Event(0, 0.0, "step", "", data))
        assert refused(door, "r", tenant, ask()).retry_after_s == pytest.approx(10, rel=0.05)
        assert refused(door, "r", tenant, ask(n=2)).retry_after_s == pytest.approx(30, rel=0.05)
        assert refused(door, "r", tenant, ask(n=3)).retry_after_s == pytest.approx(50, rel=0.05)


def test_a_token_quota_reserves_what_may_come_and_gives_back_what_did_not():
    door, tenant = make(), Tenant("a", tokens_per_minute=600)
    level = lambda: door._quota(tenant).level("tokens")
    with door.enter("r", tenant, ask(num_bytes=1000, max_tokens=100, n=2)) as ticket:
        assert level() == pytest.approx(600 - 300)  # at least 100 in the prompt, and 2 x 100
        ticket.confirm(150)
        assert level() == pytest.approx(600 - 350)
        ran(door, "r-0", 10)
        ran(door, "r-1", 20)
    assert level() == pytest.approx(600 - 180)  # the prompt and what was generated


def test_the_retry_after_of_a_rate_is_exact():
    clock = Clock()
    door, tenant = make(places=9, clock=clock), Tenant("a", requests_per_minute=60, tokens_per_minute=600)
    with door.enter("r", tenant, ask(max_tokens=570)) as ticket:
        ticket.confirm(10)
        ran(door, "r", 570)
        error = refused(door, "s", tenant, ask(max_tokens=40))  # 50 wanted, 20 left, 10 come each second
        assert (error.status, error.code, error.retry_after_s) == (429, "rate_limit_tokens", pytest.approx(3))
        assert "600 tokens a minute; 20 are left, and this request needs 50; try again in 3.0 s" in error.message
        clock.now += error.retry_after_s - 0.01
        assert refused(door, "s", tenant, ask(max_tokens=40)).retry_after_s == pytest.approx(0.01)
        clock.now += 0.01
        with door.enter("s", tenant, ask(max_tokens=40)):
            pass


def test_a_rate_of_requests():
    clock = Clock()
    door, tenant = make(clock=clock), Tenant("a", requests_per_minute=2)
    for name in ("r", "s"):
        with door.enter(name, tenant, ask()):
            ran(door, name)
    error = refused(door, "t", tenant, ask())
    assert (error.code, error.retry_after_s) == ("rate_limit_requests", pytest.approx(30))
    assert "2 requests a minute" in error.message


def test_what_can_never_pass_a_quota_is_400_and_says_so():
    door, tenant = make(), Tenant("a", tokens_per_minute=100)
    error = refused(door, "r", tenant, ask(max_tokens=91))
    assert (error.status, error.param, error.retry_after_s) == (400, "max_tokens", None)
    assert "it can never pass" in error.message
    with door.enter("r", tenant, ask(max_tokens=90)) as ticket, pytest.raises(ApiError) as caught:
        ticket.confirm(11)  # more than a full bucket, though only one token more than it holds
    assert caught.value.status == 400


def test_what_never_ran_costs_nothing():
    door, tenant = make(), Tenant("a", requests_per_minute=5, tokens_per_minute=500)
    levels = lambda: (door._quota(tenant).level("requests"), door._quota(tenant).level("tokens"))
    with pytest.raises(ApiError), door.enter("r", tenant, ask()) as ticket:
        ticket.confirm(CONTEXT)
    assert levels() == (5, 500)
    with door.enter("r", tenant, ask()) as ticket:  # cancelled while it waited
        ticket.confirm(10)
    assert levels() == (5, 500)
    with door.enter("r", tenant, ask()) as ticket:  # cancelled while its prompt was computed
        ticket.confirm(10)
        ran(door, "r", 0)
    assert levels() == (4, 490)


def test_a_request_of_several_prompts_is_judged_once_and_costs_one_request():
    door, tenant = make(places=2, requests=4), Tenant("a", requests_per_minute=5, tokens_per_minute=1000)
    level = lambda which: door._quota(tenant).level(which)
    with door.enter("r", tenant, [ask(100 * i, n=2) for i in (1, 2, 3)]) as ticket:  # six: alone they are not refused
        assert ticket.names == ["r", "r.1", "r.2"]
        assert (door.meter.streams("a"), door.meter.queue().tokens_left) == (6, 2 * (10 + 20 + 30) + 6 * 20)
        assert level("requests") == pytest.approx(4)
        assert level("tokens") == pytest.approx(1000 - (60 + 6 * 20))
        ticket.confirm(11, 21, 31)
        assert door.meter.queue().tokens_left == 2 * (11 + 21 + 31) + 6 * 20
        assert level("tokens") == pytest.approx(1000 - (63 + 6 * 20))
        assert refused(door, "s", tenant, ask()).code == "queue_full"
    assert (door.meter.streams("a"), level("requests"), level("tokens")) == (0, 5, 1000)


def test_several_prompts_wait_together_or_not_at_all():
    door = make(places=1, requests=4)
    with door.enter("runs", ANYBODY, ask()):
        error = refused(door, "r", ANYBODY, [ask()] * 5)
        assert (error.status, error.code) == (429, "queue_full")
        assert "this request would add 5" in error.message
        with door.enter("r", ANYBODY, [ask()] * 4):
            pass
    assert door.meter.entered == door.meter.left == 5


def test_the_mean_prompt_waits_and_the_longest_must_fit():
    door = make(places=1, requests=9, tokens=400)
    with door.enter("runs", ANYBODY, ask()), door.enter("r", ANYBODY, [ask(2000)] + [ask(0)] * 4) as ticket:
        assert door.meter.queue().waiting_tokens == 200 + 5 * 20  # and not five times the longest
        with pytest.raises(ApiError) as caught:
            ticket.confirm(CONTEXT, 1, 1, 1, 1)  # though the mean would fit
        assert (caught.value.status, caught.value.param) == (400, "prompt")
    error = refused(door, "s", ANYBODY, [ask(CONTEXT * LONGEST), ask(0)])
    assert (error.status, error.code) == (400, "context_length_exceeded")


def test_more_sequences_than_can_ever_be_inside_are_400():
    door, tenant = make(places=2, requests=4), Tenant("a", max_streams=3)
    door.max_sequences = 6
    error = refused(door, "r", ANYBODY, [ask()] * 7)
    assert (error.status, error.param, error.retry_after_s) == (400, "prompt", None)
    assert "7 prompts ask for 7 sequences, and this server takes 6 at once" in error.message
    error = refused(door, "r", tenant, [ask(n=2)] * 2)
    assert (error.status, error.param) == (400, "prompt")
    assert "this key may have 3" in error.message
    with door.enter("r", ANYBODY, [ask()] * 6):
        pass
    with door.enter("r", ANYBODY, ask(n=7)):  # completions of one prompt are as many as the protocol takes
        pass


def test_an_id_under_way_leaves_nothing_of_the_other_prompts():
    door = make(places=9)
    with door.enter("r.1", ANYBODY, ask()):
        assert refused(door, "r", ANYBODY, [ask(), ask()]).status == 409
        assert door.meter.streams("a") == 1


def test_what_was_computed_is_paid_and_not_what_was_read():
    door, tenant = make(), Tenant("a", tokens_per_minute=600)
    step = lambda new, before: Event(
        0, 0.0, "step", "", {"rows": [("r", new, before)], "waiting": 0, "running": 1, "seconds": 0.01}
    )
    with contextlib.suppress(ConnectionError), door.enter("r", tenant, ask(max_tokens=100)) as ticket:
        ticket.confirm(10)
        door.meter.observe(step(10, 0))
        for k in range(7):
            door.meter.observe(step(1, 10 + k))
        raise ConnectionError("nobody reads it")
    assert door._quota(tenant).level("tokens") == pytest.approx(600 - (10 + 8))


class Learner:
    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def admit(self, ask, queue):
        self.asked.append((ask, queue))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_learners_admission_is_asked_twice_and_judged():
    learner = Learner(None)
    door = make(admission=learner)
    with door.enter("r", ANYBODY, ask(deadline_s=5.0)) as ticket:
        ticket.confirm(12)
    assert [a.prompt_tokens for a, _ in learner.asked] == [None, 12]
    assert [q.running + q.waiting for _, q in learner.asked] == [0, 0]
    learner.answer = Refusal(418, "a teapot", "teapot", 7.2)
    error = refused(door, "r", ANYBODY, ask())
    assert (error.status, error.code, error.headers()) == (418, "teapot", {"Retry-After": "8"})
    for answer, words in ((ValueError("oops"), "it raised ValueError: oops"), (0, "got 0")):
        learner.answer = answer
        error = refused(door, "r", ANYBODY, ask())
        assert (error.status, error.code) == (500, "admission_failed")
        assert words in error.message
    assert door.meter.entered == door.meter.left == 1


class Inside(RuleBasedStateMachine):
    """Requests enter, are confirmed, run and leave in any order: quotas and counts come out even."""

    def __init__(self):
        super().__init__()
        self.clock, self.number = Clock(), 0
        self.clock.now = 0.0
        self.door = make(places=3, requests=3, tokens=400, clock=self.clock)
        self.tenant = Tenant("a", requests_per_minute=20, tokens_per_minute=900, max_streams=5)
        self.inside: list = []
        self.used = 0

    @rule(size=st.integers(0, 4000), most=st.none() | st.integers(1, 300), n=st.integers(1, 4))
    def enter(self, size, most, n):
        self.number += 1
        block, refusal = self.door.enter(f"r{self.number}", self.tenant, ask(size, most, n=n)), None
        try:
            self.inside.append((block, block.__enter__()))
        except ApiError as error:
            refusal = error
        if refusal is not None:
            assert refusal.status in (400, 429)
            assert (refusal.retry_after_s is None) == (refusal.status == 400)

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), tokens=st.integers(1, 1100))
    def confirm(self, data, tokens):
        block, ticket = data.draw(st.sampled_from(self.inside))
        try:
            ticket.confirm(tokens)
        except ApiError as error:
            self.inside.remove((block, ticket))
            block.__exit__(ApiError, error, None)

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), share=st.floats(0, 1))
    def leave(self, data, share):
        block, ticket = data.draw(st.sampled_from(self.inside))
        self.inside.remove((block, ticket))
        ask = ticket.asks[0]
        tokens = int(max(0, ticket.charged - (ask.prompt_tokens or 0)) * share)
        if tokens:
            names = sequence_names(ticket.names[0], ask.n)
            for i, name in enumerate(names):
                ran(self.door, name, tokens // ask.n + (i < tokens % ask.n))
            self.used += tokens + (ask.prompt_tokens or 0)
        block.__exit__(None, None, None)

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds):
        self.clock.now += seconds

    @invariant()
    def even(self):
        meter, quota = self.door.meter, self.door._quota(self.tenant)
        streams = sum(ticket.sequences for _, ticket in self.inside)
        assert meter.streams("a") == streams == meter.entered - meter.left <= 5
        assert meter.queue().waiting <= 3
        held = sum(ticket.charged for _, ticket in self.inside)
        assert held + self.used <= 900 * (1 + self.clock.now / 60) + 1e-3
        assert 0 <= quota.level("tokens") <= 900
        assert quota.level("tokens") <= 900 - held + 900 * self.clock.now / 60 + 1e-3

    def teardown(self):
        for block, _ in self.inside:
            block.__exit__(None, None, None)
        self.clock.now += 120
        quota, meter = self.door._quota(self.tenant), self.door.meter
        assert (quota.level("tokens"), quota.level("requests")) == (900, 20)
        assert meter.entered == meter.left
        assert not meter._requests


TestInside = Inside.TestCase
TestInside.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
