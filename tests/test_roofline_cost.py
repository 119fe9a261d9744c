"""FLOPs against torch's counter, bytes against real tensors, calls against a dispatch counter, laws by hypothesis."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from minillm.attention.causal import NoCacheAttention
from minillm.attention.protocol import Batch, Row
from minillm.cache.contiguous import ContiguousKVCache
from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.models.presets import PRESETS, preset
from minillm.models.transformer import Transformer
from minillm.models.weights import random_weights
from minillm.roofline import cost

FAMILIES = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False, "attention_bias": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, "qk_norm": True},
    "biased": {"model_type": "llama", "attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
}


def tiny(family: str = "llama", layers: int = 2) -> ModelConfig:
    return ModelConfig(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_layers=layers, num_heads=6, num_kv_heads=2, head_dim=8,
        max_position_embeddings=256, **FAMILIES[family],
    )  # fmt: skip


def run_step(config, rows, *, kv_cache=True, mode):
    """One step of the engine's own transformer under a counting mode; the KV of the context is whatever it is."""
    model = Transformer(config, random_weights(config))
    attention = ContiguousKVCache(config, len(rows), 128, torch.float32) if kv_cache else NoCacheAttention()
    with torch.inference_mode():
        batch = Batch.build([Row(i, c, n) for i, (n, c) in enumerate(rows)], [1] * sum(n for n, _ in rows))
        with mode:
            hidden = model.forward(batch, attention)
            model.logits(hidden if len(hidden) == len(rows) else hidden[batch.last])
    return mode


def sdpa_flops(q, k, v, *args, out_shape=None, **kwargs):
    """2 multiply-adds for each pair, head and channel: q [B, H, n, d], k [B, H, T, d]."""
    return 4 * q[0] * q[1] * q[2] * k[2] * q[3]


def counted_flops(config, rows, kv_cache=True):
    cpu_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch's table has only the GPU ones
    mode = FlopCounterMode(display=False, custom_mapping={cpu_kernel: sdpa_flops})
    return run_step(config, rows, kv_cache=kv_cache, mode=mode).get_total_flops()


