"""int8 and int4 linears in Triton: against a float64 oracle and their twins, guarded, counted, and wrong on purpose."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, TOLERANCE, Guarded, close, error, guarded_outputs, traffic_of
from minillm.kernels import quant_int4, quant_linear
from minillm.kernels.quant_int4 import int4_linear, int4_linear_bytes, int4_linear_reference, int4_linear_tiled
from minillm.kernels.quant_linear import int8_linear, int8_linear_bytes, int8_linear_reference, int8_linear_tiled
from minillm.kernels.triton_private import compile_ahead

from minillm.course.broken import broken, mutants
from minillm.errors import MinillmError
from minillm.quant import QuantLinear, quantize_int4, quantize_int8


def inputs(bits, rows, n_out, n_in, dtype=torch.float32, gap=0, group=32, seed=0):
    """(x, quantised weight ...), each inside guards. Scales as fp32: the interpreter is wrong in bf16."""
    torch.manual_seed(seed)
    w = torch.randn(n_out, n_in) * 0.05 + 0.01
    parts = (torch.randn(rows, n_in), *(quantize_int8(w) if bits == 8 else quantize_int4(w, group)))
    types = (dtype, torch.int8, torch.float32) if bits == 8 else (dtype, torch.uint8, torch.float32, torch.float32)
    made = []
    for part, kind in zip(parts, types):
        made.append(Guarded(*part.shape, dtype=kind, gap=gap if part.dim() == 2 else 0))
        made[-1].fill(part)
    return made


def run(bits, made):
    """The kernel's result; its output lies in guards, and nothing around anything was touched."""
    with guarded_outputs() as outputs:
        got = (int8_linear if bits == 8 else int4_linear)(*(m.tensor for m in made))
    for m in (*made, *outputs):
        m.check()
    return got


def oracle(bits, made):
    x, *weight = (m.tensor for m in made)
    return (int8_linear_reference if bits == 8 else int4_linear_reference)(x.double(), *weight)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 17])  # matvec with 1, 2, 4 rows, small and large tiles
def test_equals_the_float64_oracle_and_its_twin(bits, dtype, rows):
    made = inputs(bits, rows, 70 if rows > 4 else 10, 96, dtype, gap=7)
    want = oracle(bits, made)
    assert close(run(bits, made), want)
    x, *weight = (m.tensor for m in made)
    if bits == 8:
        assert close(int8_linear_tiled(x, *weight), want)
    else:
        assert close(int4_linear_tiled(x, *weight, rounded=rows > quant_int4.FEW), want)


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("groups", [1, 5])
def test_int4_groups(rows, group, groups):
    made = inputs(4, rows, 9, group * groups, group=group)
    assert close(run(4, made), oracle(4, made))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 300])
def test_several_tiles_of_inputs_and_of_rows(bits, rows):
    made = inputs(bits, rows, 5, 576)
    assert close(run(bits, made), oracle(bits, made))


@settings(max_examples=15)
@given(
    st.sampled_from((8, 4)), st.integers(1, 20), st.integers(1, 40), st.integers(1, 5), st.integers(0, 9),
    st.sampled_from(DTYPES), st.integers(0, 99),
)  # fmt: skip
def test_any_shape_reads_and_writes_only_what_it_owns(bits, rows, n_out, groups, gap, dtype, seed):
    n_in = 32 * groups - (seed % 32 if bits == 8 else 0)
    made = inputs(bits, rows, n_out, n_in, dtype, gap, seed=seed)
    assert close(run(bits, made), oracle(bits, made))


@pytest.mark.parametrize("rows", [1, 3, 6, 20])
def test_traffic_is_the_analytic_one(rows):
    made = inputs(8, rows, 70, 100, torch.float16)
    traffic = traffic_of(lambda: run(8, made))
    assert (traffic.loaded, traffic.stored) == int8_linear_bytes(rows, 70, 100, itemsize=2)
    assert traffic.unique_loaded == 70 * 100 + 70 * 4 + rows * 100 * 2


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("group", [32, 64])
def test_traffic_of_int4_is_the_analytic_one(rows, group):
    made = inputs(4, rows, 40, 192, torch.float16, group=group)
    traffic = traffic_of(lambda: run(4, made))
    expected = int4_linear_bytes(rows, 40, 192, group, itemsize=2, scale_itemsize=4)
    assert (traffic.loaded, traffic.stored) == expected
    assert traffic.unique_loaded == 40 * 192 // 2 + 2 * 40 * (192 // group) * 4 + rows * 192 * 2


def worst_error(bits):
    worst = 0.0
    for dtype in DTYPES:
        for rows in (3, 6):
            made = inputs(bits, rows, 34, 544, dtype, gap=7)  # more than a tile of outputs, and of inputs
            with guarded_outputs():
                got = (int8_linear if bits == 8 else int4_linear)(*(m.tensor for m in made))
            worst = max(worst, error(got, oracle(bits, made)) / TOLERANCE[dtype])
    return worst


