"""Each cause of a collapse without an error has a log of its own here, made by hand, and is told from the others."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import MinillmError
from minillm.events import Event
from minillm.pressure import (
    COPIES,
    FRAGMENTATION,
    HEALTHY,
    JITTER,
    LEAST,
    STORM,
    memory,
    recomputed,
    signature,
)
from minillm.scheduler import Limits

TOTAL, BS = 100, 16


def step(n, rows, live, waiting=0, seconds=0.010, scheduling=0.0001):
    return Event(n, n * 0.01, "step", "", {
        "rows": rows, "waiting": waiting, "running": len(rows), "free": TOTAL - live, "cached": 0, "live": live,
        "seconds": seconds, "schedule_seconds": scheduling,
    })  # fmt: skip


def decoding(n=30, requests=10, start=135, live=100, waiting=5, slow=lambda i: 0.010, extra=lambda i: ()):
    """Requests that get a token a step; `extra(i)` are events before step i."""
    log = []
    for i in range(n):
        log += [Event(i, i * 0.01, *rest) for rest in extra(i)]
        log.append(step(i, [(str(r), 1, start + i) for r in range(requests)], live, waiting, slow(i)))
    return log


def healthy():
    return decoding()


def storm():
    """Every third step the last request loses its tokens, and the next step computes them again."""
    log = []
    for i in range(30):
        rows = [(str(r), 1, 135 + i) for r in range(10)]
        if i % 3 == 0:
            log.append(Event(i, i * 0.01, "preempted", "last", {"how": "recompute", "computed": 90, "blocks": 6}))
        if i % 3 == 1:
            rows.append(("last", 90, 0))
        log.append(step(i, rows, 98, 3))
    return log


def reserved():
    """Rows promised to their end: a third of the memory is handed out, the rest is free and belongs to somebody."""
    return decoding(requests=3, live=30)


def internal():
    """Everything is held, and little of it is written: rows for the longest text."""
    return decoding(requests=10, start=20)


def copies():
    swap = ("preempted", "1", {"how": "swap", "computed": 140, "blocks": 9})
    back = ("hit", "1", {"tokens": 140, "source": "host"})
    log = decoding(extra=lambda i: (swap,) if i % 4 == 1 else (back,) if i % 4 == 3 else ())
    for e in log:
        if e.kind == "step" and e.step % 2:
            e.data.update(seconds=0.025, schedule_seconds=0.015)
    return log


def jitter():
    return decoding(slow=lambda i: 0.040 if i % 7 == 3 else 0.010)


KINDS = {
    "healthy": (healthy, HEALTHY), "storm": (storm, STORM), "reserved": (reserved, FRAGMENTATION),
    "internal": (internal, FRAGMENTATION), "copies": (copies, COPIES), "jitter": (jitter, JITTER),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_told_from_the_others(name):
    make, kind = KINDS[name]
    found = signature(make(), BS)
    assert found.kind == kind, found
    others = [share for cause, share in found.lost.items() if cause != kind]
    assert all(share < LEAST for share in others), found.lost
    assert set(found.lost) == {STORM, FRAGMENTATION, COPIES, JITTER}


def test_storm_and_fragmentation_differ_in_named_evidence():
    wind, holes = signature(storm(), BS).evidence, signature(reserved(), BS).evidence
    assert wind["preemptions per finished request"] > 1 > holes["preemptions per finished request"]
    assert wind["tokens computed again"] > 0 == holes["tokens computed again"]
    assert wind["memory free"] < 0.05 < 0.6 < holes["memory free"]
    assert signature(internal(), BS).evidence["memory free"] == 0


@pytest.mark.parametrize(("how", "copied", "moves"), [("swap", 0, False), ("swap", 9, True), ("recompute", 2, True)])
def test_a_step_moved_blocks_if_any_were_copied(how, copied, moves):
    """A swap of what the tier has already copies nothing; and one that kept nothing has copied all the same."""
    data = {"how": how, "computed": 140, "blocks": 9, "copied": copied}
    log = decoding(extra=lambda i: (("preempted", "1", data),) if i == 7 else ())
    assert signature(log, BS).evidence["steps that moved blocks"] == moves


def test_an_id_that_is_used_again_is_another_request():
    """An engine's names are its caller's: the second "a" has computed nothing yet, and holds what it computes."""
    queued = Event(0, 0.0, "queued", "a", {"prompt_tokens": 32, "priority": 0, "tenant": ""})
    done = Event(0, 0.0, "finished", "a", {"reason": "length", "output_tokens": 1})
    life = [queued, step(0, [("a", 32, 0)], 2), done, step(1, [], 0)]
    twice = life + life
    assert recomputed(twice) == (0, 64)
    assert [m.tokens for m in memory(twice)] == [32, 0, 32, 0]
    assert recomputed([e for e in twice if e.kind != "queued"]) == (32, 64), "the mutation: nobody says that it is new"


def test_tokens_are_recomputed_from_their_second_time_on():
    log = [step(0, [("a", 8, 0)], 1), step(1, [("a", 4, 0)], 1), step(2, [("a", 6, 4), ("b", 3, 0)], 1)]
    assert recomputed(log) == (4 + 4, 8 + 4 + 6 + 3)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.booleans()), max_size=40))
def test_recomputed_is_what_a_set_of_positions_says(moves):
    """Against a count of positions one by one."""
    at, seen, log, again, total = {}, set(), [], 0, 0
    for i, (who, new, lose) in enumerate(moves):
        if lose:
            at[who] = 0
        start = at.get(who, 0)
        positions = {(who, p) for p in range(start, start + new)}
        again, total = again + len(positions & seen), total + new
        seen |= positions
        at[who] = start + new
        log.append(step(i, [(str(who), new, start)], 1))
    assert recomputed(log) == (again, total)


def test_memory_forgets_who_left_and_who_was_sent_back():
    log = [
        step(0, [("a", 10, 0), ("b", 20, 0)], 3),
        Event(1, 0.0, "preempted", "b", {"how": "recompute", "computed": 20, "blocks": 2}),
        step(1, [("a", 1, 10)], 1, waiting=1),
        Event(2, 0.0, "finished", "a", {"reason": "length", "output_tokens": 2}),
        step(2, [("a", 1, 11), ("b", 20, 0)], 2),
    ]
    assert [m.tokens for m in memory(log)] == [30, 11, 20]
    assert [m.total for m in memory(log)] == [TOTAL] * 3


def test_who_waits_for_a_place_or_for_budget_does_not_wait_for_memory():
    few = decoding(requests=3, live=30)
    assert signature(few, BS, Limits(max_num_seqs=3)).kind == HEALTHY
    assert signature(few, BS, Limits(max_num_seqs=4, max_num_batched_tokens=3)).kind == HEALTHY
    assert signature(few, BS, Limits(max_num_seqs=4, max_num_batched_tokens=4)).kind == FRAGMENTATION


def test_a_few_slow_steps_and_a_few_preemptions_are_healthy():
    assert signature(decoding(slow=lambda i: 0.020 if i == 30 else 0.010), BS).kind == HEALTHY
    rng = random.Random(0)
    assert signature(decoding(slow=lambda i: 0.010 * rng.uniform(0.9, 1.1)), BS).kind == HEALTHY


def test_seconds_that_mean_nothing_are_not_looked_at():
    found = signature(jitter(), BS, timed=False)
    assert found.kind == HEALTHY
    assert set(found.lost) == {STORM, FRAGMENTATION}
    assert signature(storm(), BS, timed=False).kind == STORM


def test_a_log_without_steps_is_refused_in_words():
    with pytest.raises(MinillmError, match="no steps"):
        signature([], BS)
