"""Who is let in, what a refusal says, and whether the wait that it tells is what happens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from queue_simulation import COSTS, Simulation

from minillm.server.admission import (
    MOST_RETRY_S,
    RETRY_S,
    Ask,
    BoundedQueue,
    Queue,
    Refusal,
    judged_admit,
    predicted_wait,
    sizes,
)

IDLE = Queue(max_num_seqs=4, costs=COSTS)
FULL = Queue(
    waiting=3, waiting_tokens=300, running=4, max_num_seqs=4, tokens_left=700, drain_rate=100.0,
    running_left=(40.0, 50.0, 60.0, 70.0), decoding=4, ahead=3, ahead_output=150.0, prefill_left=150, costs=COSTS,
)  # fmt: skip


def door(requests=8, tokens=None, context=1000, longest=10, **options):
    return BoundedQueue(requests, tokens, max_model_len=context, longest_token=longest, **options)


def ask(prompt=50, max_tokens=50, **options):
    return Ask(prompt_tokens=prompt, max_tokens=max_tokens, **options)


# Bounds ----------------------------------------------------------------------------------------------------------


def test_what_the_bytes_prove_is_refused_before_tokenisation():
    refusal = door().admit(Ask(prompt_bytes=10_001), IDLE)
    assert (refusal.status, refusal.code, refusal.param) == (400, "context_length_exceeded", "prompt")
    assert refusal.retry_after_s is None
    assert "the prompt (10001 bytes) has at least 1001 tokens; the context is 1000, so at most 999" in refusal.message
    assert door().admit(Ask(prompt_bytes=9990), IDLE) is None  # 999 tokens would fit: only the tokenizer can tell
    assert door(longest=None).admit(Ask(prompt_bytes=10**9), IDLE) is None


@pytest.mark.parametrize(("prompt", "fits"), [(1, True), (999, True), (1000, False), (10**9, False)])
def test_exact_numbers_are_judged_as_the_engine_judges_them(prompt, fits):
    refusal = door().admit(ask(prompt), IDLE)
    assert (refusal is None) == fits
    assert fits or refusal.code == "context_length_exceeded"


def test_a_full_queue_says_what_was_asked_what_the_bound_is_and_when_to_come_back():
    refusal = door(requests=4).admit(ask(n=2), FULL)
    wait = predicted_wait(FULL, 2, 50)
    assert (refusal.status, refusal.code, refusal.retry_after_s) == (429, "queue_full", wait)
    assert "3 sequences wait, this request would add 2, and at most 4 may wait" in refusal.message
    assert f"try again in {math.ceil(wait)} s" in refusal.message
    assert door(requests=5).admit(ask(n=2), FULL) is None


def test_a_queue_full_of_tokens():
    refusal = door(tokens=399).admit(ask(), FULL)
    assert (refusal.status, refusal.code) == (429, "queue_tokens_full")
    assert (
        "hold 300 tokens, this request would add 100 (prompt and max_tokens of 1), and at most 399" in refusal.message
    )
    assert door(tokens=400).admit(ask(), FULL) is None
    early = door(tokens=399).admit(Ask(prompt_bytes=500, max_tokens=50), FULL)
    assert early.code == "queue_tokens_full"
    assert "at least 100" in early.message
    assert door(tokens=400).admit(Ask(prompt_bytes=500, max_tokens=50), FULL) is None


@given(
    running=st.integers(0, 8), waiting=st.integers(0, 50), n=st.integers(1, 20), bound=st.integers(0, 20),
    tokens=st.none() | st.integers(0, 10**6), each=st.integers(1, 900),
)  # fmt: skip
def test_the_bounds_hold_and_refuse_nobody_who_would_run_at_once(running, waiting, n, bound, tokens, each):
    waiting = waiting if running == 8 else 0  # a snapshot: nobody waits while there is a place
    queue = Queue(waiting, waiting * 100, running, 8)
    refusal = door(bound, tokens).admit(ask(each, 100, n=n), queue)
    waits = max(0, n - (8 - running))
    if not waits or running == 0:
        assert refusal is None
    elif refusal is None:
        assert waiting + waits <= bound
        assert tokens is None or waiting * 100 + waits * (each + 100) <= tokens
    else:
        assert refusal.status == 429
        assert refusal.retry_after_s == RETRY_S  # nothing was measured
        assert waiting + waits > bound or waiting * 100 + waits * (each + 100) > tokens


def test_an_idle_server_admits_whatever_fits_the_context():
    """Else a request above the bound would be told to come back for ever."""
    giant = ask(900, 99, n=64)
    assert door(0, 10).admit(giant, IDLE) is None
    assert door(0, 10).admit(giant, replace(IDLE, running=1, running_left=(5.0,))).code == "queue_full"


def test_max_tokens_is_cut_as_the_engine_cuts_it():
    assert sizes(ask(900, 500), 1000) == (900, 100)
    assert sizes(ask(900, None), 1000) == (900, 100)
    assert sizes(Ask(prompt_bytes=101, max_tokens=None), 1000, 10) == (11, 989)
    assert sizes(ask(2000, 5), 1000) == (2000, 0)


# Deadlines -------------------------------------------------------------------------------------------------------


def test_what_would_begin_too_late_is_told_at_once_and_only_if_that_is_sure():
    wait = predicted_wait(FULL, 1, 50)
    judge = door(requests=100, sure=2.0)
    assert judge.admit(ask(deadline_s=wait), FULL) is None
    assert judge.admit(ask(deadline_s=wait / 1.99), FULL) is None
    refusal = judge.admit(ask(deadline_s=wait / 2.01), FULL)
    assert (refusal.status, refusal.code, refusal.param) == (429, "deadline_too_short", "deadline_s")
    assert refusal.retry_after_s == pytest.approx(wait - wait / 2.01)
    assert judge.admit(ask(deadline_s=0.001), replace(FULL, costs=None)) is None  # nothing measured, nothing sure
    assert judge.admit(ask(deadline_s=0.001), IDLE) is None
    long_prompt_ahead = replace(IDLE, running=1, running_left=(5.0,), prefill_left=50_000)  # a place, and no budget
    assert judge.admit(ask(deadline_s=1.0), long_prompt_ahead).code == "deadline_too_short"


def test_nobody_is_sent_away_for_hours_or_for_no_time():
    far = replace(FULL, ahead=10**6, ahead_output=1e9)
    assert door(0).admit(ask(), far).retry_after_s == MOST_RETRY_S
    near = replace(FULL, running_left=(0.0,) * 4, ahead=0, ahead_output=0.0, prefill_left=0)
    assert door(0).admit(ask(), near).retry_after_s == 1.0


# The predicted wait ----------------------------------------------------------------------------------------------


def test_waits_that_can_be_told_by_hand():
    assert predicted_wait(replace(FULL, costs=None)) is None
    assert predicted_wait(IDLE) == 0.0
    step = COSTS.seconds(0, 4)
    alone = replace(FULL, ahead=0, ahead_output=0.0, prefill_left=0)
    assert predicted_wait(alone) == pytest.approx(40 * step)  # the first of the four places
    assert predicted_wait(alone, n=2, output=100) == pytest.approx(50 * step)
    three = replace(alone, ahead=3, ahead_output=300.0)
    assert predicted_wait(three) == pytest.approx(70 * step)  # three take the first three
    assert predicted_wait(replace(three, prefill_left=100)) == pytest.approx(70 * step + 100 * COSTS.a)


@given(ahead=st.integers(0, 3000), n=st.integers(1, 200), left=st.lists(st.floats(0, 500), min_size=1, max_size=16))
@example(ahead=54, n=1, left=[0.0] * 5 + [1.0] * 4 + [301.0] * 2)
def test_a_longer_queue_is_a_longer_wait_and_shortcuts_change_nothing(ahead, n, left):
    """Equal requests are not walked through; here they are."""
    import heapq

    mean, output = 100.0, 30.0
    queue = Queue(
        ahead, 0, len(left), len(left), running_left=tuple(left), ahead=ahead, ahead_output=ahead * mean, costs=COSTS
    )
    free = list(left)
    heapq.heapify(free)
    for length in [mean] * ahead + [output] * (n - 1):
        heapq.heapreplace(free, free[0] + length)
    exact = free[0] * COSTS.seconds(0, len(left))
    told = predicted_wait(queue, n, output)
    assert told <= predicted_wait(replace(queue, ahead=ahead + 1, ahead_output=(ahead + 1) * mean), n, output) + 1e-6
    assert told == pytest.approx(exact, rel=1e-9, abs=1e-9)


def traffic(kind, seed, predict=predicted_wait, learn=12, **options):
    """Requests of 5 to 80 prompt tokens and 5 to 60 new ones, after some from which the meter learns."""
    s = Simulation(seed=seed, predict=predict, **options)
    for _ in range(learn):
        s.send(20, 20)
    s.run()
    s.probes.clear()
    for _ in range(60 if kind == "burst" else 120):
        if kind == "poisson":
            s.run(until=s.now + s.random.expovariate(9.0))
        s.send(s.random.randint(5, 80), s.random.randint(5, 60))
    s.run()
    assert s.core.events.faults == {}
    return s.results()


SLACK_S = 0.2  # a few steps: no queue is told to the step


def worst(probes):
    """The largest factor between a wait and what was predicted, and how many waited for a while."""
    factors = [(p.told + SLACK_S) / (p.waited + SLACK_S) for p in probes if p.told is not None]
    return max(max(f, 1 / f) for f in factors), sum(p.waited > 1 for p in probes)


@pytest.mark.parametrize("kind", ["burst", "poisson"])
@pytest.mark.parametrize("places", [2, 8, 32])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_wait_that_is_told_is_the_wait_within_a_factor_of_two(kind, places, seed):
    """Answers of known length. The real scheduler over a virtual clock, with chunked prefill."""
    factor, waited = worst(traffic(kind, seed, places=places))
    assert factor < 2.0
    assert waited > 15 or (kind, places) == ("poisson", 32)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("options", [{"real": 0.3}, {"real": 0.3, "places": 2}, {"blocks": 40, "places": 32}])
def test_answers_that_stop_early_and_memory_that_holds_fewer_are_within_a_factor_of_three(options, seed):
    """Of those that found others waiting: while nobody waits, memory that is nearly full is not seen."""
    probes = [p for p in traffic("burst", seed, **options) if p.waiting or "blocks" not in options]
    assert worst(probes)[0] < 3.0
    assert worst(probes)[1] > 5


@pytest.mark.parametrize("seed", [0, 1])
def test_prompts_that_the_prefix_cache_has_are_no_work_ahead(seed):
    """320 tokens of each prompt are in the cache. Who counts them all is far off."""
    assert worst(traffic("burst", seed, learn=60, prefix=320, places=4))[0] < 2.0

    def counts_all(queue, n, output):
        return predicted_wait(replace(queue, prefill_left=float(queue.ahead * 360)), n, output)

    assert worst(traffic("burst", seed, counts_all, learn=60, prefix=320, places=4))[0] > 2.0


@pytest.mark.parametrize("seed", [0, 1])
def test_by_priority_those_in_front_wait_as_told(seed):
    s = Simulation(by_priority=True, seed=seed)
    for _ in range(12):
        s.send(20, 20)
    s.run()
    s.probes.clear()
    for i in range(90):
        s.run(until=s.now + s.random.expovariate(9.0))
        s.send(s.random.randint(5, 80), s.random.randint(5, 60), priority=(0, 10, 10)[i % 3])
    s.run()
    first = [p for (r, *_), p in zip(s.probes, s.results(), strict=True) if r.priority == 0]
    assert worst(first)[0] < 2.0
    blind = [(p.told, replace_all(q)) for (r, _, q, _), p in zip(s.probes, s.results()) if r.priority == 0]
    assert max(b / max(t, SLACK_S) for t, b in blind) > 2.0  # who counts everybody as ahead is far off


def replace_all(queue):
    return predicted_wait(replace(queue, ahead=queue.waiting, ahead_output=30.0 * queue.waiting)) or 0.0


def come_back(seed, patience):
    """40 requests; each that is refused comes back after `patience` times the wait that it was told, alone."""
    s, judge, let_in = Simulation(seed=seed), door(requests=6, tokens=400), []
    for _ in range(12):
        s.send(20, 20)
    s.run()
    for _ in range(40):
        prompt, new = s.random.randint(5, 80), s.random.randint(5, 60)
        refusal = judge.admit(ask(prompt, new), s.meter.queue())
        if refusal is not None:
            s.run(until=s.now + patience * refusal.retry_after_s)
            let_in.append(judge.admit(ask(prompt, new), s.meter.queue()) is None)
        s.send(prompt, new)
    return let_in


@pytest.mark.parametrize("seed", range(4))
def test_whoever_comes_back_when_told_is_let_in(seed):
    let_in = come_back(seed, 1.0)
    assert len(let_in) > 3
    assert all(let_in)
    assert not all(come_back(seed, 0.1))  # a tenth of the wait is not enough


def forgets_those_that_run(queue, n, output):
    return predicted_wait(replace(queue, running_left=(0.0,) * queue.running), n, output)


def forgets_those_that_wait(queue, n, output):
    return predicted_wait(replace(queue, ahead=0, ahead_output=0.0), n, output)


def forgets_prompts(queue, n, output):
    return predicted_wait(replace(queue, prefill_left=0), n, output)


def one_after_the_other(queue, n, output):
    """Tokens to compute over the speed of one stream."""
    wait = predicted_wait(queue, n, output)
    return None if wait is None else queue.tokens_left * COSTS.seconds(0, 1)


def a_token_costs_what_it_costs_alone(queue, n, output):
    wait = predicted_wait(queue, n, output)
    return None if wait is None else wait * queue.running


@pytest.mark.parametrize(
    "mutant",
    [
        forgets_those_that_run,
        forgets_those_that_wait,
        forgets_prompts,
        one_after_the_other,
        a_token_costs_what_it_costs_alone,
    ],
)
def test_a_wrong_prediction_is_outside_of_the_factor(mutant):
    factors = [worst(traffic("burst", 0, mutant, places=places))[0] for places in (2, 8, 32)]
    assert max(factors) > 2.0


def test_tokens_left_over_the_drain_rate_is_a_fair_first_guess():
    """What the exercise begins with: right in its order of magnitude for those at the end of a long queue."""
    probes = traffic("burst", 0, lambda q, n, out: q.drain_rate and q.tokens_left / q.drain_rate)
    late = [p for p in probes if p.waited > 2]
    assert late
    assert worst(late)[0] < 3.0


# A learner's admission -------------------------------------------------------------------------------------------


class Answers:
    def __init__(self, answer):
        self.answer = answer

    def admit(self, ask, queue):
        if isinstance(self.answer, type) and issubclass(self.answer, Exception):
            raise self.answer("no such thing")
        return self.answer


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no")


def test_a_good_answer_is_passed_on():
    refusal = Refusal(429, "later", "mine", 2, "n")
    assert judged_admit(Answers(refusal), ask(), FULL) is refusal
    assert judged_admit(Answers(None), ask(), FULL) is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ZeroDivisionError, "it raised ZeroDivisionError: no such thing"),
        (RecursionError, "it raised RecursionError"),
        (False, "must return None or a Refusal, got False"),
        (True, "got True"),
        ("no", "got 'no'"),
        (Unprintable(), "got a Unprintable"),
        (Refusal(200, "fine"), "status must be from 400 to 599, got 200"),
        (Refusal(True, "x"), "status"),
        (Refusal("429", "x"), "status"),
        (Refusal(429, ""), "message must say why"),
        (Refusal(429, None), "message must say why"),
        (Refusal(429, "x", 3), "code must be text or None, got 3"),
        (Refusal(429, "x", param=[]), "param must be text or None"),
        (Refusal(429, "x", retry_after_s=-1), "retry_after_s must be seconds, 0 or more, got -1"),
        (Refusal(429, "x", retry_after_s=math.nan), "got nan"),
        (Refusal(429, "x", retry_after_s=math.inf), "got inf"),
        (Refusal(429, "x", retry_after_s=10**400), "retry_after_s must be seconds"),
        (Refusal(429, "x", retry_after_s="5"), "got '5'"),
        (Refusal(429, "x", retry_after_s=True), "got True"),
    ],
)
def test_a_bad_answer_is_500_and_names_the_part(answer, words):
    refusal = judged_admit(Answers(answer), ask(), FULL)
    assert (refusal.status, refusal.code) == (500, "admission_failed")
    assert refusal.message.startswith("parts: the admission failed")
    assert words in refusal.message


def test_an_object_without_admit_is_a_bad_answer_too():
    assert "AttributeError" in judged_admit(object(), ask(), FULL).message


@given(
    st.builds(
        Ask, st.integers(0, 10**9), st.none() | st.integers(0, 10**6), st.none() | st.integers(1, 10**6),
        st.integers(1, 128),
    ), st.integers(0, 10**5), st.integers(0, 300), st.integers(1, 300),
)  # fmt: skip
@settings(max_examples=200)
def test_the_default_gives_a_good_answer_whatever_it_is_asked(asked, waiting, running, places):
    queue = Queue(waiting, waiting * 7, running, places, running_left=(3.0,) * running, ahead=waiting, costs=COSTS)
    for judge in (door(0, 0), door(10, 10**6, longest=None)):
        first, again = judged_admit(judge, asked, queue), judged_admit(judge, asked, queue)
        assert first == again  # pure
        assert first is None or first.status in (400, 429)
