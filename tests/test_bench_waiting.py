"""Where a step of several ranks goes: waiting is told from speaking, on clocks that are virtual."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_hf

from minillm.bench.waiting import MeetsFirst, spent, steps
from minillm.errors import MinillmError
from minillm.parallel.group import run_threads

MEETING, SUM = 0.5, 3.0  # virtual seconds of a collective once all have come
LATE = (0.0, 1.0, 4.0)  # of the ranks' own work before each sum


class Paced:
    """A group on a virtual clock: a collective begins when the last rank has come."""

    def __init__(self, group):
        self.group, self.rank, self.size, self.now = group, group.rank, group.size, 0.0
        self.traffic, self.all_gather = group.traffic, group.all_gather

    def all_reduce(self, x):
        out = self.group.all_reduce(x)
        arrivals = self.group.all_gather(torch.tensor([self.now]))
        self.now = max(float(t) for t in arrivals) + (MEETING if x.numel() == 1 else SUM)
        return out


def run(meets=MeetsFirst, late=LATE, sums=4):
    def work(group):
        paced = Paced(group)
        first, begun = meets(paced, clock=lambda: paced.now), paced.now
        for _ in range(sums):
            paced.now += late[group.rank]
            x = first.all_reduce(torch.full((3,), 1.0))
            assert x.tolist() == [3.0] * 3
        return {"seconds": paced.now - begun, "steps": 2, "meet": first.met, "sum": first.summed, "gather": 0.0}

    return spent(run_threads(3, work))


def test_who_comes_first_waits_and_the_sum_is_counted_apart():
    found = run()  # two sums a step
    assert found.own == pytest.approx([2 * t for t in LATE])
    assert found.waiting == pytest.approx([2 * (max(LATE) - t) for t in LATE])
    assert found.speaking == pytest.approx([2 * SUM] * 3)
    assert found.meeting == pytest.approx(2 * MEETING)
    for rank in range(3):
        parts = found.own[rank] + found.waiting[rank] + found.speaking[rank] + found.meeting
        assert parts == pytest.approx(found.step[rank])


def test_nobody_waits_where_all_come_together():
    assert run(late=(2.0, 2.0, 2.0)).waiting == pytest.approx([0.0] * 3)


def test_without_a_meeting_the_wait_looks_like_a_sum():
    """The mutant: what an engine's own count of a collective shows."""

    class NoMeeting(MeetsFirst):
        def all_reduce(self, x):
            begun = self.clock()
            x = self.group.all_reduce(x)
            self.met.append(0.0)
            self.summed.append(self.clock() - begun)
            return x

    found = run(NoMeeting)
    assert found.waiting == [0.0] * 3
    assert found.speaking[0] == pytest.approx(2 * (SUM + max(LATE)))


def test_it_is_the_model_that_is_stepped(tmp_path):
    tiny_hf("llama", vocab_size=212).save_pretrained(tmp_path)
    alone, *_ = run_threads(1, lambda group: steps(group, str(tmp_path), [5, 9, 20, 33], 6))
    ranks = run_threads(2, lambda group: steps(group, str(tmp_path), [5, 9, 20, 33], 6))
    assert [r["tokens"] for r in ranks] == [alone["tokens"]] * 2
    layers = tiny_hf("llama").config.num_hidden_layers
    assert [len(r["meet"]) for r in ranks] == [6 * (2 * layers + 1)] * 2  # the prompt's are not counted
    found = spent(ranks)
    assert all(t > 0 for t in (*found.own, *found.speaking, found.meeting))
    assert min(found.waiting) >= 0


def test_ranks_that_did_not_meet_as_often_are_refused():
    one = {"seconds": 1.0, "steps": 1, "meet": [0.1], "sum": [0.1], "gather": 0.0}
    with pytest.raises(MinillmError, match="as often"):
        spent([one, one | {"meet": [0.1, 0.1]}])
    with pytest.raises(MinillmError, match="at least one step"):
        steps(SimpleNamespace(rank=0, size=1), "nowhere", [1], 0)
