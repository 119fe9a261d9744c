"""The paged engine on a CUDA card: backends agree, graphs replay what eager steps compute, nothing writes the padding.

Only where there is a card. Random weights: a bare machine has no model.
"""

from __future__ import annotations

import pytest
import torch

from minillm.attention.paged import PagedReference, PagedSDPA
from minillm.attention.triton import TritonAttention, TritonOps
from minillm.cache.paged import PagedCache
from minillm.cache.pool import KVPool
from minillm.config import ModelConfig
from minillm.graphs import DecodeGraphs
from minillm.models.transformer import TorchOps, Transformer
from minillm.models.weights import random_weights
from minillm.request import Request, SamplingParams
from minillm.runner import NaiveRunner, PagedRunner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

SHAPES = {
    "llama": ModelConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=1024, num_layers=3, num_heads=8, num_kv_heads=2,
        head_dim=128, max_position_embeddings=2048,
    ),
    "smollm2": ModelConfig(
        vocab_size=1000, hidden_size=576, intermediate_size=1536, num_layers=3, num_heads=9, num_kv_heads=3,
        head_dim=64, max_position_embeddings=2048,
    ),
    "qwen3": ModelConfig(
        model_type="qwen3", vocab_size=1000, hidden_size=512, intermediate_size=1024, num_layers=3, num_heads=8,
        num_kv_heads=4, head_dim=128, qk_norm=True, max_position_embeddings=2048,
    ),
}  # fmt: skip
TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}  # of the largest logit


def requests(lengths):
    prompts = [[(7 * i + j) % 997 for j in range(n)] for i, n in enumerate(lengths)]
    return [Request(str(i), p, SamplingParams(), 0, max_tokens=64) for i, p in enumerate(prompts)]


def paged(model, backend, kv_dtype="auto", graphs=False, block=16):
    cache = PagedCache(KVPool(model.config, 400, block, model.dtype, kv_dtype, model.device))
    attention = backend(cache.pool)
    return PagedRunner(model, cache, attention, DecodeGraphs(model, attention, 8) if graphs else None)


def logits_of(runner, model, lengths, steps=6):
    """Prompts one by one, then decode steps with forced tokens. Returns every step's logits, in fp32."""
    model.ops = TritonOps() if isinstance(getattr(runner, "attention", None), TritonAttention) else TorchOps()
    group, seen = requests(lengths), []
    runner.start(group)
    seen.append(torch.cat([runner.forward([r]) for r in group]).float())
    for step in range(steps):
        for i, r in enumerate(group):
            r.output_token_ids.append((13 * step + i) % 997)
        seen.append(runner.forward(group).float())
    for r in group:
        runner.finish(r)
    return torch.stack(seen)


def worst(got, want):
    return ((got - want).abs().max() / want.abs().max()).item()


@pytest.fixture(scope="module", params=SHAPES)
def config(request):
    return SHAPES[request.param]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", [PagedReference, PagedSDPA, TritonAttention])
def test_every_backend_equals_recomputing_everything(config, dtype, backend):
    model = Transformer(config, random_weights(config, dtype, "cuda", std=0.05))
    lengths = (1, 15, 16, 17, 300)
    want = logits_of(NaiveRunner(model), model, lengths)
    assert worst(logits_of(paged(model, backend), model, lengths), want) < TOLERANCE[dtype]


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_quantised_cache_is_near(config, kv_dtype):
    model = Transformer(config, random_weights(config, torch.bfloat16, "cuda", std=0.05))
    lengths = (5, 33, 200)
    want = logits_of(paged(model, PagedReference, kv_dtype), model, lengths)
    assert worst(logits_of(paged(model, TritonAttention, kv_dtype), model, lengths), want) < 0.1


def test_replayed_steps_equal_eager_ones(config, monkeypatch):
    monkeypatch.setattr("minillm.graphs.replay_is_faster", lambda eager, replay: True)
    model = Transformer(config, random_weights(config, torch.bfloat16, "cuda", std=0.05))
    for lengths in ((3,), (5, 40, 600), (9, 1, 16, 17, 33, 64, 100)):
        eager = logits_of(paged(model, TritonAttention), model, lengths)
        runner = paged(model, TritonAttention, graphs=True)
        assert worst(logits_of(runner, model, lengths), eager) < 2e-2
        assert any(g is not None for g in runner.graphs.graphs.values())
        assert not runner.cache.pool.k[:, 0].any(), "the padding block was written"


def test_a_graph_kept_by_the_clock_is_kept_for_a_small_step(config):
    model = Transformer(config, random_weights(config, torch.bfloat16, "cuda", std=0.05))
    runner = paged(model, TritonAttention, graphs=True)
    logits_of(runner, model, (5,))
    assert any(g is not None for g in runner.graphs.graphs.values())


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantised_weights_equal_their_own_dequantised_ones(config, scheme):
    from minillm.quant import QuantLinear

    weight = torch.randn(config.q_size, config.hidden_size, device="cuda", dtype=torch.bfloat16) * 0.05
    linear = QuantLinear(weight, None, scheme).pack()
    for rows in (1, 3, 16, 33, 200):
        x = torch.randn(rows, config.hidden_size, device="cuda", dtype=torch.bfloat16)
        want = x.double() @ linear.dequantize().double().t()
        assert worst(linear(x).double(), want) < 2e-2
