"""Quantised weights: round trips within half a step, the packing order, a linear of codes, a model of such linears."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import quant
from minillm.attention.causal import NoCacheAttention
from minillm.attention.protocol import Batch, Row
from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.models.transformer import Transformer
from minillm.models.weights import random_weights
from minillm.quant import QuantLinear, quantize_int4, quantize_int8, quantize_model

TINY = ModelConfig(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position_embeddings=64, dtype="float32", attention_bias=True,
)  # fmt: skip


def weights(n_out, n_in, seed, kind="normal", scale=0.05):
    w = torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(seed)) * scale
    if kind == "one_sided":
        w = w.abs() + 10 * scale
    if kind == "outlier":
        w[:, 0] *= 1000
    if kind == "zeros":
        w[::2] = 0
    return w


KINDS = st.sampled_from(("normal", "one_sided", "outlier", "zeros"))
SCALES = st.sampled_from((1e-38, 1e-6, 1e-2, 1.0, 1e4))


def within_half_a_step(w, back, step):
    return bool(((w - back).abs() <= step * (0.5 + 1e-5)).all())


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 99), KINDS, SCALES)
def test_int8_is_within_half_a_step(n_out, n_in, seed, kind, size):
    w = weights(n_out, n_in, seed, kind, size)
    codes, scale = quantize_int8(w)
    assert codes.dtype == torch.int8
    assert torch.equal(scale, scale.bfloat16().float())
    assert within_half_a_step(w, quant.dequantize_int8(codes, scale), scale[:, None])


@settings(max_examples=60)
@given(st.integers(1, 9), st.sampled_from(quant.GROUPS), st.integers(1, 3), st.integers(0, 99), KINDS, SCALES)
def test_int4_is_within_half_a_step_of_its_group(n_out, group, groups, seed, kind, size):
    w = weights(n_out, group * groups, seed, kind, size)
    packed, scale, zero = quantize_int4(w, group)
    assert packed.shape == (n_out, group * groups // 2)
    assert scale.shape == zero.shape == (n_out, groups)
    assert (packed.dtype, scale.dtype, zero.dtype) == (torch.uint8, torch.bfloat16, torch.bfloat16)
    back = quant.dequantize_int4(packed, scale, zero)
    assert within_half_a_step(w, back, scale.float().repeat_interleave(group, 1))


def test_the_steps_are_as_fine_as_the_range_allows():
    w = weights(40, 96, 3)
    _, scale = quantize_int8(w)
    assert torch.allclose(scale, w.abs().amax(1) / 127, rtol=2**-8, atol=0)
    _, scale, _ = quantize_int4(w, 32)
    grouped = w.view(40, 3, 32)
    assert torch.allclose(scale.float(), (grouped.amax(-1) - grouped.amin(-1)) / 15, rtol=2**-8, atol=0)


def test_a_coarser_step_or_a_lost_zero_breaks_the_half_step():
    """The bound above is tight enough to notice: truncation, a lost zero, a neighbour's scale ..."""
    w = weights(16, 128, 0)
    _, scale = quantize_int8(w)
    cut = (w / scale[:, None]).trunc().to(torch.int8)
    assert not within_half_a_step(w, quant.dequantize_int8(cut, scale), scale[:, None])
    packed, scale, zero = quantize_int4(w, 32)
    step = scale.float().repeat_interleave(32, 1)
    assert not within_half_a_step(w, quant.dequantize_int4(packed, scale, torch.zeros_like(zero)), step)
    assert not within_half_a_step(w, quant.dequantize_int4(packed, scale.roll(1, 1), zero), step)
    swapped = packed << 4 | packed >> 4
    assert not within_half_a_step(w, quant.dequantize_int4(swapped, scale, zero), step)
    exact = w.abs().amax(1, keepdim=True) / 127
    late = (w / exact).round() * exact.bfloat16().float()  # rounded after the codes were chosen
    assert not within_half_a_step(w, late, exact)


def test_two_codes_share_a_byte_low_half_first():
    codes = torch.arange(16, dtype=torch.uint8).view(1, 16)
    packed = quant.pack_int4(codes)
    assert packed.tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]
    assert torch.equal(quant.unpack_int4(packed), codes)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 99))
def test_packing_is_undone(n_out, pairs, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n_out, 2 * pairs), generator=generator, dtype=torch.uint8)
    assert torch.equal(quant.unpack_int4(quant.pack_int4(codes)), codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["int8", "int4", "int4-g64"])
@pytest.mark.parametrize("size", [(192, 64), (40, 128)])  # torch's int4 kernel takes the first, not the second
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17])
def test_a_linear_of_codes_multiplies_by_the_weight_they_stand_for(dtype, scheme, size, rows):
    w, bias = weights(*size, 0).to(dtype), torch.randn(size[0]).to(dtype)
    for b in (None, bias):
        linear = QuantLinear(w, b, scheme)
        meant = linear.dequantize()
        linear.pack()
        assert torch.equal(linear.dequantize(), meant)
        assert linear.nbytes == linear.scheme.weight_bytes(*size) + (0 if b is None else b.nbytes)
        x = torch.randn(rows, size[1], generator=torch.Generator().manual_seed(1)).to(dtype)
        got, want = linear(x), F.linear(x.double(), meant.double(), None if b is None else b.double())
        assert got.dtype == dtype
        assert got.shape == (rows, size[0])
        if rows:
            limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
            assert (got.double() - want).abs().max() <= limit * want.abs().max()
            lost = F.linear(x.double(), meant.double().roll(1, 1))  # what a slip of one input would give
            assert (lost - want).abs().max() > 10 * limit * want.abs().max()


