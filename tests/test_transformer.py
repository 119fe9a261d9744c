"""The transformer equals the transformers library's, family by family, and a deliberate mistake shows."""

from __future__ import annotations

import pytest
import torch
from conftest import FAMILIES, tiny_hf

from minillm import SamplingParams
from minillm.attention.causal import NoCacheAttention, attend, attend_sdpa
from minillm.attention.paged import PagedSDPA
from minillm.attention.protocol import Batch, Row
from minillm.cache.contiguous import ContiguousKVCache, kv_bytes
from minillm.cache.pool import KVPool
from minillm.config import ModelConfig
from minillm.models import transformer as tf
from minillm.models.weights import load_weights, random_weights

TOLERANCE = 1e-4  # the largest absolute error of a logit, fp32


def ours(folder, pack=True):
    config = ModelConfig.from_folder(folder)
    return tf.Transformer(config, load_weights(folder, config, torch.float32), pack=pack)


def logits(model, ids, attend=attend_sdpa):
    return model.logits(model.forward(Batch.build([Row(0, 0, len(ids))], ids), NoCacheAttention(attend)))


@torch.inference_mode()
def reference_logits(model, ids):
    return model(torch.tensor([ids])).logits[0].float()


def prompts(vocab, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=g).tolist() for n in (1, 2, 17, 100)]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens_equal_the_library(family, tiny_folder):
    model, oracle = ours(tiny_folder(family)), tiny_hf(family)
    for ids in prompts(model.config.vocab_size):
        assert (logits(model, ids) - reference_logits(oracle, ids)).abs().max() < TOLERANCE
        tokens, start, cache = list(ids), 0, ContiguousKVCache(model.config, 1, 256, torch.float32)
        for _ in range(64):
            new = tokens[start:]
            hidden = model.forward(Batch.build([Row(0, start, len(new))], new), cache)
            start = len(tokens)
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
        want = oracle.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=64,
            do_sample=False,
            eos_token_id=None,
        )
        assert tokens == want[0].tolist()


@pytest.mark.model
def test_embedded_model_equals_the_library(embedded_folder, llm, reference, tokenizer):
    """The plain path is within 1e-4 of the library; the fast path is near the same model in float64."""
    plain, fast = ours(embedded_folder, pack=False), llm.engine.model
    texts = [
        "Hello",
        "The capital of France is",
        "def fib(n):\n    return",
        "数学は美しい。" * 12,
        "Once upon a time " * 40,
    ]
    texts = [tokenizer.encode(t) for t in texts]
    for ids in texts:
        want = reference_logits(reference, ids)
        assert (logits(plain, ids, attend) - want).abs().max() < TOLERANCE
        assert (logits(fast, ids).argmax(-1) == want.argmax(-1)).all()
    del plain
    reference.double()  # and back again: every fp32 number is one of fp64
    try:
        for ids in texts:
            assert (logits(fast, ids) - reference_logits(reference, ids)).abs().max() < 1e-3
    finally:
        reference.float()


@pytest.mark.model
def test_embedded_model_generates_the_library_s_tokens(llm, reference, tokenizer):
    prompts = [tokenizer.encode(t) for t in ("Once upon a time", "1, 2, 3, 5, 8,", "La tour Eiffel", "x" * 200)]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    got = [r.outputs[0].token_ids for r in llm.generate(prompts, params, use_tqdm=False)]
    for ids, tokens in zip(prompts, got, strict=True):
        want = reference.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=32,
            min_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=2,
        )
        assert tokens == want[0, len(ids) :].tolist()


MUTATIONS = {
    "RoPE turns the other way": ("angles", lambda f: lambda cos, sin: f(cos, -sin)),
    "RoPE of the next position": ("angles", lambda f: lambda cos, sin: f(cos.roll(1, 0), sin.roll(1, 0))),
    "norm without the mean": ("rms_norm", lambda f: lambda x, w, eps: x * w),
    "norm behind an addition without the mean": ("add_rms_norm", lambda f: lambda x, r, w, eps: ((x + r) * w, x + r)),
    "gate and up swapped": ("swiglu", lambda f: lambda h: f(torch.cat(h.chunk(2, -1)[::-1], -1))),
}


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_tolerance_sees_a_mistake(name, pack, tiny_folder, monkeypatch):
    target, mutate = MUTATIONS[name]
    model, oracle = ours(tiny_folder("llama"), pack), tiny_hf("llama")
    ids = prompts(model.config.vocab_size)[2]
    monkeypatch.setattr(model.ops, target, mutate(getattr(model.ops, target)))
    assert (logits(model, ids) - reference_logits(oracle, ids)).abs().max() > 10 * TOLERANCE


