"""One suite for every attention backend: whatever the batch, it equals textbook attention over what was written.

A learner's backend passes the same functions: see `conform`.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.attention.backends import make_attention
from minillm.attention.causal import attend
from minillm.attention.invariant import PagedInvariant
from minillm.attention.paged import PagedReference, PagedSDPA
from minillm.attention.protocol import Batch, Row
from minillm.attention.triton import TritonAttention
from minillm.cache.contiguous import ContiguousKVCache
from minillm.cache.pool import KVPool
from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.models.transformer import apply_rope, rope_table

PAGED = {
    "reference": PagedReference,
    "torch": PagedSDPA,
    "triton": TritonAttention,
    "invariant": PagedInvariant,
}
BLOCK = 16
TOLERANCE = {"auto": 2e-5, "int8": 2e-2, "fp8": 8e-2}  # of the largest entry; one scale a token and head


def shape(heads: int = 3, kv_heads: int = 1, head_dim: int = 64) -> ModelConfig:
    return ModelConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=head_dim, max_position_embeddings=512,
    )  # fmt: skip


class Sequences:
    """What every sequence has been told so far, and the truth about it."""

    def __init__(self, config: ModelConfig, count: int, blocks: int, seed: int):
        self.config, self.generator = config, torch.Generator().manual_seed(seed)
        self.k = [
            [torch.empty(config.num_kv_heads, 0, config.head_dim) for _ in range(config.num_layers)]
            for _ in range(count)
        ]
        self.v = [[x.clone() for x in layers] for layers in self.k]
        self.cos, self.sin = rope_table(config, config.max_position_embeddings)
        # Every sequence's blocks are scattered, and none are neighbours on purpose.
        order = torch.randperm(count * blocks, generator=self.generator).add(1).tolist()
        self.tables = [order[i::count] for i in range(count)]

    def share(self, source: int, tokens: int, targets: range) -> None:
        """The targets begin with the source's first `tokens`, and with its blocks, as after a prefix hit."""
        for i in targets:
            for x in (self.k, self.v):
                x[i] = [y[:, :tokens].clone() for y in x[source]]
            self.tables[i][: tokens // BLOCK] = self.tables[source][: tokens // BLOCK]

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator)

    def step(self, backend, new: dict[int, int]) -> float:
        """new: sequence -> tokens of this step. Returns the worst layer's error, relative to the largest entry."""
        c = self.config
        starts = {i: self.k[i][0].shape[1] for i in new}
        used = {i: -(-(starts[i] + n) // BLOCK) for i, n in new.items()}
        rows = [Row(i, starts[i], n, self.tables[i][: used[i]]) for i, n in new.items()]
        batch = Batch.build(rows, [0] * sum(new.values()))
        plan, worst = backend.plan(batch), 0.0
        for layer in range(c.num_layers):
            qkv = self.random(len(batch.token_ids), c.num_heads + 2 * c.num_kv_heads, c.head_dim)
            q, k, v = qkv.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
            cos, sin = self.cos[batch.positions].unsqueeze(1), self.sin[batch.positions].unsqueeze(1)
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
            if hasattr(backend, "rope_write"):
                asked = backend.rope_write(layer, qkv, self.cos, self.sin, batch.positions, plan)
                torch.testing.assert_close(asked, q, atol=1e-5, rtol=1e-5)
            else:
                asked = q
                backend.write(layer, k, v, plan)
            got = backend.forward(layer, asked, plan)
            end = 0
            for i, n in new.items():
                mine = slice(end, end := end + n)
                self.k[i][layer] = torch.cat((self.k[i][layer], k[mine].transpose(0, 1)), dim=1)
                self.v[i][layer] = torch.cat((self.v[i][layer], v[mine].transpose(0, 1)), dim=1)
                want = attend(q[mine].double(), self.k[i][layer].double(), self.v[i][layer].double())
                worst = max(worst, error(got[mine], want))
        return worst


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    difference = (got.double() - want.double()).abs().max().item()
    return difference / want.double().abs().max().item() if math.isfinite(difference) else math.inf


def poison(pool: KVPool) -> None:
    """NaN in every slot but the padding block: reading what was never written shows."""
    for x in (pool.k, pool.v, pool.k_scale, pool.v_scale):
        if x is not None and x.dtype != torch.int8:
            x[:, 1:].copy_(torch.full_like(x[:, 1:].float(), math.nan))


def make(name: str, config: ModelConfig, sequences: int, blocks: int, kv_dtype: str = "auto"):
    if name == "contiguous":
        return ContiguousKVCache(config, sequences, blocks * BLOCK, torch.float32)
    pool = KVPool(config, sequences * blocks, BLOCK, torch.float32, kv_dtype)
    poison(pool)
    return PAGED[name](pool)


SCHEDULES = {
    "prompts, then decode": [{0: 5}, {1: 17}, {2: 1}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}],
    "the edge of a block": [{0: 15, 1: 16, 2: 17}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}],
    "a prompt in chunks": [{0: 7}, {0: 9}, {0: 16}, {0: 3}, {0: 1}],
    "chunks mixed with decode": [{0: 20}, {0: 1, 1: 12}, {1: 8, 0: 1, 2: 33}, {2: 1, 0: 1, 1: 1}],
    "one stream": [{0: 30}, {0: 1}, {0: 1}, {0: 1}],
    "lengths far apart": [{0: 60, 1: 2, 2: 30}, {2: 1, 0: 1, 1: 1}, {1: 1, 0: 1, 2: 1}],
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["contiguous", *PAGED])
def test_any_schedule_equals_textbook_attention(name, schedule):
    config = shape()
    sequences, backend = Sequences(config, 3, 4, seed=1), make(name, config, 3, 4)
    for new in SCHEDULES[schedule]:
        assert sequences.step(backend, new) < TOLERANCE["auto"]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(2, 2, 64), (8, 2, 64), (7, 1, 128), (8, 1, 64), (9, 3, 64), (4, 4, 128)]
)
@pytest.mark.parametrize("name", ["contiguous", *PAGED])
def test_any_grouping_of_heads(name, heads, kv_heads, head_dim):
    config = shape(heads, kv_heads, head_dim)
    sequences, backend = Sequences(config, 2, 2, seed=2), make(name, config, 2, 2)
    for new in ({0: 6, 1: 17}, {0: 1, 1: 1}):
        assert sequences.step(backend, new) < TOLERANCE["auto"]


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("name", PAGED)
def test_a_quantised_cache_is_near_and_no_nearer_than_it_can_be(name, kv_dtype):
    config = shape()
    sequences, backend = Sequences(config, 2, 3, seed=3), make(name, config, 2, 3, kv_dtype)
    errors = [sequences.step(backend, new) for new in ({0: 17, 1: 5}, {0: 1, 1: 1}, {1: 9, 0: 1})]
    assert max(errors) < TOLERANCE[kv_dtype]
    assert max(errors[1:]) > 10 * TOLERANCE["auto"], "this is too exact: the pool does not seem to be quantised"


