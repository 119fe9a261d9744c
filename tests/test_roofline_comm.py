"""The law of a ring all-reduce: exact on its own samples, wrong when any term is, measured between real processes."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import MinillmError
from minillm.roofline import comm
from minillm.roofline.comm import LINKS, Link, fit, judge, link

SIZES = tuple(2**k for k in range(10, 24, 2))
TRUE = Link("true", 2e9, 50e-6, 7e-6)


def samples(of=TRUE, ranks=(2, 3, 4), noise=0.0, seed=0):
    draw = random.Random(seed)
    return [(n, r, of.all_reduce(n, r) * (1 + draw.uniform(-noise, noise))) for r in ranks for n in SIZES]


def test_a_ring_by_hand():
    """4 ranks, 8 MB, 1 GB/s: 6 messages of 2 MB, each 2 ms and 10 us, after 100 us."""
    ring = Link("by hand", 1e9, 100e-6, 10e-6)
    assert ring.all_reduce(8_000_000, 4) == pytest.approx(100e-6 + 6 * (10e-6 + 2e-3))
    assert ring.all_gather(2_000_000, 4) == pytest.approx(100e-6 + 3 * (10e-6 + 2e-3))
    assert ring.send(2_000_000) == pytest.approx(110e-6 + 2e-3)
    assert ring.all_reduce(8e6, 1) == ring.all_gather(8e6, 1) == ring.latency(1) == 0.0


@given(st.sampled_from(sorted(LINKS)), st.integers(2, 64), st.integers(0, 10**10))
@settings(max_examples=60, deadline=None)
def test_laws_of_every_link(name, ranks, nbytes):
    """An all-reduce is a reduce-scatter and an all-gather of its N parts; no rank sends twice the tensor or more."""
    at = link(name)
    parts = at.all_gather(nbytes / ranks, ranks)
    assert at.all_reduce(nbytes, ranks) == pytest.approx(2 * parts - at.start, rel=1e-9)
    moved = at.all_reduce(nbytes, ranks) - at.latency(ranks)
    assert nbytes / at.bandwidth * (1 - 1e-6) <= moved * (1 + 1e-6) + 1e-12
    assert moved <= 2 * nbytes / at.bandwidth + 1e-12
    assert at.all_reduce(nbytes + 1, ranks) >= at.all_reduce(nbytes, ranks)


def test_links_are_ordered_as_wires_are():
    order = [
        LINKS[n].bandwidth for n in ("nvlink5", "nvlink4", "nvlink3", "pcie5", "ib400", "pcie4", "eth100", "eth25")
    ]
    assert order == sorted(order, reverse=True)
    assert LINKS["nvlink4"].bandwidth == 450e9  # one direction, as device.DATASHEET counts
    assert all(x.source for x in LINKS.values())


def test_a_device_and_its_link_say_the_same():
    from minillm.roofline.device import DATASHEET

    for device, name in comm.OF_DEVICE.items():
        assert LINKS[name].bandwidth == pytest.approx(DATASHEET[device].link_bandwidth, rel=0.02)


def test_fit_finds_the_link():
    found = fit(samples())
    for name in ("bandwidth", "start", "hop"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)


def test_fit_of_one_number_of_ranks_has_all_latency_in_start():
    found = fit(samples(ranks=(3,)))
    assert found.hop == 0
    assert found.start == pytest.approx(TRUE.latency(3), rel=1e-6)
    assert found.bandwidth == pytest.approx(TRUE.bandwidth, rel=1e-6)


def test_ranks_that_take_turns_wait_for_each_message():
    """1 ms more for each of 4 messages of three ranks, whatever they carry; the bandwidth stays the wires' own."""
    slow = [(n, r, s + 4e-3) for n, r, s in samples(ranks=(3,))]
    found = comm.in_turns(TRUE, slow)
    assert found.bandwidth == TRUE.bandwidth
    assert found.hop == pytest.approx(TRUE.latency(3) / 4 + 1e-3)
    assert max(comm.errors(found, slow)) < 1e-9
    assert comm.in_turns(TRUE, [(n, 3, 1e-9) for n in SIZES]).hop == 0.0
    with pytest.raises(MinillmError, match="as many in all samples"):
        comm.in_turns(TRUE, samples())


