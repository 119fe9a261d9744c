"""Arrival processes and lengths: seeded, of the rate asked for, as irregular as asked for."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.errors import MinillmError
from minillm.trace import arrivals

N = 4000
PROCESSES = {
    "constant": lambda seed: arrivals.constant(N, 5.0),
    "poisson": lambda seed: arrivals.poisson(N, 5.0, seed),
    "bursty": lambda seed: arrivals.bursty(N, 5.0, 3.0, seed),
    "ramp": lambda seed: arrivals.ramp(N, 1.0, 9.0, seed),
}


def gaps(times):
    return [b - a for a, b in itertools.pairwise([0.0, *times])]


def cv(times):
    return statistics.pstdev(gaps(times)) / statistics.mean(gaps(times))


@pytest.mark.parametrize("name", PROCESSES)
def test_times_rise_have_the_rate_and_repeat_with_the_seed(name):
    times = PROCESSES[name](1)
    assert len(times) == N
    assert times == sorted(times)
    assert times[0] >= 0
    assert N / times[-1] == pytest.approx(5.0, rel=0.15)
    assert times == PROCESSES[name](1)
    assert name == "constant" or times != PROCESSES[name](2)


def test_how_irregular_gaps_are_is_what_tells_the_processes_apart():
    assert cv(arrivals.constant(N, 5.0)) == pytest.approx(0, abs=1e-9)
    assert cv(arrivals.poisson(N, 5.0, 0)) == pytest.approx(1, abs=0.1)
    assert cv(arrivals.bursty(N, 5.0, 3.0, 0)) == pytest.approx(3, rel=0.15)
    assert cv(arrivals.bursty(N, 5.0, 0.5, 0)) == pytest.approx(0.5, rel=0.1)
    assert cv(arrivals.bursty(N, 5.0, 1.0, 0)) == pytest.approx(1, abs=0.1)  # a gamma of shape 1 is exponential


def test_a_ramp_is_slow_first_and_fast_last():
    times = arrivals.ramp(N, 1.0, 9.0, 0)
    end = 2 * N / 10  # the mean rate is 5
    counts = [sum(a <= t < a + end / 4 for t in times) for a in (0, end / 4, end / 2, 3 * end / 4)]
    assert counts == pytest.approx([N * x for x in (0.1, 0.2, 0.3, 0.4)], rel=0.15)  # rates 2, 4, 6, 8 of 20
    level, poisson = arrivals.ramp(50, 5.0, 5.0, 3), arrivals.poisson(50, 5.0, 3)
    assert level == pytest.approx(poisson)  # a level ramp is the Poisson process of the same seed
    down = arrivals.ramp(N, 9.0, 1.0, 0)
    assert len(down) == N
    assert down == sorted(down)
    assert all(map(math.isfinite, down))


@given(st.integers(1, 200), st.floats(0.01, 100), st.floats(0.01, 100), st.integers(0, 99))
def test_any_ramp_has_so_many_finite_rising_times(n, first, last, seed):
    times = arrivals.ramp(n, first, last, seed)
    assert len(times) == n
    assert times == sorted(times)
    assert all(map(math.isfinite, times))


def test_the_first_requests_do_not_change_when_more_are_asked_for():
    assert arrivals.poisson(10, 5.0, 0) == arrivals.poisson(20, 5.0, 0)[:10]
    assert arrivals.bursty(10, 5.0, 2.0, 0) == arrivals.bursty(20, 5.0, 2.0, 0)[:10]


@pytest.mark.parametrize(
    "call",
    [
        lambda: arrivals.poisson(0, 1.0), lambda: arrivals.poisson(3, 0.0), lambda: arrivals.constant(3, math.inf),
        lambda: arrivals.poisson(True, 1.0), lambda: arrivals.bursty(3, 1.0, 0.0), lambda: arrivals.ramp(3, 1.0, -1.0),
        lambda: arrivals.lengths(3, "fixed:0"), lambda: arrivals.lengths(3, "uniform:9:2"),
        lambda: arrivals.lengths(3, "normal:9"), lambda: arrivals.lengths(3, "lognormal:x:1"),
        lambda: arrivals.lengths(3, "fixed"), lambda: arrivals.lengths(3, "inf"),
        lambda: arrivals.make("steady", 3, 1.0),
    ],
)  # fmt: skip
def test_what_makes_no_process_is_refused(call):
    with pytest.raises(MinillmError):
        call()


def test_lengths():
    assert arrivals.lengths(3, "fixed:7") == arrivals.lengths(3, "7") == [7, 7, 7]
    uniform = arrivals.lengths(N, "uniform:5:9")
    assert set(uniform) == {5, 6, 7, 8, 9}
    log = arrivals.lengths(N, "lognormal:100:0.8", seed=1)
    assert statistics.median(log) == pytest.approx(100, rel=0.1)
    assert statistics.mean(log) > 1.2 * statistics.median(log)  # the long tail of real traffic
    assert min(log) >= 1
    assert max(arrivals.lengths(N, "lognormal:100:0.8:150", seed=1)) == 150
    assert log == arrivals.lengths(N, "lognormal:100:0.8", seed=1)
    mixed = arrivals.lengths(N, "0.9*fixed:10+0.1*fixed:1000")
    assert set(mixed) == {10, 1000}
    assert mixed.count(1000) == pytest.approx(N / 10, rel=0.2)


def test_a_process_by_name():
    assert arrivals.make("poisson", 5, 2.0, seed=4) == arrivals.poisson(5, 2.0, 4)
    assert arrivals.make("bursty", 5, 2.0, cv=3.0) == arrivals.bursty(5, 2.0, 3.0)
    assert arrivals.make("constant", 5, 2.0) == arrivals.constant(5, 2.0)
    assert arrivals.make("ramp", 5, 2.0, last=4.0) == arrivals.ramp(5, 2.0, 4.0)
