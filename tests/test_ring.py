"""The ring all-reduce: the sum, the bytes it is famous for, the same bits everywhere, and what each mistake breaks."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.parallel import ring
from minillm.parallel.group import Alone, run_threads
from minillm.parallel.processes import run_processes
from minillm.parallel.ring import chunks, ring_all_reduce, ring_bytes


def inputs(size: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(-50, 50, shape, generator=draw).to(dtype) for _ in range(size)]


def summed(size, xs, reduce=ring_all_reduce):
    return run_threads(size, lambda group: reduce(group, xs[group.rank]), timeout_s=60)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 5), st.lists(st.integers(0, 7), max_size=3), st.sampled_from(["float32", "int64", "bfloat16"]))
def test_it_gives_the_sum_for_any_size_shape_and_dtype(size, shape, dtype):
    xs = inputs(size, tuple(shape), getattr(torch, dtype))
    before = [x.clone() for x in xs]
    for got in summed(size, xs):
        assert got.dtype == xs[0].dtype
        assert torch.equal(got.double(), sum(x.double() for x in xs))  # small whole numbers: exact also in bf16
    assert all(torch.equal(x, b) for x, b in zip(xs, before))


def test_all_ranks_get_the_same_bits_where_the_order_of_a_sum_matters():
    xs = [torch.randn(37, generator=torch.Generator().manual_seed(r)) * 10.0**r for r in range(4)]
    got = summed(4, xs)
    assert all(torch.equal(g, got[0]) for g in got)
    assert torch.allclose(got[0], sum(xs))


def test_a_rank_sends_two_n_minus_one_over_n_of_the_bytes():
    for size in (2, 3, 4):
        x = torch.ones(120)

        def work(group, x=x):
            ring_all_reduce(group, x)
            return dict(group.traffic.bytes), dict(group.traffic.calls)

        for nbytes, calls in run_threads(size, work):
            assert nbytes["send"] == nbytes["recv"] == ring_bytes(x.nbytes, size)
            assert calls["send"] == 2 * (size - 1)


def test_a_view_is_summed_as_it_is_seen_and_one_rank_is_a_copy():
    x = torch.arange(12.0).reshape(3, 4).t()
    assert torch.equal(ring_all_reduce(Alone(), x), x)
    assert ring_all_reduce(Alone(), x).data_ptr() != x.data_ptr()
    assert torch.equal(summed(2, [x, x])[1], 2 * x)


@given(st.integers(0, 100), st.integers(1, 9))
def test_chunks_cover_everything_once_and_are_even(count, size):
    parts = chunks(count, size)
    assert [i for a, b in parts for i in range(a, b)] == list(range(count))
    assert max(b - a for a, b in parts) - min(b - a for a, b in parts) <= 1


MUTANTS = {
    "one round too few": ("range(group.size - 1)", "range(group.size - 2)"),
    "overwrites instead of adding": ("mine += _recv", "mine[:] = _recv"),
    "starts the all-gather with its own chunk": ("(group.rank + 1 - step)", "(group.rank - step)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mistake_gives_another_sum(name):
    old, new = MUTANTS[name]
    source = inspect.getsource(ring_all_reduce)
    assert old in source
    space = dict(vars(ring))
    exec("from __future__ import annotations\n" + source.replace(old, new), space)
    xs = inputs(3, (12,))
    got = summed(3, xs, space["ring_all_reduce"])
    assert not all(torch.equal(g, sum(xs)) for g in got)


def sums(group, counts):
    """Called in the processes: whether the ring's sum is gloo's, by size."""
    found = []
    for n in counts:
        x = torch.arange(float(n)) * (group.rank + 1)
        found.append(torch.equal(ring_all_reduce(group, x), group.all_reduce(x.clone())))
    return found


def test_through_real_processes_it_equals_gloos(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    assert run_processes(3, "test_ring:sums", {"counts": [1, 2, 3, 1000, 100_001]}) == [[True] * 5] * 3