STEPS = {
    "prefill": [(7, 0)],
    "decode": [(1, 12)],
    "chunk": [(5, 9)],
    "two prefills": [(7, 0), (4, 0)],
    "decode batch": [(1, 12), (1, 12), (1, 12)],
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_flops_equal_torchs_counter(family, rows):
    config = tiny(family)
    assert cost.total(cost.step(config, rows, "float32", attention="dense")).flops == counted_flops(config, rows)


def test_flops_of_naive_decode_equal_torchs_counter():
    config = tiny()
    ops = cost.step(config, [(9, 0)], "float32", kv_cache=False, attention="dense")
    assert cost.total(ops).flops == counted_flops(config, [(9, 0)], kv_cache=False)


def test_ragged_decode_computes_the_padded_rectangle():
    """The contiguous cache attends all rows to the longest context: what `dense` says of padded rows."""
    config = tiny()
    padded = cost.total(cost.step(config, [(1, 20)] * 3, "float32")).flops
    assert counted_flops(config, [(1, 3), (1, 20), (1, 11)]) == padded


@pytest.mark.parametrize("rows", [[(6, 0)], [(6, 5)], [(1, 9)], [(3, 2), (1, 7), (5, 0)]])
def test_causal_pairs_equal_the_masks_of_the_engine(rows):
    from minillm.attention.causal import causal_mask

    assert cost.attention_pairs(rows) == sum(int(causal_mask(n, n + c).sum()) for n, c in rows)
    assert cost.attention_pairs(rows, "dense") == sum(causal_mask(n, n + c).numel() for n, c in rows)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_bytes_are_those_of_the_tensors(family, dtype):
    config = tiny(family)
    weights = random_weights(config, getattr(torch, dtype))
    assert cost.weight_bytes(config, dtype) == weights.nbytes
    assert cost.parameter_count(config) == sum(t.numel() for t in weights.tensors())
    table = 0 if config.tie_word_embeddings else weights.embed.nbytes
    assert cost.step_weight_bytes(config, dtype) == weights.nbytes - table
    looked_up = 3 * weights.embed[0].nbytes
    assert cost.total(cost.step(config, [(1, 4)] * 3, dtype)).weights == weights.nbytes - table + looked_up


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_transformers_library(family):
    import transformers

    config = tiny(family)
    hf = transformers.AutoConfig.for_model(
        config.model_type, vocab_size=config.vocab_size, hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size, num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads, num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim,
        tie_word_embeddings=config.tie_word_embeddings, mlp_bias=config.mlp_bias,
        **({"attention_bias": True} if config.attention_out_bias else {}),
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(hf)
    assert cost.parameter_count(config) == sum(p.numel() for p in model.parameters())


def test_parameters_of_published_models():
    """Counts from the model cards, to the digits they print."""
    assert cost.parameter_count(preset("smollm2-135m")) == 134_515_008
    assert cost.parameter_count(preset("llama-3.1-8b")) == 8_030_261_248
    assert cost.parameter_count(preset("llama-3.1-70b")) == 70_553_706_496
    assert cost.parameter_count(preset("qwen2.5-0.5b")) == 494_032_768


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_bytes_are_those_of_the_cache(dtype):
    config = tiny()
    cache = ContiguousKVCache(config, 3, 50, getattr(torch, dtype))
    assert 3 * 50 * cost.kv_bytes_per_token(config, dtype) == cache.nbytes
    ops = cost.total(cost.step(config, [(1, 50), (1, 50), (1, 50)], dtype))
    assert ops.kv_read == cache.nbytes
    assert ops.kv_written == 3 * cost.kv_bytes_per_token(config, dtype)


class CallCounter(TorchDispatchMode):
    """Operators that do work. Views are left out; `to` counts, since in bf16 it converts."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view or func is torch.ops.aten.to.dtype:
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["prefill", "decode", "decode batch"])
def test_calls_of_a_layer_are_those_of_the_engine(family, name):
    """What one more layer adds, so that the few calls around the layers do not blur the count."""
    rows = STEPS[name]
    calls = [sum(run_step(tiny(family, n), rows, mode=CallCounter()).calls.values()) for n in (2, 3)]
    modelled = [cost.total(cost.step(tiny(family, n), rows, "float32")).calls for n in (2, 3)]
    assert modelled[1] - modelled[0] == calls[1] - calls[0]
    assert abs(modelled[0] - calls[0]) <= 12  # batch bookkeeping, masks, look-ups of cosines and sines


# Laws ---------------------------------------------------------------------------------------------------------------

configs = st.builds(
    lambda family, layers, kv, group, d: tiny(family).replace(
        num_layers=layers, num_heads=kv * group, num_kv_heads=kv, head_dim=2 * d
    ),
    st.sampled_from(sorted(FAMILIES)), st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.integers(1, 16),
)  # fmt: skip
rows_lists = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 300)), min_size=1, max_size=6)


@given(configs, rows_lists, rows_lists)
@settings(max_examples=60, deadline=None)
def test_batches_add_up_but_weights_are_read_once(config, first, second):
    one, two, both = (cost.total(cost.step(config, rows)) for rows in (first, second, first + second))
    for name in ("flops", "kv_read", "kv_written", "activations_read", "activations_written"):
        assert getattr(both, name) == getattr(one, name) + getattr(two, name)
    assert both.weights == one.weights + two.weights - cost.step_weight_bytes(config, "bfloat16")


@given(configs, st.integers(1, 40), st.integers(0, 200), st.integers(1, 100))
@settings(max_examples=60, deadline=None)
def test_more_context_or_more_tokens_never_cost_less(config, new, context, more):
    base = cost.total(cost.step(config, [(new, context)]))
    longer = cost.total(cost.step(config, [(new, context + more)]))
    wider = cost.total(cost.step(config, [(new + more, context)]))
    assert longer.flops > base.flops
    assert longer.kv_read > base.kv_read
    assert longer.weights == base.weights
    assert wider.flops > base.flops
    assert wider.bytes > base.bytes


@given(configs, st.integers(1, 60), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_chunks_of_a_prefill_do_its_flops(config, first, second):
    """Counted causally, the chunks of a prefill have exactly the attention of the whole (and one row of logits)."""
    whole = cost.total(cost.step(config, [(first + second, 0)]))
    chunks = [cost.step(config, [(first, 0)], logits_rows=0), cost.step(config, [(second, first)])]
    assert sum(cost.total(ops).flops for ops in chunks) == whole.flops


@given(configs, st.integers(1, 40), st.integers(1, 20))
@settings(max_examples=40, deadline=None)
def test_cached_generation_computes_each_token_once(config, prompt, new):
    """The counter of a request moves from 0 to prompt + new - 1, each token by one pass through the linears."""
    steps = cost.cached(config, prompt, new)
    assert len(steps) == new
    assert sum(next(op for op in ops if op.name == "qkv").rows for ops in steps) == prompt + new - 1
    assert sum(next(op for op in ops if op.name == "qkv").rows for ops in cost.naive(config, prompt, new)) == sum(
        prompt + i for i in range(new)
    )
    written = sum(cost.total(ops).kv_written for ops in steps)
    assert written == (prompt + new - 1) * cost.kv_bytes_per_token(config, "bfloat16")


def test_naive_flops_grow_with_the_square_and_cached_ones_do_not():
    config = preset("smollm2-135m")

    def flops(how, new):
        return sum(cost.total(ops).flops for ops in how(config, 1, new))

    assert 3.5 < flops(cost.naive, 400) / flops(cost.naive, 200) < 4.5
    assert 1.9 < flops(cost.cached, 400) / flops(cost.cached, 200) < 2.3


# Mutations: each of these wrong models of cost must be caught by the checks above -------------------------------------


def test_dropping_gqa_from_kv_bytes_is_caught(monkeypatch):
    monkeypatch.setattr(ModelConfig, "kv_size", property(lambda c: c.num_heads * c.head_dim))
    with pytest.raises(AssertionError):
        test_kv_bytes_are_those_of_the_cache("bfloat16")


def test_counting_the_embedding_table_is_caught(monkeypatch):
    monkeypatch.setattr(cost, "step_weight_bytes", cost.weight_bytes)
    with pytest.raises(AssertionError):
        test_weight_bytes_are_those_of_the_tensors("qwen2", "bfloat16")


def test_forgetting_the_causal_half_is_caught(monkeypatch):
    monkeypatch.setattr(cost, "attention_pairs", lambda rows, masked="exact": sum(n * (n + c) for n, c in rows))
    with pytest.raises(AssertionError):
        test_causal_pairs_equal_the_masks_of_the_engine([(6, 0)])
    with pytest.raises(AssertionError):
        test_chunks_of_a_prefill_do_its_flops.hypothesis.inner_test(tiny(), 5, 6)


def test_one_flop_a_multiply_add_is_caught(monkeypatch):
    real = cost.total
    monkeypatch.setattr(cost, "total", lambda ops: cost.Op("total", "linear", flops=real(ops).flops // 2))
    with pytest.raises(AssertionError):
        test_flops_equal_torchs_counter("llama", [(7, 0)])


@pytest.mark.parametrize(
    ("rows", "how"),
    [([], {}), ([(0, 3)], {}), ([(1, -1)], {}), ([(1, 3)], {"kv_cache": False}), ([(1, 3)], {"attention": "sparse"})],
)
def test_wrong_steps_are_refused(rows, how):
    with pytest.raises(MinillmError):
        cost.step(tiny(), rows, **how)


def test_every_preset_has_a_cost():
    for config in PRESETS.values():
        ops = cost.step(config, [(1, 100)])
        assert all(op.flops >= 0 and op.bytes > 0 and op.calls > 0 for op in ops)
        assert len({op.name for op in ops}) == len(ops)