@settings(max_examples=25)
@given(data=st.data())
@pytest.mark.parametrize("name", ["contiguous", "reference", "torch", "invariant"])
def test_any_drawn_schedule(name, data):
    config = shape()
    count, blocks = 3, 3
    sequences, backend = (
        Sequences(config, count, blocks, data.draw(st.integers(0, 9))),
        make(name, config, count, blocks),
    )
    lengths = [0] * count
    for _ in range(data.draw(st.integers(1, 5))):
        new = {}
        for i in data.draw(st.permutations(range(count))):
            n = min(data.draw(st.sampled_from([0, 1, 1, 2, 15, 16, 17])), blocks * BLOCK - lengths[i])
            if n:
                new[i], lengths[i] = n, lengths[i] + n
        if new:
            assert sequences.step(backend, new) < TOLERANCE["auto"]


SHARED = {  # after sequence 0 has computed a prompt of 70 tokens, of which 1, 2 and 3 share whole blocks
    "all share, one decode step each": (64, [{1: 3, 2: 20, 3: 1}, {0: 1, 1: 1, 2: 1, 3: 1}, {3: 1, 1: 1, 0: 1, 2: 1}]),
    "chunks beside them": (64, [{1: 1, 2: 5, 3: 1}, {4: 9, 1: 1, 0: 1}, {0: 1, 4: 1, 1: 1, 2: 2, 3: 1}]),
    "with strangers": (64, [{4: 40, 1: 2}, {4: 1, 1: 1, 0: 1, 5: 80}, {5: 1, 0: 1, 4: 1, 1: 1}]),
    "too little to be worth it": (32, [{1: 3, 2: 20, 3: 1}, {0: 1, 1: 1, 2: 1, 3: 1}]),
}


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("name", ["reference", "torch"])
def test_sequences_that_share_blocks(name, case, kv_dtype):
    config = shape(6, 2)
    sequences, backend = Sequences(config, 6, 7, seed=5), make(name, config, 6, 7, kv_dtype)
    assert sequences.step(backend, {0: 70}) < TOLERANCE[kv_dtype]
    tokens, steps = SHARED[case]
    sequences.share(0, tokens, range(1, 4))
    for new in steps:
        assert sequences.step(backend, new) < TOLERANCE[kv_dtype]


@pytest.mark.parametrize("neighbours", [False, True])
def test_neighbouring_blocks_are_read_in_place(neighbours):
    config = shape()
    sequences, backend = Sequences(config, 1, 4, seed=6), make("torch", config, 1, 4)
    sequences.tables[0] = [1, 2, 3, 4] if neighbours else [1, 2, 4, 3]
    for n in (40, 1, 1, 9):
        plan = backend.plan(Batch.build([Row(0, 40, 1, sequences.tables[0])], [0]))
        assert (plan.chunks[0].run.views is not None) == neighbours
        assert sequences.step(backend, {0: n}) < TOLERANCE["auto"]