@pytest.mark.parametrize("n_in", [100, 200, 33])
def test_int8_rows_that_torchs_kernel_would_read_past_are_dequantised(n_in):
    """The kernel reads 16 inputs at a time: garbage or a crash for any other number."""
    linear = QuantLinear(weights(96, n_in, 0).bfloat16(), scheme="int8")
    x = torch.randn(4, n_in, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = x.double() @ linear.dequantize().double().t()
    torch.testing.assert_close(linear(x).double(), want, atol=0.01 * want.abs().max().item(), rtol=0.01)


def test_few_rows_use_torchs_kernels_for_codes(monkeypatch):
    """bf16 on a CPU: a decode step must not make the dense weight again."""
    monkeypatch.setattr(QuantLinear, "_dequantize", lambda *args: pytest.fail("dequantised"))
    x = torch.randn(1, 64).bfloat16()
    assert QuantLinear(weights(192, 64, 0).bfloat16(), None, "int8").pack()(x).shape == (1, 192)


def test_an_order_that_cannot_be_read_back_keeps_the_plain_codes(monkeypatch):
    monkeypatch.setattr(quant, "_unpacked", lambda packed, n_out: packed.new_zeros(n_out, 64))
    w, x = weights(192, 64, 0).bfloat16(), torch.randn(1, 64).bfloat16()
    linear = QuantLinear(w, None, "int4").pack()
    assert linear.codes is not None
    want = x.float() @ linear.dequantize().t()
    assert (linear(x).float() - want).abs().max() <= 1e-2 * want.abs().max()


# A model --------------------------------------------------------------------------------------------------------------


def logits_of(model):
    tokens = list(range(3, 23))
    hidden = model.forward(Batch.build([Row(0, 0, len(tokens))], tokens), NoCacheAttention())
    return model.logits(hidden)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("head", [False, True])
def test_a_model_computes_with_the_weights_that_its_codes_stand_for(scheme, head):
    """Every matrix replaced by its dequantised self in a plain model: the same logits. So nothing else has changed."""
    plain, model = (Transformer(TINY, random_weights(TINY, std=0.2)) for _ in range(2))
    original = logits_of(plain)
    assert quantize_model(model, scheme, head=head) is model
    for a, b in zip(plain.layers, model.layers):
        for name in quant.LINEARS:
            assert type(getattr(b, name)) is QuantLinear
            assert getattr(b.w, name) is None
            assert getattr(b, name).weight is None
            assert getattr(b, name).bias is getattr(b.w, f"{name}_bias")
            getattr(a, name).weight = getattr(b, name).dequantize()
    assert (type(model.lm_head) is QuantLinear) == head
    if head:
        plain.lm_head.weight = model.lm_head.dequantize()
    got, want = logits_of(model), logits_of(plain)
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
    assert (original - want).abs().max() > 1e-3 * want.abs().max()


def test_the_plain_weights_are_released():
    import gc
    import weakref

    given = random_weights(TINY)
    refs = [weakref.ref(getattr(layer, name)) for layer in given.layers for name in quant.LINEARS]
    quantize_model(Transformer(TINY, given), "int8")
    gc.collect()
    assert [r() for r in refs] == [None] * len(refs)


def test_bad_input_is_refused_in_words():
    packed = Transformer(TINY, random_weights(TINY), pack=True)
    odd = ModelConfig(**(vars(TINY) | {"intermediate_size": 80}))
    for call, words in (
        (lambda: quantize_int4(torch.randn(4, 80), 32), "80 inputs cannot be cut into groups of 32; use int8"),
        (lambda: quantize_int4(torch.randn(4, 576), 128), "groups of 128; use a group of 64"),
        (lambda: quantize_int4(torch.randn(4, 576), 48), "group must be 32, 64, 128 inputs, got 48"),
        (lambda: quantize_int8(torch.tensor([[1.0, torch.nan]])), "holds inf or NaN"),
        (lambda: quantize_int8(torch.randn(4)), "must be [out, in], got [4]"),
        (lambda: quant.scheme_of("int3"), "'int3' is not known; use 'int8', 'int4'"),
        (lambda: quantize_model(packed, "int8"), "packed or quantised already"),
        (lambda: quantize_model(Transformer(odd, random_weights(odd)), "int4"), "80 inputs cannot be cut"),
    ):
        with pytest.raises(MinillmError) as caught:
            call()
        assert words in str(caught.value)


@pytest.mark.model
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_an_engine_of_quantised_weights_still_knows_the_capital(embedded_folder, scheme):
    from minillm import LLM, SamplingParams

    llm = LLM(embedded_folder, quantization=scheme, max_model_len=128)
    assert all(type(layer.down) is QuantLinear for layer in llm.engine.model.layers)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0].outputs[0].text
    assert "Paris" in answer