WRONG_LAWS = {
    "no latency": lambda n, r: n * 2 * (r - 1) / r / 2e9,
    "bytes without (N - 1) / N": lambda n, r: TRUE.latency(r) + 2 * n / 2e9,
    "everybody sends to everybody": lambda n, r: TRUE.latency(r) + (r - 1) * n / 2e9,
    "latency does not grow with ranks": lambda n, r: TRUE.start + 2 * (r - 1) / r * n / 2e9,
    "slower when larger": lambda n, r: TRUE.all_reduce(n, r) * (1 + n / 2**20),
}


@pytest.mark.parametrize("law", WRONG_LAWS)
def test_another_law_is_told_apart(law):
    """The tolerance of `test_held_out_sizes`, met by the true law, is missed by each of these, or the fit shows it."""
    made = [(n, r, WRONG_LAWS[law](n, r)) for n, r, _ in samples()]
    judged = judge(made)
    apart = max(abs(getattr(judged.link, x) / getattr(TRUE, x) - 1) for x in ("start", "hop", "bandwidth"))
    assert max(judged.held_out) > 0.05 or apart > 0.05


def test_held_out_sizes():
    judged = judge(samples(noise=0.02))
    assert max(judged.held_out) < 0.05
    assert judged.median_error < 0.05


def test_the_judge_has_not_seen_what_it_judges_on(monkeypatch):
    asked = []
    monkeypatch.setattr(comm, "fit", lambda given, name: asked.extend(given) or fit(given, name))
    judged = judge(samples())
    assert {n for n, _, _ in asked}.isdisjoint(SIZES[1::2])
    assert len(judged.seen) + len(judged.held_out) == len(samples())
    spoiled = [(n, r, s * (10 if n in SIZES[1::2] else 1)) for n, r, s in samples()]
    assert judge(spoiled).link == judged.link  # sizes it must not see cannot move the fit
    assert judge(spoiled).median_error == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "at least 2 samples"),
        ([(1024, 2, 1e-3)], "two sizes"),
        ([(1024, 2, 1e-3), (1024, 2, 1e-3)], "two sizes"),
        ([(1024, 1, 1e-3), (2048, 2, 1e-3)], "ranks >= 2"),
        ([(1024, 2, 0.0), (2048, 2, 1e-3)], "seconds > 0"),
        ([(1024, 2, 1e-3), (2048, 2, float("inf"))], "seconds > 0"),
    ],
)
def test_what_cannot_be_fitted(given, message):
    with pytest.raises(MinillmError, match=message):
        fit(given)


def test_falling_times_are_never_a_negative_latency():
    found = fit([(2**20, 2, 1e-3), (2**21, 2, 3e-3)])
    assert (found.start, found.hop) == (0.0, 0.0)
    assert found.bandwidth > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Link("x", 0.0),
        lambda: Link("x", float("nan")),
        lambda: Link("x", 1e9, -1e-6),
        lambda: Link("x", 1e9, 0.0, float("inf")),
        lambda: TRUE.all_reduce(-1, 2),
        lambda: TRUE.all_reduce(1, 0),
        lambda: TRUE.all_gather(1, 1.5),
        lambda: link("token ring"),
        lambda: judge(samples()[:3]),
        lambda: comm.measure(1),
        lambda: comm.measure(2, sizes=()),
    ],
)
def test_bad_input_is_refused_in_words(make):
    with pytest.raises(MinillmError):
        make()


@pytest.mark.parametrize("ranks", [2, 3])
def test_real_processes_are_timed(ranks):
    """Between processes of gloo: every size comes back, with the bytes it had, and a law can be fitted to it."""
    sizes = (1024, 4098, 1 << 16, 1 << 18, 1 << 20)
    found = comm.measure(ranks, sizes, repeats=3)
    assert [(n, r) for n, r, _ in found] == [(n, ranks) for n in (1024, 4096, 1 << 16, 1 << 18, 1 << 20)]
    assert all(s > 0 for *_, s in found)
    judged = judge(found)
    assert judged.link.bandwidth > 0
    assert len(judged.held_out) == 2
