"""The pipeline: who computes what when, the bubble, and runs through real ranks that must keep to the timetable."""

from __future__ import annotations

import inspect
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import MinillmError
from minillm.parallel import pipeline
from minillm.parallel.group import RankLost, run_threads
from minillm.parallel.pipeline import (
    Slot,
    bubble,
    even,
    gathered,
    idle_share,
    makespan,
    micro_batches,
    paced,
    timetable,
)
from minillm.parallel.processes import run_processes

TIMES = st.integers(1, 8).map(float)
TABLES = st.tuples(st.integers(1, 4), st.integers(1, 6)).flatmap(
    lambda sm: st.lists(st.lists(TIMES, min_size=sm[1], max_size=sm[1]), min_size=sm[0], max_size=sm[0])
)


# Rows ---------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 60), max_size=20), st.integers(1, 8))
def test_micro_batches_keep_the_rows_and_balance_their_tokens(rows, most):
    found = micro_batches(rows, most, lambda n: n)
    assert [x for m in found for x in m] == rows
    assert len(found) == min(most, len(rows))
    assert all(found)
    share, taken = Fraction(sum(rows), max(1, len(found))), 0
    for k, part in enumerate(found[:-1], 1):
        left = len(rows) - sum(map(len, found[:k]))
        taken += sum(part)
        # a run ends at the first row with which all runs so far have their share; earlier only to leave a row for each
        assert taken >= k * share or left == len(found) - k
        assert len(part) == 1 or taken - part[-1] < k * share


def test_decodes_are_cut_evenly_and_a_prompt_stays_whole():
    assert [len(m) for m in micro_batches([1] * 10, 4, lambda n: n)] == [3, 2, 3, 2]
    assert micro_batches([500, 1, 1, 1], 2, lambda n: n) == [[500], [1, 1, 1]]
    assert micro_batches([1, 1, 500], 3, lambda n: n) == [[1], [1], [500]]


# The timetable ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 16])
def test_the_bubble_of_equal_stages_is_the_formula(stages, count):
    slots = timetable(even(stages, count, 1.0))
    busy = sum(Fraction(s.end) - Fraction(s.start) for s in slots)
    assert 1 - busy / (stages * Fraction(makespan(slots))) == Fraction(stages - 1, count + stages - 1)
    assert idle_share(slots) == pytest.approx(bubble(stages, count), abs=1e-15)


def test_two_stages_and_three_micro_batches_by_hand():
    slots = timetable([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]], link_s=0.5)
    assert [(s.stage, s.micro_batch, s.start, s.end) for s in slots] == [
        (0, 0, 0.0, 1.0), (1, 0, 1.5, 3.5), (0, 1, 1.0, 2.0), (1, 1, 3.5, 5.5), (0, 2, 2.0, 3.0), (1, 2, 5.5, 7.5),
    ]  # fmt: skip


WIRES = st.sampled_from([0.0, 0.5, 3.0])


@settings(derandomize=True)
@given(TABLES, WIRES | st.lists(WIRES, min_size=6, max_size=6), st.integers(1, 3), st.booleans())
def test_a_timetable_is_possible_and_wastes_nothing(seconds, link_s, steps, flush):
    wires = [link_s] * 6 if isinstance(link_s, float) else link_s
    link_s = link_s if isinstance(link_s, float) else wires[: len(seconds[0])]  # of each micro-batch
    slots = timetable(seconds, link_s=link_s, steps=steps, flush=flush)
    by = {(s.step, s.stage, s.micro_batch): s for s in slots}
    stages, count = len(seconds), len(seconds[0])
    assert len(by) == len(slots) == steps * stages * count
    for (k, s, m), slot in by.items():
        assert slot.end - slot.start == seconds[s][m]
        reasons = [0.0]
        if s:
            reasons.append(by[k, s - 1, m].end + wires[m])
        if m:
            reasons.append(by[k, s, m - 1].end)
        if k:
            reasons.append(by[k - 1, s, count - 1].end)
            if s == 0:
                before = [by[k - 1, stages - 1, i].end for i in range(count)]
                reasons.append(max(before) if flush else before[m])
        assert slot.start == max(reasons)  # never before it can, never later than it must


def test_without_a_flush_as_many_micro_batches_as_stages_fill_the_pipeline():
    flushed = timetable(even(4, 4, 1.0), steps=10)
    assert idle_share(flushed) == pytest.approx(bubble(4, 4))
    assert idle_share(timetable(even(4, 4, 1.0), steps=10, flush=False)) == pytest.approx(bubble(4, 40))
    lone = timetable(even(4, 1, 1.0), steps=10, flush=False)  # one stream: nothing to overlap with
    assert idle_share(lone) == pytest.approx(3 / 4)


def test_a_slow_stage_sets_the_pace():
    seconds = even(3, 8, 1.0)
    seconds[1] = [2.0] * 8
    assert makespan(timetable(seconds)) == 1 + 8 * 2 + 1


