"""RMSNorm in Triton: against a float64 oracle and its twin, inside guards, traffic counted, and wrong on purpose."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, TOLERANCE, Guarded, close, error, traffic_of
from minillm.kernels import rms_norm as module
from minillm.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_bytes, rms_norm_reference, rms_norm_tiled
from minillm.kernels.triton_private import compile_ahead

from minillm.course.broken import broken, mutants
from minillm.errors import MinillmError

EPS = 1e-5


def inputs(rows, width, dtype, gap=0, seed=0):
    torch.manual_seed(seed)
    x, r = (Guarded(rows, width, dtype=dtype, gap=gap) for _ in range(2))
    x.fill(torch.randn(rows, width)), r.fill(torch.randn(rows, width))
    return x, r, torch.randn(width).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 2, 63, 64, 65, 576, 1000])
@pytest.mark.parametrize("gap", [0, 7])
def test_equals_the_float64_oracle_and_its_twin(dtype, width, gap):
    x, r, w = inputs(3, width, dtype, gap)
    norm, _ = rms_norm_reference(x.tensor.double(), w.double(), EPS)
    assert close(rms_norm(x.tensor, w, EPS), norm)
    assert close(rms_norm_tiled(x.tensor, w, EPS)[0], norm)
    norm, total = rms_norm_reference(x.tensor.double(), w.double(), EPS, r.tensor.double())
    for got_norm, got_total in (
        add_rms_norm(x.tensor, r.tensor, w, EPS),
        rms_norm_tiled(x.tensor, w, EPS, r.tensor),
    ):
        assert close(got_norm, norm)
        assert close(got_total, total)


@settings(max_examples=20)
@given(st.integers(0, 5), st.integers(1, 300), st.integers(0, 9), st.sampled_from(DTYPES), st.integers(0, 99))
def test_any_shape_reads_and_writes_only_what_it_owns(rows, width, gap, dtype, seed):
    x, r, w = inputs(rows, width, dtype, gap, seed)  # everything around x and r is NaN: reading it shows
    norm, total = rms_norm_reference(x.tensor.double(), w.double(), EPS, r.tensor.double())
    got_norm, got_total = add_rms_norm(x.tensor, r.tensor, w, EPS)
    assert close(got_norm, norm)
    assert close(got_total, total)
    x.check(), r.check()


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("width", [64, 576, 1000])
def test_traffic_is_the_analytic_one(residual, width):
    x, r, w = inputs(5, width, torch.float16)
    run = lambda: add_rms_norm(x.tensor, r.tensor, w, EPS) if residual else rms_norm(x.tensor, w, EPS)
    traffic = traffic_of(run)
    assert (traffic.loaded, traffic.stored) == rms_norm_bytes(5, width, 2, residual)
    assert traffic.unique_loaded == (2 if residual else 1) * 5 * width * 2 + width * 2  # the weight once


def worst_error():
    """The largest error over widths and dtypes, of the norm and of the sum: what a mutant must move."""
    worst = 0.0
    for dtype in DTYPES:
        for width in (65, 576):
            x, r, w = inputs(3, width, dtype, gap=7)
            norm, total = rms_norm_reference(x.tensor.double(), w.double(), EPS, r.tensor.double())
            got = add_rms_norm(x.tensor, r.tensor, w, EPS)
            worst = max(worst, *(error(a, b) / TOLERANCE[dtype] for a, b in zip(got, (norm, total))))
    return worst


ELSEWHERE = ("rms_norm/int32_offset", "rms_norm/residual_not_rounded")  # each has a test of its own


@pytest.mark.parametrize("name", [n for n in mutants("rms_norm") if n not in ELSEWHERE])
def test_a_wrong_kernel_is_noticed(name):
    assert worst_error() <= 1
    with broken(name):
        assert worst_error() > 1
    assert worst_error() <= 1


def test_the_norm_is_of_the_rounded_sum():
    """An unfused engine adds, rounds, then norms. The fused kernel must give the same bits of the same sum."""
    x, r, w = (torch.randn(64, 96, generator=torch.Generator().manual_seed(i)).half() for i in range(3))
    norm, total = add_rms_norm(x, r, w[0], EPS)
    assert torch.equal(norm, rms_norm(total, w[0], EPS))
    with broken("rms_norm/residual_not_rounded"):
        norm, total = add_rms_norm(x, r, w[0], EPS)
        assert not torch.equal(norm, rms_norm(total, w[0], EPS))


def test_offsets_have_64_bits():
    """Row 2 starts past 2^31 elements. Only the pages of the rows are ever touched, so this needs no memory."""
    width, stride = 8, 2**30 + 16
    x = torch.empty(2 * stride + width, dtype=torch.float16).as_strided((3, width), (stride, 1))
    x.copy_(torch.randn(3, width))
    w = torch.ones(width, dtype=torch.float16)
    norm, _ = rms_norm_reference(x.double(), w.double(), EPS)
    assert close(rms_norm(x, w, EPS), norm)


def test_an_offset_of_32_bits_is_seen_in_the_compiled_code():
    """The interpreter's numbers are 64 bits wide wherever a stride is, so this slip shows in the compiler's output."""
    types = dict.fromkeys(("X", "R", "W", "OUT", "SUM"), "*fp16")
    types |= {"stride_x": "i32", "stride_r": "i32", "D": "i32", "eps": "fp32"}

    def wide() -> bool:
        ir = compile_ahead(module._rms_norm, types, {"HAS_RESIDUAL": True, "BLOCK": 64}, "sm_90").asm["ttir"]
        products = [line for line in ir.splitlines() if "arith.muli" in line]
        return bool(products) and all(": i64" in line for line in products)

    assert wide()
    with broken("rms_norm/int32_offset"):
        assert not wide()


def test_bad_input_is_refused_in_words():
    x, w = torch.randn(2, 8), torch.randn(8)
    for call, words in (
        (lambda: rms_norm(torch.randn(8), w, EPS), "[rows, width]"),
        (lambda: rms_norm(x, torch.randn(7), EPS), "weight must be [8], got [7]"),
        (lambda: rms_norm(x.to(torch.int32), w, EPS), "must be float16, bfloat16, float32, got int32"),
        (lambda: rms_norm(x, w.half(), EPS), "weight must be float32, got float16"),
        (lambda: rms_norm(torch.randn(8, 2).t(), w, EPS), "call .contiguous() first"),
        (lambda: rms_norm(x.bfloat16(), w.bfloat16(), EPS), "wrongly in bf16"),
        (lambda: add_rms_norm(x, torch.randn(3, 8), w, EPS), "residual must be [2, 8], got [3, 8]"),
    ):
        with pytest.raises(MinillmError) as caught:
            call()
        assert words in str(caught.value)
