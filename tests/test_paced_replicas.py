"""What more replicas serve is measured, not multiplied: the same load on 1, 2, 4 and 8 of them on a virtual clock."""

import dataclasses

import pytest

from minillm.cluster import paced
from minillm.cluster.migration import Engine
from minillm.cluster.operating_point import Demand, Replica
from minillm.cluster.paced_replicas import same_load
from minillm.cluster.step_times import Workload
from minillm.errors import MinillmError
from minillm.models.presets import preset
from minillm.roofline.device import device

CARD = dataclasses.replace(device("h200"), call_overhead=2e-6)
ENGINE = Engine(preset("llama-3.1-8b"), CARD, max_num_seqs=32)
LOAD = Workload(200, 50, rate=400.0)  # more than four serve, less than eight would
BUDGET, NEAR = 256, 0.05  # tokens a step; of n times one


@pytest.fixture(scope="module")
def served():
    return same_load(ENGINE, LOAD, (1, 2, 4, 8), BUDGET, requests=900)


def test_replicas_that_are_full_serve_n_times_one(served):
    for run in served[:3]:
        assert run.ratio == pytest.approx(run.rate / served[0].rate)
        assert run.ratio == pytest.approx(run.replicas, rel=NEAR)
        assert max(run.shares) * run.replicas == pytest.approx(1, rel=NEAR)


def test_nobody_serves_more_than_comes(served):
    """Eight are not full: what they serve is what comes, and the rest of them shows in the waits."""
    eight = served[3]
    assert eight.rate == pytest.approx(LOAD.rate, rel=NEAR)
    assert eight.ratio < 0.75 * 8
    waits = [run.ttft_s for run in served]
    assert waits == sorted(waits, reverse=True)
    assert waits[3] < waits[0] / 100


def test_the_planner_says_it_of_one_and_of_four(served):
    """The rate at which one is full, and dp times that. With larger chunks, in which several prompts meet, the planner
    is too low for a full engine."""
    demand = Demand(LOAD.prompt_tokens, LOAD.output_tokens, rate=LOAD.rate)
    one = Replica(ENGINE.config, CARD, demand, budget=BUDGET, max_num_seqs=32).peak.rate
    for run in served[:3]:
        assert run.replicas * one == pytest.approx(run.rate, rel=NEAR)


def test_a_load_that_nobody_spreads_is_seen(monkeypatch):
    """All go to the first engine: two serve what one does, and the tolerance sees it."""
    monkeypatch.setattr(paced, "least_outstanding", lambda states: states[0].name)
    _, two = same_load(ENGINE, LOAD, (1, 2), requests=300)
    assert two.shares == (1.0, 0.0)
    assert two.ratio == pytest.approx(1)
    assert two.ratio != pytest.approx(2, rel=NEAR)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"workload": Workload(200, 50)}, "give the workload a rate"),
        ({"counts": ()}, "whole numbers of replicas from 1"),
        ({"counts": (0,)}, "whole numbers of replicas from 1"),
        ({"requests": 9}, "at least 10 requests"),
    ],
)
def test_bad_input_is_refused_in_words(how, message):
    with pytest.raises(MinillmError, match=message):
        same_load(**({"engine": ENGINE, "workload": LOAD} | how))
