"""The merge of split attention: against a float64 oracle and its twin, traffic counted, and wrong on purpose."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Guarded, close, error, traffic_of
from minillm.kernels.merge_splits import merge_splits, merge_splits_bytes, merge_splits_reference, merge_splits_tiled

from minillm.course.broken import broken, mutants
from minillm.errors import MinillmError

TOLERANCE = 2e-6


def parts(B, H, S, d, empty=0.3, spread=3.0, seed=0):
    """partial and lse inside guards; a part is empty with that probability, and its output is NaN."""
    g = torch.Generator().manual_seed(seed)
    lse = torch.randn(B, H, S, generator=g) * spread
    lse[torch.rand(B, H, S, generator=g) < empty] = -torch.inf
    partial = torch.randn(B, H, S, d, generator=g)
    partial[lse == -torch.inf] = math.nan
    boxes = Guarded(B, H, S, d), Guarded(B, H, S)
    boxes[0].fill(partial), boxes[1].fill(lse)
    return boxes


def worst_error(partial, lse, merge=merge_splits):
    """Of out and lse; a row without tokens must be exactly 0 and -inf, else the error is infinite."""
    (out, total), (right_out, right_total) = merge(partial, lse), merge_splits_reference(partial, lse)
    nothing = right_total == -torch.inf
    if not (torch.equal(total == -torch.inf, nothing) and bool((out[nothing] == 0).all())):
        return math.inf
    return max(error(out, right_out), error(total[~nothing], right_total[~nothing]))


@pytest.mark.parametrize("S", [1, 2, 15, 16, 17, 40, 128])
@pytest.mark.parametrize("d", [64, 128])
def test_equals_the_float64_oracle_and_its_twin(S, d):
    partial, lse = parts(2, 3, S, d, seed=S)
    assert worst_error(partial.tensor, lse.tensor) <= TOLERANCE
    assert worst_error(partial.tensor, lse.tensor, merge_splits_tiled) <= TOLERANCE
    partial.check(), lse.check()


@settings(max_examples=15)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 34), st.sampled_from([16, 64]),
       st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 1.0, 200.0]), st.integers(0, 99))  # fmt: skip
def test_any_weights_and_any_empty_parts(B, H, S, d, empty, spread, seed):
    partial, lse = parts(B, H, S, d, empty, spread, seed)
    assert worst_error(partial.tensor, lse.tensor) <= TOLERANCE


def test_nothing_at_all_gives_zero_and_minus_infinity():
    out, lse = merge_splits(torch.full((2, 3, 4, 16), math.nan), torch.full((2, 3, 4), -torch.inf))
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


def test_merging_is_splitting_undone():
    """Attention over 96 tokens in one piece, and in pieces of 32 that are merged: the definition, not the formula."""
    g = torch.Generator().manual_seed(3)
    scores, v = torch.randn(96, generator=g) * 4, torch.randn(96, 16, generator=g)
    pieces = [slice(a, a + 32) for a in (0, 32, 64)]
    partial = torch.stack([scores[p].softmax(0) @ v[p] for p in pieces])[None, None]
    lse = torch.stack([scores[p].logsumexp(0) for p in pieces])[None, None]
    out, total = merge_splits(partial, lse)
    assert close(out[0, 0], scores.double().softmax(0) @ v.double())
    assert close(total[0, 0], scores.double().logsumexp(0))


def test_the_result_has_the_dtype_asked_for():
    partial, lse = parts(2, 3, 5, 64)
    out, total = merge_splits(partial.tensor, lse.tensor, torch.float16)
    assert (out.dtype, total.dtype) == (torch.float16, torch.float32)
    assert close(out, merge_splits_reference(partial.tensor, lse.tensor)[0])


@pytest.mark.parametrize("S", [1, 16, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_traffic_is_the_analytic_one(S, dtype):
    partial, lse = parts(2, 3, S, 64, seed=S)
    live = int((lse.tensor > -torch.inf).sum())
    assert S == 1 or 0 < live < 2 * 3 * S
    traffic = traffic_of(lambda: merge_splits(partial.tensor, lse.tensor, dtype))
    assert (traffic.loaded, traffic.stored) == merge_splits_bytes(6, S, live, 64, dtype.itemsize)
    assert traffic.unique_loaded == traffic.loaded  # nothing is read twice
    assert traffic.unique_stored == 6 * (64 * dtype.itemsize + 4)  # the outputs, whole, and nothing around them


CASES = (
    {"S": 5, "d": 16, "empty": 0.3, "spread": 3.0},
    {"S": 20, "d": 16, "empty": 0.0, "spread": 200.0},  # more than one round of parts, and scores past exp's range
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # an overflow is what one of them is about
@pytest.mark.parametrize("name", mutants("merge_splits"))
def test_a_wrong_merge_is_noticed(name):
    worst = lambda: max(worst_error(*(box.tensor for box in parts(2, 3, **case))) for case in CASES)
    assert worst() <= TOLERANCE
    with broken(name):
        assert worst() > TOLERANCE
    assert worst() <= TOLERANCE


def test_bad_input_is_refused_in_words():
    partial, lse = torch.zeros(2, 3, 4, 16), torch.zeros(2, 3, 4)
    for call, words in (
        (lambda: merge_splits(partial[0], lse), "[sequences, heads, splits, head_dim]"),
        (lambda: merge_splits(partial, lse[:, :2]), "lse must be [2, 3, 4], got [2, 2, 4]"),
        (lambda: merge_splits(partial.half(), lse), "partial must be float32, got float16"),
        (lambda: merge_splits(partial[..., :12], lse), "power of two"),
        (lambda: merge_splits(torch.zeros(2, 3, 0, 16), torch.zeros(2, 3, 0)), "at least one split"),
        (lambda: merge_splits(partial.transpose(0, 1), lse.transpose(0, 1)), "must be contiguous"),
        (lambda: merge_splits(partial, lse, torch.int32), "dtype must be float16"),
    ):
        with pytest.raises(MinillmError) as caught:
            call()
        assert words in str(caught.value)