CPU_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}  # of the largest entry; bf16: one step of its 8 bits


@pytest.mark.parametrize("mutated", [False, True])
@pytest.mark.parametrize("dtype", CPU_TOLERANCE)
@pytest.mark.parametrize("n", [1, 33])
def test_the_operators_of_a_cpu_equal_the_plain_ones(n, dtype, mutated):
    g = torch.Generator().manual_seed(n)
    draw = lambda *size: torch.randn(size, generator=g).to(dtype)
    plain, fast = tf.TorchOps(), tf.CpuOps()
    x, residual, weight, gate_up = draw(n, 96) * 3, draw(n, 96), draw(96), draw(n, 160)
    heads, angles = draw(n, 7, 64)[:, :5], torch.rand(n, 1, 32, generator=g).repeat(1, 1, 2) * 6  # rows with gaps
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    off = 1.04 if mutated else 1.0  # four percent must show, whichever operator is wrong
    kept = [t.clone() for t in (x, residual, gate_up, heads)]
    pairs = [
        (fast.rms_norm(x, weight * off, 0.5), plain.rms_norm(x, weight, 0.5)),
        (fast.rms_norm(heads, weight[:64] * off, 1e-6), plain.rms_norm(heads, weight[:64], 1e-6)),
        (fast.add_rms_norm(x, residual, weight * off, 0.5)[0], plain.add_rms_norm(x, residual, weight, 0.5)[0]),
        (fast.add_rms_norm(x * off, residual, weight, 0.5)[1], plain.add_rms_norm(x, residual, weight, 0.5)[1]),
        (fast.swiglu(gate_up * off), plain.swiglu(gate_up)),
        (fast.rope(heads, *fast.angles(cos * off, sin)), plain.rope(heads, *plain.angles(cos, sin))),
    ]
    for got, want in pairs:
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        error = (got.double() - want.double()).abs().max() / want.double().abs().max()
        assert (error > CPU_TOLERANCE[dtype]) == mutated
    assert all(map(torch.equal, (x, residual, gate_up, heads), kept)), "an input was changed"


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_tolerance_sees_missing_bias_and_qk_norm(family, tiny_folder):
    folder, oracle = tiny_folder(family), tiny_hf(family)
    config = ModelConfig.from_folder(folder)
    weights = load_weights(folder, config, torch.float32)
    for layer in weights.layers:
        layer.qkv_bias = layer.q_norm = None
    ids = prompts(config.vocab_size)[2]
    assert (logits(tf.Transformer(config, weights), ids) - reference_logits(oracle, ids)).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("d", [64, 128])
def test_sdpa_equals_the_textbook_attention(group, d):
    g = torch.Generator().manual_seed(group * d)
    for n, T in ((1, 1), (1, 33), (5, 5), (3, 20)):
        q = torch.randn(n, 2 * group, d, generator=g)
        k, v = torch.randn(2, T, 2, d, generator=g)
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        got = attend_sdpa(q, k, v)
        torch.testing.assert_close(got, attend(q, k, v), atol=2e-6, rtol=1e-5)
        if T > 1:  # the same check sees a shifted mask or a missing scale
            assert (attend(q * d**0.5, k, v) - got).abs().max() > 1e-3


def test_any_split_of_a_prompt_gives_the_same_logits(tiny_folder):
    model = ours(tiny_folder("qwen3"))
    ids = prompts(model.config.vocab_size)[3]
    whole = logits(model, ids)
    for cuts in ([1, 99], [50, 50], [33, 1, 1, 65], [1] * 100):
        cache, start, parts = ContiguousKVCache(model.config, 1, 100, torch.float32), 0, []
        for n in cuts:
            hidden = model.forward(Batch.build([Row(0, start, n)], ids[start : start + n]), cache)
            parts.append(model.logits(hidden))
            start += n
        torch.testing.assert_close(torch.cat(parts), whole, atol=2e-4, rtol=1e-4)


