"""SwiGLU in Triton: against a float64 oracle and its twin, inside guards, traffic counted, and wrong on purpose."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, TOLERANCE, Guarded, close, error, guarded_outputs, traffic_of
from minillm.kernels import swiglu as module
from minillm.kernels.swiglu import swiglu, swiglu_bytes, swiglu_reference, swiglu_tiled
from minillm.kernels.triton_private import compile_ahead

from minillm.course.broken import broken, mutants
from minillm.errors import MinillmError
from minillm.models import transformer


def inputs(rows, width, dtype, gap=0, seed=0):
    torch.manual_seed(seed)
    x = Guarded(rows, 2 * width, dtype=dtype, gap=gap)
    x.fill(torch.randn(rows, 2 * width) * 4)
    return x


@pytest.mark.parametrize("function", [swiglu, swiglu_tiled])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 63, 64, 65, 1023, 1024, 1025, 1536])
def test_equals_the_float64_oracle(function, dtype, width):
    for gap in (0, 7):
        x = inputs(3, width, dtype, gap).tensor
        assert close(function(x), swiglu_reference(x.double()))


def test_the_oracle_is_the_model_s():
    x = inputs(3, 48, torch.float32).tensor
    assert torch.equal(swiglu_reference(x), transformer.swiglu(x))


@settings(max_examples=20)
@given(st.integers(0, 5), st.integers(1, 1100), st.integers(0, 9), st.sampled_from(DTYPES), st.integers(0, 99))
def test_any_shape_reads_and_writes_only_what_it_owns(rows, width, gap, dtype, seed):
    x = inputs(rows, width, dtype, gap, seed)  # everything around is NaN: reading it shows
    with guarded_outputs() as outputs:
        got = swiglu(x.tensor)
    assert close(got, swiglu_reference(x.tensor.double()))
    x.check(), outputs[0].check()


@pytest.mark.parametrize("function", [swiglu, swiglu_tiled])
def test_gates_of_any_size(function):
    gates = torch.tensor([-65504.0, -200.0, -89.0, -88.0, -0.0, 0.0, 88.0, 89.0, 200.0, 65504.0])
    for dtype in DTYPES:
        x = torch.cat((gates, torch.full_like(gates, 0.5))).to(dtype)[None]
        with _quiet():
            assert close(function(x), swiglu_reference(x.double()))


def _quiet():
    """exp overflows to inf on purpose; numpy says so."""
    import numpy as np

    return np.errstate(over="ignore", invalid="ignore")


@pytest.mark.parametrize("width", [64, 1025])
def test_traffic_is_the_analytic_one(width):
    x = inputs(5, width, torch.float16)
    traffic = traffic_of(lambda: swiglu(x.tensor))
    assert (traffic.loaded, traffic.stored) == swiglu_bytes(5, width, 2)
    assert (traffic.unique_loaded, traffic.unique_stored) == swiglu_bytes(5, width, 2)


def worst_error():
    """The largest error over widths and dtypes, large gates among them; inf where something outside was written."""
    worst = 0.0
    for dtype in DTYPES:
        for width in (65, 1025):
            x = inputs(3, width, dtype, gap=7)
            x.tensor[0, :2] = torch.tensor([90.0, -90.0])
            x.buffer[~x.owned] = 1.0  # a NaN read here and written into an output's guard, NaN itself, would not show
            with guarded_outputs() as outputs, _quiet():
                got = swiglu(x.tensor)
            worst = max(worst, error(got, swiglu_reference(x.tensor.double())) / TOLERANCE[dtype])
            around = outputs[0].buffer[~outputs[0].owned]
            worst = worst if bool(around.isnan().all()) else float("inf")
    return worst


@pytest.mark.parametrize("name", [n for n in mutants("swiglu") if n != "swiglu/int32_offset"])
def test_a_wrong_kernel_is_noticed(name):
    assert worst_error() <= 1
    with broken(name):
        assert worst_error() > 1
    assert worst_error() <= 1


def test_offsets_have_64_bits():
    """Row 2 starts past 2^31 elements. Only the pages of the rows are ever touched, so this needs no memory."""
    width, stride = 8, 2**30 + 16
    x = torch.empty(2 * stride + 2 * width, dtype=torch.float16).as_strided((3, 2 * width), (stride, 1))
    x.copy_(torch.randn(3, 2 * width))
    assert close(swiglu(x), swiglu_reference(x.double()))


def test_an_offset_of_32_bits_is_seen_in_the_compiled_code():
    def wide() -> bool:
        ahead = module.AHEAD[0]
        ir = compile_ahead(module._swiglu, ahead.signature, ahead.constants, "sm_90").asm["ttir"].splitlines()
        rows = [line for line in ir if "arith.muli" in line and "%columns" not in line]
        return bool(rows) and all(": i64" in line for line in rows)

    assert wide()
    with broken("swiglu/int32_offset"):
        assert not wide()


def test_bad_input_is_refused_in_words():
    for x, words in (
        (torch.randn(8), "gate_up must be [rows, 2 * width], got [8]"),
        (torch.randn(2, 7), "must be even; got 7"),
        (torch.zeros(2, 8, dtype=torch.int32), "must be float16, bfloat16, float32, got int32"),
        (torch.randn(8, 2).t(), "call .contiguous() first"),
        (torch.randn(2, 8).bfloat16(), "wrongly in bf16"),
    ):
        with pytest.raises(MinillmError) as caught:
            swiglu(x)
        assert words in str(caught.value)
