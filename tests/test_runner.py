"""Rows of the contiguous cache stay dense and never mix, whatever order requests leave in."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.config import ModelConfig
from minillm.models.transformer import Transformer
from minillm.models.weights import random_weights
from minillm.request import Request, SamplingParams
from minillm.runner import CachedRunner, NaiveRunner

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=24, intermediate_size=32, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=4,
    max_position_embeddings=32,
)  # fmt: skip
MODEL = Transformer(CONFIG, random_weights(CONFIG, std=0.3))


def request(prompt: list[int]) -> Request:
    return Request("r", prompt, SamplingParams(), seed=0, max_tokens=16)


@settings(max_examples=40)
@given(data=st.data())
def test_any_leaving_order_gives_the_naive_logits(data):
    token = st.integers(0, CONFIG.vocab_size - 1)
    prompts = data.draw(st.lists(st.lists(token, min_size=1, max_size=8), min_size=1, max_size=5))
    requests = [request(p) for p in prompts]
    runner, naive = CachedRunner(MODEL), NaiveRunner(MODEL)
    runner.start(requests)
    logits = torch.cat([runner.forward([r]) for r in requests])
    running = list(requests)
    for _ in range(6):
        torch.testing.assert_close(logits, naive.forward(running), atol=1e-4, rtol=1e-4)
        for r, t in zip(running, data.draw(st.lists(token, min_size=len(running), max_size=len(running)))):
            r.output_token_ids.append(t)
        for r in data.draw(st.lists(st.sampled_from(running), unique_by=id)):
            runner.finish(r)
            running.remove(r)
        running = data.draw(st.permutations(running))
        if not running:
            break
        logits = runner.forward(running)
        assert all(r.num_computed_tokens == r.num_tokens for r in running)
        assert len(runner.owners) == len(running)


def test_a_cache_that_does_not_move_the_last_row_is_seen(monkeypatch):
    """The mutation: a hole is filled in the table but not in memory. The comparison above must notice."""
    requests = [request([1, 2, 3]), request([4, 5]), request([6, 7, 8, 9])]
    runner = CachedRunner(MODEL)
    runner.start(requests)
    for r in requests:
        runner.forward([r])
        r.output_token_ids.append(1)
    monkeypatch.setattr(runner.cache, "move", lambda *_: None)
    runner.finish(requests[0])
    rest = requests[1:]
    assert (runner.forward(rest) - NaiveRunner(MODEL).forward(rest)).abs().max() > 1e-2