class ReadsAStaleTail(PagedSDPA):
    """The mask forgets that the last block is not full."""

    def plan(self, batch):
        plan = super().plan(batch)
        for group in plan.groups:
            group.mask = torch.zeros_like(group.mask)
        return plan


class LeavesTheTailDirty(PagedSDPA):
    """A block is not cleaned before its first token: 0 times the NaN of an earlier owner."""

    def plan(self, batch):
        plan = super().plan(batch)
        plan.begun = None
        return plan


class CleansWrittenBlocks(PagedSDPA):
    """Every last block is cleaned, not only a new one."""

    def plan(self, batch):
        plan = super().plan(batch)
        plan.begun = torch.tensor([row.blocks[(row.context - 1) // BLOCK] for row in batch.rows])
        return plan


class CountsTheSharedPartTwice(PagedSDPA):
    def plan(self, batch):
        plan = super().plan(batch)
        for group in plan.groups:
            if group.prefix is not None:
                group.prefix.read = lambda layer, read=group.prefix.read: tuple(torch.cat((x, x)) for x in read(layer))
        return plan


class ForgetsTheTable(PagedReference):
    """Blocks are taken to lie one after the other."""

    def plan(self, batch):
        rows = [row._replace(blocks=list(range(row.blocks[0], row.blocks[0] + len(row.blocks)))) for row in batch.rows]
        plan = super().plan(Batch(rows, batch.token_ids, batch.positions, batch.last))
        plan.new_slots = super().plan(batch).new_slots
        return plan


class ForgetsTheScale(PagedSDPA):
    def __init__(self, pool):
        super().__init__(pool)
        self.blocks._scales = [[torch.ones_like(x) for x in layers] for layers in self.blocks._scales]


@pytest.mark.parametrize(
    ("wrong", "kv_dtype"),
    [
        (ReadsAStaleTail, "auto"), (LeavesTheTailDirty, "auto"), (CleansWrittenBlocks, "auto"),
        (CountsTheSharedPartTwice, "auto"), (ForgetsTheTable, "auto"), (ForgetsTheScale, "int8"),
        (ForgetsTheScale, "fp8"),
    ],
)  # fmt: skip
def test_a_wrong_backend_is_noticed(wrong, kv_dtype):
    config = shape()
    pool = KVPool(config, 15, BLOCK, torch.float32, kv_dtype)
    poison(pool)
    sequences, errors = Sequences(config, 3, 5, seed=4), []
    errors.append(sequences.step(PagedSDPA(pool) if wrong is LeavesTheTailDirty else wrong(pool), {0: 66, 1: 37}))
    sequences.share(0, 64, range(2, 3))
    try:
        for new in ({2: 1}, {0: 1, 1: 1, 2: 1}):
            errors.append(sequences.step(wrong(pool), new))
    except IndexError:
        return
    assert max(errors) > TOLERANCE[kv_dtype]


def test_what_the_kernels_cannot_run_is_refused_before_the_first_step(monkeypatch):
    with pytest.raises(
        MinillmError, match="head_dim 16, 32, 64 or 128, this model has 80; use attention_backend='torch'"
    ):
        make("triton", shape(2, 1, 80), 1, 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    pool = make("reference", shape(), 1, 1, "fp8").pool
    monkeypatch.setattr(pool, "k", SimpleNamespace(device=torch.device("cuda"), dtype=pool.k.dtype, shape=pool.k.shape))
    with pytest.raises(MinillmError, match="fp8 pools need a GPU of compute capability 8.9 or newer, this one has 8.0"):
        TritonAttention(pool)


@pytest.mark.parametrize(("head_dim", "backend"), [(64, TritonAttention), (80, PagedSDPA)])
def test_auto_on_a_gpu_is_triton_where_its_kernels_run(head_dim, backend):
    model = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float16, ops=None)
    pool = KVPool(shape(2, 1, head_dim), 1, BLOCK, torch.float16)
    assert type(make_attention("auto", model, pool)) is backend
    assert (model.ops is not None) == (backend is TritonAttention)


def test_a_plan_names_the_slots_of_the_new_tokens():
    backend = make("triton", shape(), 2, 4)
    rows = [Row(0, 15, 3, (5, 2)), Row(1, 33, 1, (7, 1, 3, 8))]  # the second table is longer than it need be
    plan = backend.plan(Batch.build(rows, [0] * 4))
    assert plan.slots.tolist() == [5 * BLOCK + 15, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK + 1]


@pytest.mark.parametrize("name", PAGED)
def test_a_table_that_is_too_short_is_refused(name):
    backend = make(name, shape(), 1, 2)
    with pytest.raises(ValueError, match="needs 2 blocks of 16, its block table has 1"):
        backend.plan(Batch.build([Row(0, 16, 1, (1,))], [0]))