def test_a_mixed_batch_equals_each_sequence_alone(tiny_folder):
    model = ours(tiny_folder("llama"))
    a, b, c = prompts(model.config.vocab_size)[1:]
    cache = ContiguousKVCache(model.config, 3, 128, torch.float32)
    for slot, ids in ((0, a), (1, b)):
        model.forward(Batch.build([Row(slot, 0, len(ids) - 1)], ids[:-1]), cache)
    rows = [Row(0, len(a) - 1, 1), Row(1, len(b) - 1, 1), Row(2, 0, len(c))]
    batch = Batch.build(rows, [a[-1], b[-1], *c])
    got = model.logits(model.forward(batch, cache)[batch.last])
    want = torch.stack([logits(model, ids)[-1] for ids in (a, b, c)])
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


def test_packed_and_plain_weights_agree():
    config = ModelConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
    )
    ids = [3, 1, 4, 1, 5]
    plain = tf.Transformer(config, random_weights(config, std=0.2), max_len=8)
    packed = tf.Transformer(config, random_weights(config, std=0.2), max_len=8, pack=True)
    assert packed.layers[0].qkv.weight is None
    torch.testing.assert_close(logits(packed, ids), logits(plain, ids), atol=1e-5, rtol=1e-5)


def rounded_scores(q, k, v, attn_mask):
    """The mutation: scores rounded to bf16 before the softmax, which two plain products in bf16 would do."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + attn_mask
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def decode_of(kind, g):
    """Keys and values [4, K, 200, d] at random in bf16, and a decode step of four sequences over them."""
    config = ModelConfig(num_layers=1, vocab_size=8)
    k, v = torch.randn(2, 4, 3, 200, 64, generator=g).bfloat16()
    if kind == "contiguous":
        backend = ContiguousKVCache(config, 4, 200, torch.bfloat16)
        backend.k[0], backend.v[0] = k, v
    else:
        backend = PagedSDPA(KVPool(config, 52, 16, torch.bfloat16))
        for pool, x in ((backend.pool.k, k), (backend.pool.v, v)):
            pool[0, 1:] = torch.nn.functional.pad(x, (0, 0, 0, 8)).transpose(1, 2).reshape(52, 16, 3, 64)
    rows = [Row(i, 150 + 10 * i, 1, range(1 + 13 * i, 14 + 13 * i)) for i in range(4)]
    return backend, backend.plan(Batch.build(rows, [1] * 4)), k, v


@pytest.mark.parametrize("mutated", [False, True])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_batched_decode_in_bf16_takes_its_scores_in_fp32(kind, mutated, monkeypatch):
    g = torch.Generator().manual_seed(0)
    backend, plan, k, v = decode_of(kind, g)
    q = (torch.randn(4, 9, 64, generator=g) * 6).bfloat16()
    if mutated:
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", rounded_scores)
    newest = [(i, slice(None), 150 + 10 * i) for i in range(4)]
    backend.write(0, *(torch.stack([x[at] for at in newest]) for x in (k, v)), plan)  # what is there already
    got = backend.forward(0, q, plan)
    exact = [
        attend(q[i : i + 1].float(), k[i, :, : 151 + 10 * i].float(), v[i, :, : 151 + 10 * i].float()) for i in range(4)
    ]
    error = (got.float() - torch.cat(exact)).square().mean().sqrt()
    assert (error > 5e-3) if mutated else (error < 2.5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kv_bytes_are_what_is_allocated(dtype):
    config = ModelConfig()
    cache = ContiguousKVCache(config, 2, 7, dtype)
    assert cache.nbytes == kv_bytes(config, 14, dtype.itemsize) == 2 * 30 * 14 * 3 * 64 * dtype.itemsize


def test_rows_must_fit_the_reservation(tiny_folder):
    model = ours(tiny_folder("llama"))
    cache = ContiguousKVCache(model.config, 1, 4, torch.float32)
    with pytest.raises(ValueError, match="would hold 5 tokens, but only 4 are reserved"):
        model.forward(Batch.build([Row(0, 0, 5)], [1, 2, 3, 4, 5]), cache)


def test_operators_of_ones_own_need_no_rotation(tiny_folder):
    """Lesson 04's learner mounts norms and an activation; the rotation then is the plain one."""

    class Mine:
        rms_norm, add_rms_norm, swiglu = tf.TorchOps.rms_norm, tf.TorchOps.add_rms_norm, tf.TorchOps.swiglu

    model = ours(tiny_folder("llama"), pack=False)
    batch = Batch.build([Row(0, 0, 5)], [1, 2, 3, 4, 5])
    plain = model.forward(batch, NoCacheAttention())
    model.ops = Mine()
    assert torch.equal(model.forward(batch, NoCacheAttention()), plain)