COMPILED = ("int32_offset", "tf32")  # right in the interpreter: the compiler's output tells
NAMES = [n for m in ("quant_linear", "quant_int4") for n in mutants(m) if n.partition("/")[2] not in COMPILED]


def test_the_right_kernels_are_within_the_tolerance():
    assert worst_error(8) <= 1
    assert worst_error(4) <= 1


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_kernel_is_noticed(name):
    with broken(name):
        assert worst_error(8 if name.startswith("quant_linear/") else 4) > 1


def test_offsets_have_64_bits():
    """The last output's codes start past 2^31 elements. Only the pages of the rows are touched: no memory is needed."""
    x = torch.randn(5, 32)
    stride = 2**30 + 16
    codes, scale = quantize_int8(torch.randn(3, 32))
    far = torch.empty(2 * stride + 32, dtype=torch.int8).as_strided((3, 32), (stride, 1))
    far.copy_(codes)
    assert torch.equal(int8_linear(x, far, scale), int8_linear(x, codes, scale))
    packed, scale, zero = quantize_int4(torch.randn(3, 32), 32)
    far = torch.empty(2 * stride + 16, dtype=torch.uint8).as_strided((3, 16), (stride, 1))
    far.copy_(packed)
    scale, zero = scale.float(), zero.float()
    assert torch.equal(int4_linear(x, far, scale, zero), int4_linear(x, packed, scale, zero))


def compiled(module):
    """The matmul of a module for sm_90, with fp32 activations, so that a TF32 product would show."""
    kernel = module._int8_matmul if module is quant_linear else module._int4_matmul
    case = next(c for c in module.AHEAD if c.kind == "matmul")
    types = dict(case.signature) | {"X": "*fp32", "OUT": "*fp32"}
    sizes = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32}
    if module is quant_int4:
        sizes = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_G": 1, "GROUP": 32}
    return compile_ahead(kernel, types, sizes, "sm_90").asm


@pytest.mark.parametrize("module", [quant_linear, quant_int4])
def test_slips_that_only_compiled_code_shows(module):
    """32-bit offsets and TF32 products."""
    name = module.__name__.rpartition(".")[2]

    def narrow() -> list[str]:
        lines = [line for line in compiled(module)["ttir"].splitlines() if "arith.muli" in line and "tensor<" in line]
        assert lines
        return [line for line in lines if "xi32>" in line]

    assert not narrow()
    assert ".tf32" not in compiled(module)["ptx"]
    with broken(f"{name}/int32_offset"):
        assert narrow()
    with broken(f"{name}/tf32"):
        assert ".tf32" in compiled(module)["ptx"]


def test_the_engines_linear_means_the_same_weights():
    """What a GPU would compute with a QuantLinear's tensors is what the CPU computes by dequantising."""
    w, x = torch.randn(40, 96) * 0.05, torch.randn(3, 96)
    for scheme in ("int8", "int4"):
        linear = QuantLinear(w, None, scheme)
        scales = [p.float() for p in (linear.scale, linear.zero) if p is not None]
        kernel = int8_linear if scheme == "int8" else int4_linear
        assert close(kernel(x, linear.codes, *scales), linear(x).double())


def test_bad_input_is_refused_in_words():
    x, (c8, s8) = torch.randn(2, 64), quantize_int8(torch.randn(4, 64))
    c4, s4, z4 = quantize_int4(torch.randn(4, 64), 32)
    s4, z4 = s4.float(), z4.float()
    for call, words in (
        (lambda: int8_linear(torch.randn(64), c8, s8), "x must be [rows, in], got [64]"),
        (lambda: int8_linear(x, c8[:, :63], s8), "weight must be [out, 64], got [4, 63]"),
        (lambda: int8_linear(x, c8.to(torch.uint8), s8), "weight must be int8, got uint8"),
        (lambda: int8_linear(x, c8, s8[:3]), "scale must be [4], got [3]"),
        (lambda: int8_linear(x, c8.t().contiguous().t(), s8), "call .contiguous() first"),
        (lambda: int8_linear(x.bfloat16(), c8, s8), "wrongly in bf16"),
        (lambda: int4_linear(torch.randn(2, 63), c4, s4, z4), "two a byte of the weight, got 63"),
        (lambda: int4_linear(x, c4[:, :31], s4, z4), "packed must be [out, 32], got [4, 31]"),
        (lambda: int4_linear(x, c4, s4.repeat(1, 2), z4), "scale has 4 groups for 64 inputs; groups must be of 32"),
        (lambda: int4_linear(x, c4, s4[:, :0], z4), "scale has 0 groups"),
        (lambda: int4_linear(x, c4, s4, z4[:3]), "zero must be [4, 2], got [3, 2]"),
        (lambda: int4_linear(x, c4, s4, z4.half()), "zero must be float32, got float16"),
    ):
        with pytest.raises(MinillmError) as caught:
            call()
        assert words in str(caught.value)
