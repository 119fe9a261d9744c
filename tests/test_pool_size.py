"""How many blocks an engine takes: of a device of its own, and of one that engines share (`minillm serve --split`)."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace

import pytest
import torch

from minillm.cache import build
from minillm.cache.pool import block_bytes
from minillm.config import ModelConfig
from minillm.engine_config import EngineConfig
from minillm.errors import MinillmError

SHAPES = ModelConfig(
    vocab_size=64, hidden_size=4096, intermediate_size=48, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    max_position_embeddings=131072,
)  # fmt: skip
BLOCK = block_bytes(SHAPES, 16, 2, "auto")
GB = 1 << 30


class Card:
    """A GPU of so many bytes, on which engines read their weights and take their pools."""

    def __init__(self, monkeypatch, total):
        self.total, self.weights, self.pools, self.of = total, {}, {}, ""
        monkeypatch.setattr(build, "free_memory", lambda device: self.free)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, self.total))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.weights.get(self.of, 0))
        monkeypatch.setattr(build, "KVPool", lambda config, blocks, *_: blocks)

    @property
    def free(self):
        return self.total - sum(self.weights.values()) - sum(self.pools.values())

    def read(self, name, size):
        self.weights[name] = size
        assert self.free >= 0, f"the weights of {name} do not fit beside {self.pools}"

    def pool(self, name, max_len=131072, device="cuda", ranks=None, **options):
        self.of = name
        model = SimpleNamespace(config=SHAPES, dtype=torch.bfloat16, device=torch.device(device), max_len=max_len)
        blocks = build.make_pool(model, EngineConfig(**options), ranks)
        self.pools[name] = blocks * BLOCK
        return blocks


def orders(count):
    """Of reading weights and taking a pool, for so many engines, each in its order."""
    steps = [(i, what) for i in range(count) for what in ("read", "pool")]
    for order in permutations(steps):
        if all(order.index((i, "read")) < order.index((i, "pool")) for i in range(count)):
            yield order


@pytest.mark.parametrize(("engines", "weights", "total"), [(2, 16, 48), (2, 22, 48), (3, 15, 48), (2, 1, 48)])
def test_engines_that_share_a_card_fit_whoever_looks_first(monkeypatch, engines, weights, total):
    for order in orders(engines):
        card = Card(monkeypatch, total * GB)
        for i, what in order:
            if what == "read":
                card.read(i, weights * GB)
            else:
                card.pool(i, engines_on_device=engines)
        room = (total - engines * weights) * GB
        assert sum(card.pools.values()) <= room // 2
        assert min(card.pools.values()) >= room // 2 // engines // 2, "whoever is last gets a part too"


def test_a_part_of_a_card_is_a_bound_and_not_what_is_taken(monkeypatch):
    card = Card(monkeypatch, 140 * GB)
    card.read("p", 1 * GB)
    assert card.pool("p", max_len=1024, max_num_seqs=4, engines_on_device=2) == 4 * 1024 // 16


def test_what_was_asked_for_is_not_divided(monkeypatch):
    card = Card(monkeypatch, 48 * GB)
    for name in "pd":
        card.read(name, 1 * GB)
    assert [card.pool(name, kv_cache_memory_bytes=22 * GB) for name in "pd"] == [22 * GB // BLOCK] * 2


def test_memory_that_engines_and_ranks_share_is_divided_by_both(monkeypatch):
    card = Card(monkeypatch, 12 * GB)
    ranks = SimpleNamespace(place=SimpleNamespace(world=2), least=lambda blocks: blocks)
    assert card.pool("p", device="cpu", engines_on_device=3, ranks=ranks) == 12 * GB // 2 // (2 * 3) // BLOCK


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"num_kv_blocks": 10**6}, "lower num_kv_blocks"),
        ({"kv_cache_memory_bytes": 40 * GB}, "lower kv_cache_memory_bytes"),
        ({}, "no block .* quantized weights"),
        ({"engines_on_device": 2}, "one of 2 engines .* give each a card"),
    ],
)
def test_a_refusal_advises_what_helps(monkeypatch, given, advice):
    card = Card(monkeypatch, 48 * GB)
    card.read("d", 48 * GB - BLOCK)
    with pytest.raises(MinillmError, match=advice) as raised:
        card.pool("d", **given)
    assert "max_num_seqs" not in str(raised.value)


@pytest.mark.parametrize("asked", [{"num_kv_blocks": 8}, {"kv_cache_memory_bytes": GB}, {"kv_cache": "none"}])
def test_a_divisor_that_would_be_ignored_is_refused(asked):
    with pytest.raises(MinillmError, match="engines_on_device"):
        EngineConfig(engines_on_device=2, **asked)