def test_what_cannot_be_scheduled_is_refused():
    for wrong in ([], [[]], [[1.0], [1.0, 2.0]], [[0.0]], [[float("nan")]], [[-1.0]]):
        with pytest.raises(MinillmError, match="a row for each stage"):
            timetable(wrong)
    for how in ({"link_s": -1.0}, {"link_s": float("inf")}, {"link_s": [0.1, 0.1]}, {"steps": 0}):
        with pytest.raises(MinillmError, match="at least 0 s"):
            timetable([[1.0]], **how)
    for stages, count in ((0, 1), (1, 0)):
        with pytest.raises(MinillmError, match="at least 1"):
            bubble(stages, count)
    for most in (0, True, 1.5):
        with pytest.raises(MinillmError, match="at least 1"):
            micro_batches([1], most, lambda n: n)


# Runs through ranks -----------------------------------------------------------------------------------------------


def run_paced(seconds, work=paced, clock="virtual"):
    return gathered(run_threads(len(seconds), lambda group: work(group, seconds, clock), timeout_s=60))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(TABLES)
def test_a_paced_run_keeps_to_the_timetable(seconds):
    run = run_paced(seconds)
    assert sorted(run.slots, key=str) == sorted(timetable(seconds), key=str)


MUTANTS = {  # what is wrong, in one line of `paced`, and whether it shows in the numbers or in the times
    "ignores when the input was sent": ("time_here.received(message[0].item())", "pass", False),
    "stamps a message before the work": ("torch.tensor([time_here.now(), value]", "torch.tensor([start, value]", False),
    "passes the input on": (
        "torch.tensor([time_here.now(), value]",
        "torch.tensor([time_here.now(), message[1]]",
        True,
    ),
    "all stages do the first one's work": ("+ group.rank\n", "+ 0\n", True),
    "works for another stage": ("enumerate(seconds[group.rank])", "enumerate(seconds[0])", False),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mistake_in_a_run_is_seen(name):
    old, new, wrong_numbers = MUTANTS[name]
    source = inspect.getsource(paced)
    assert old in source
    space = dict(vars(pipeline))
    exec("from __future__ import annotations\n" + source.replace(old, new), space)
    seconds = [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]]
    if wrong_numbers:
        with pytest.raises(MinillmError, match="left out"):
            run_paced(seconds, space["paced"])
        return
    run = run_paced(seconds, space["paced"])
    assert sorted(run.slots, key=str) != sorted(timetable(seconds), key=str)


def test_through_real_processes_the_bubble_is_the_formula():
    tables = [even(3, count, 1.0) for count in (1, 2, 4, 8)] + [[[1.0, 2.0], [3.0, 1.0], [0.5, 0.5]]]
    ranks = run_processes(3, "minillm.parallel.pipeline:paced_many", {"tables": tables, "clock": "virtual"})
    for i, table in enumerate(tables):
        run = gathered([rank[i] for rank in ranks])
        assert sorted(run.slots, key=str) == sorted(timetable(table), key=str)
    assert gathered([rank[2] for rank in ranks]).idle == pytest.approx(Fraction(2, 6), abs=1e-15)


def test_a_sleeping_run_gives_the_same_numbers_in_real_time():
    run = run_paced(even(3, 4, 1e-3), clock="sleeping")
    assert len(run.outputs) == 4
    by = {(s.stage, s.micro_batch): s for s in run.slots}
    assert all(s.end - s.start >= 1e-3 for s in run.slots)
    for stage in range(3):
        assert all(by[stage, m].end <= by[stage, m + 1].start for m in range(3))
    assert run.idle < 1


def test_a_run_that_does_not_fit_its_world_is_refused():
    with pytest.raises(MinillmError, match="2 stages need as many ranks, and this world has 1"):
        run_threads(1, lambda group: paced(group, even(2, 1, 1.0)))
    with pytest.raises(MinillmError, match="clock 'sundial'"):
        run_threads(1, lambda group: paced(group, even(1, 1, 1.0), "sundial"))
    assert Slot(0, 0, 0.0, 1.0).step == 0


# Processes --------------------------------------------------------------------------------------------------------


def test_a_rank_that_fails_is_named_and_the_others_are_ended(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    with pytest.raises(RankLost, match=r"rank 1 of 2 .*no seat for rank 1"):
        run_processes(2, "test_pipeline:fails", {"rank": 1})
    with pytest.raises(RankLost, match="'os:no_such'"):
        run_processes(1, "os:no_such")
    with pytest.raises(MinillmError, match="at least 1 rank"):
        run_processes(0, "os:getpid")


def fails(group, rank):
    import torch

    if group.rank == rank:
        raise ValueError(f"no seat for rank {rank}")
    return group.all_reduce(torch.ones(1)).item()
