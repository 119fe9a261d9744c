"""Online softmax: any cut of the keys, in any order, gives the softmax of all of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import close
from minillm.kernels import online_softmax
from minillm.kernels.flash_prefill_eager import LOG2_E
from minillm.kernels.online_softmax import State, empty, finish, fold, merge


def drawn(seed, keys, hidden=0.3):
    """Scores in the hundreds, some of them hidden, and values. fp64."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, keys, generator=g, dtype=torch.float64) * 300
    scores[torch.rand(4, keys, generator=g) < hidden] = -torch.inf
    return scores, torch.randn(keys, 3, generator=g, dtype=torch.float64)


def direct(scores, values):
    return (scores.softmax(-1).nan_to_num(0.0)) @ values  # a row that sees nothing gives 0


def of(scores, values, exp=torch.exp):
    return fold(empty(4, 3, torch.float64), scores, values, exp)


def same(a: State, b: State) -> bool:
    return torch.equal(a.m, b.m) and all(torch.allclose(x, y, rtol=1e-12, atol=1e-12) for x, y in zip(a[1:], b[1:]))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 999), st.lists(st.integers(0, 5), max_size=6))
def test_tiles_of_any_width_give_the_softmax(seed, widths):
    scores, values = drawn(seed, sum(widths))
    state, start = empty(4, 3, torch.float64), 0
    for width in widths:
        state = fold(state, scores[:, start : start + width], values[start : start + width])
        start += width
    assert torch.allclose(finish(state), direct(scores, values), rtol=1e-12, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 999), st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))
def test_merging_is_associative_and_commutative(seed, x, y, z):
    widths = [x, y, z]
    scores, values = drawn(seed, sum(widths), hidden=0.5)
    a, b, c = (of(s, v) for s, v in zip(scores.split(widths, 1), values.split(widths)))
    assert same(merge(merge(a, b), c), merge(a, merge(b, c)))
    assert same(merge(a, b), merge(b, a))
    assert same(merge(a, empty(4, 3, torch.float64)), a)
    assert torch.allclose(finish(merge(merge(c, a), b)), direct(scores, values), rtol=1e-12, atol=1e-12)


def test_base_two_is_the_same_softmax():
    scores, values = drawn(0, 9)
    assert close(finish(of(scores * LOG2_E, values, torch.exp2)).float(), direct(scores, values))


@pytest.mark.parametrize("wrong", ["no rescale of acc", "no rescale of l", "merge without the maximum"])
def test_each_factor_is_needed(wrong, monkeypatch):
    scores, values = drawn(1, 12, hidden=0.0)
    halves = of(scores[:, :6], values[:6]), of(scores[:, 6:], values[6:])
    if wrong == "merge without the maximum":
        state = State(halves[0].m, halves[0].l + halves[1].l, halves[0].acc + halves[1].acc)
    else:
        state = online_softmax.merge(*halves)
        plain = State(state.m, halves[0].l + halves[1].l, halves[0].acc + halves[1].acc)
        state = state._replace(acc=plain.acc) if wrong == "no rescale of acc" else state._replace(l=plain.l)
    assert not torch.allclose(finish(state), direct(scores, values), rtol=1e-3)
