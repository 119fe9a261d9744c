"""The batch-invariant mode: a request's logits are the same bits alone, in any company, in any chunks, from any blocks.

Every property here is also asked of the fast path, or of a mode with one piece taken out, and must fail there.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import SamplingParams
from minillm.attention.invariant import KEYS, QUERIES, PagedInvariant
from minillm.attention.paged import PagedSDPA
from minillm.attention.protocol import Batch, Row
from minillm.cache.pool import KVPool
from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.models import invariant
from minillm.models.invariant import InvariantLinear, InvariantOps, RowByRow, agreeing_sizes, make_invariant
from minillm.models.linear import Linear
from minillm.models.transformer import TorchOps, Transformer, rms_norm, swiglu
from minillm.models.weights import load_weights, random_weights
from minillm.quant import quantize_model
from minillm.request import Request
from minillm.sampler import Sampler

CONFIG = ModelConfig(
    vocab_size=211, hidden_size=96, intermediate_size=200, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=32,
    max_position_embeddings=256,
)  # fmt: skip
POOL_BLOCKS = 64


def model(dtype=torch.float32, pack=True, config=CONFIG) -> Transformer:
    return Transformer(config, random_weights(config, std=0.2, dtype=dtype), max_len=256, pack=pack)


MODELS = {
    "fp32 packed": lambda: make_invariant(model()),
    "fp32 plain": lambda: make_invariant(model(pack=False)),
    "bf16 packed": lambda: make_invariant(model(torch.bfloat16)),
    "bf16 plain": lambda: make_invariant(model(torch.bfloat16, pack=False)),
    "bf16 int8": lambda: make_invariant(quantize_model(model(torch.bfloat16, pack=False), "int8")),
}


@pytest.fixture(scope="module")
def made():
    """name -> model, each made once."""
    cache: dict[str, Transformer] = {}

    def make(name: str) -> Transformer:
        if name not in cache:
            cache[name] = MODELS[name]()
        return cache[name]

    return make


# The property ---------------------------------------------------------------------------------------------------------


class Run:
    """Some sequences in one pool, advanced by chunks; keeps the logits of every token of sequence 0."""

    def __init__(self, model, backend, sequences: list[list[int]], seed: int, block_size: int = 16, kv_dtype="auto"):
        self.model, self.sequences = model, sequences
        self.pool = KVPool(model.config, POOL_BLOCKS, block_size, model.dtype, kv_dtype)
        self.backend = backend(self.pool)
        self.free = list(range(1, POOL_BLOCKS + 1))
        random.Random(seed).shuffle(self.free)
        self.tables: list[list[int]] = [[] for _ in sequences]
        self.done = [0] * len(sequences)
        self.logits: list[torch.Tensor] = []

    def step(self, new: dict[int, int]) -> None:
        """new: sequence -> tokens of this step, in the order of the batch."""
        rows, ids = [], []
        for i, n in new.items():
            while len(self.tables[i]) * self.pool.block_size < self.done[i] + n:
                self.tables[i].append(self.free.pop())
            rows.append(Row(i, self.done[i], n, self.tables[i]))
            ids += self.sequences[i][self.done[i] : self.done[i] + n]
            self.done[i] += n
        batch = Batch.build(rows, ids)
        logits = self.model.logits(self.model.forward(batch, self.backend))
        for (i, _), own in zip(new.items(), batch.slices, strict=True):
            if i == 0:
                self.logits.append(logits[own])

    def preempt(self) -> None:
        """Sequence 0 loses its blocks and starts again, in others."""
        self.free = self.tables[0][::-1] + self.free
        self.tables[0], self.done[0], self.logits = [], 0, []

    def result(self) -> torch.Tensor:
        return torch.cat(self.logits)


def alone(model, backend, tokens: list[int], **options) -> torch.Tensor:
    """Logits [len(tokens), V] of one sequence in one chunk."""
    run = Run(model, backend, [tokens], seed=0, **options)
    run.step({0: len(tokens)})
    return run.result()


@st.composite
def schedules(draw):
    """(sequences, steps, block size, seed): sequence 0 is the one that is looked at. A step of None is a preemption."""
    lengths = draw(st.lists(st.integers(1, 2 * KEYS + 5), min_size=1, max_size=4))
    seed = draw(st.integers(0, 99))
    token = random.Random(seed)
    sequences = [[token.randrange(CONFIG.vocab_size) for _ in range(n)] for n in lengths]
    left, steps, preempted = list(lengths), [], False
    while left[0]:
        if not preempted and draw(st.integers(0, 9)) == 9:
            left[0], preempted = lengths[0], True
            steps.append(None)
        new = {}
        for i in draw(st.permutations(range(len(lengths)))):
            n = min(draw(st.sampled_from([150, 1, 1, 2, 15, 16, 17, 40, KEYS, 0])), left[i])
            if n:
                new[i], left[i] = n, left[i] - n
        if new:
            steps.append(new)
    return sequences, steps, draw(st.sampled_from([8, 16, 32])), seed


def difference(model, backend, case, kv_dtype="auto") -> float:
    """The largest difference between the logits of sequence 0 alone and in this schedule; 0.0 where no bit differs."""
    sequences, steps, block_size, seed = case
    run = Run(model, backend, sequences, seed, block_size, kv_dtype)
    for new in steps:
        if new is None:
            run.preempt()
        else:
            run.step(new)
    want = alone(model, backend, sequences[0], kv_dtype=kv_dtype)
    got = run.result()
    return 0.0 if torch.equal(got, want) else (got.double() - want.double()).abs().max().item()


@settings(max_examples=25)
@given(case=schedules())
@pytest.mark.parametrize("name", MODELS)
def test_any_chunks_company_order_blocks_and_preemption_give_the_same_bits(name, case, made):
    assert difference(made(name), PagedInvariant, case) == 0.0


@settings(max_examples=15)
@given(case=schedules())
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_quantised_cache_too(kv_dtype, case, made):
    assert difference(made("fp32 packed"), PagedInvariant, case, kv_dtype) == 0.0


@pytest.mark.parametrize("family", ["llama-bias", "qwen2", "qwen3", "llama3-rope"])
def test_every_family(family, tiny_folder):
    folder = tiny_folder(family)
    config = ModelConfig.from_folder(folder)
    switched = make_invariant(Transformer(config, load_weights(folder, config, torch.float32), pack=True))
    for case in fixed_cases(4):
        assert difference(switched, PagedInvariant, case) == 0.0


def fixed_cases(count: int) -> list:
    """Schedules that no test draws: a prompt in two chunks and single tokens, beside a prompt and decode tokens."""
    cases = []
    for seed in range(count):
        draw = random.Random(seed)
        sequences = [[draw.randrange(200) for _ in range(n)] for n in (70 + seed, 40, 90, 3)]
        cut = draw.randint(1, 60)
        steps = [
            {1: 39, 3: 2},
            {2: 30, 0: cut, 3: 1},
            {0: len(sequences[0]) - cut - 2, 1: 1, 2: 59},
            {0: 1, 2: 1},
            {0: 1},
        ]
        cases.append((sequences, steps, 16, seed))
    return cases


def test_two_threads_keep_the_property_and_the_fast_path_still_has_it_not():
    torch.set_num_threads(2)  # the suite has one; the sizes of products that agree are found at the threads there are
    try:
        for dtype in (torch.float32, torch.bfloat16):
            assert any(difference(model(dtype), PagedSDPA, case) > 0.0 for case in fixed_cases(3))
            switched = make_invariant(model(dtype))
            assert all(difference(switched, PagedInvariant, case) == 0.0 for case in fixed_cases(3))
    finally:
        torch.set_num_threads(1)


def test_equal_prefixes_write_equal_bits(made):
    """What lets a cached prefix stand for a computed one: its keys and values do not tell who computed them."""
    run = Run(made("bf16 packed"), PagedInvariant, [list(range(48)) + [7] * 9, list(range(48)) + [9] * 30], seed=3)
    run.step({1: 33})
    run.step({0: 57, 1: 45})
    first, second = (run.tables[i][:3] for i in (0, 1))
    for stored in (run.pool.k, run.pool.v):
        assert torch.equal(stored[:, first], stored[:, second])
        assert not torch.equal(stored[:, first[0]], stored[:, first[1]])


def test_a_poisoned_companion_is_alone_with_its_nan(made):
    switched = made("fp32 packed")
    tokens = [3, 1, 4, 1, 5, 9, 2, 6] * 5
    want = alone(switched, PagedInvariant, tokens)
    run = Run(switched, PagedInvariant, [tokens, [5] * 40], seed=1)
    run.step({1: 20})
    run.pool.v[:, run.tables[1][0]] = torch.nan
    run.step({1: 1, 0: 39})
    run.step({0: 1, 1: 1})
    assert torch.equal(run.result(), want)


# The same property, asked of what does not have it --------------------------------------------------------------------


def worst(model, backend) -> float:
    return max(difference(model, backend, case) for case in fixed_cases(6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fast_path_does_not_have_the_property_and_is_near(dtype):
    found = worst(model(dtype), PagedSDPA)
    assert 0.0 < found < (1e-3 if dtype == torch.float32 else 1.0)


def test_each_piece_is_needed_attention():
    assert worst(make_invariant(model()), PagedSDPA) > 0.0


def test_each_piece_is_needed_linears():
    switched = model()
    switched.ops = InvariantOps()
    assert worst(switched, PagedInvariant) > 0.0, "one row and several take different kernels in fp32"


class BatchedMean(TorchOps):
    """The mistake of a norm that adds in another order when few rows come."""

    def rms_norm(self, x, weight, eps):
        if len(x) < 8:
            x = x.float()
            return x * torch.rsqrt(x.square().flip(-1).cumsum(-1)[..., -1:] / x.shape[-1] + eps) * weight
        return rms_norm(x, weight, eps)


def test_each_piece_is_needed_norms():
    switched = make_invariant(model())
    switched.ops = BatchedMean()
    assert worst(switched, PagedInvariant) > 0.0


class TilesFromTheChunk(PagedInvariant):
    """The mistake of counting key tiles from the chunk's end."""

    def plan(self, batch):
        plan = super().plan(batch)
        shift = batch.rows[0].num_new % 7
        plan.keys = [torch.roll(keys, shift, 1) for keys in plan.keys]
        plan.hidden = [torch.roll(hidden, shift, 1) for hidden in plan.hidden]
        return plan


def test_each_piece_is_needed_fixed_tiles():
    assert 0.0 < worst(make_invariant(model()), TilesFromTheChunk) < 1e-3, "the sums are right, their order moves"


# The pieces -----------------------------------------------------------------------------------------------------------


def test_exp_is_exact_to_a_rounding_or_two_and_blind_to_shape():
    x = torch.linspace(-86.9, 87.9, 100_003)
    want = x.double().exp()
    assert ((invariant.exp(x).double() - want).abs() / want).max() < 2e-7
    edges = invariant.exp(torch.tensor([0.0, -0.0, -torch.inf, -88.0, torch.inf]))
    assert edges[:4].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert 1e38 < edges[4] < torch.inf
    assert invariant.exp(torch.tensor(torch.nan)).isnan()
    parts = torch.cat([invariant.exp(part) for part in x[:2000].split(7)])
    assert torch.equal(parts, invariant.exp(x)[:2000])
    # The series one term shorter is outside of the bound.
    short = sum(c * (x / 300) ** i for i, c in enumerate(reversed(invariant.INVERSE_FACTORIALS[3:])))
    assert ((short.double() - (x / 300).double().exp()).abs() / (x / 300).double().exp()).max() > 2e-7


@given(st.integers(1, 70), st.integers(0, 9))
def test_total_is_the_sum(n, seed):
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(invariant.total(x).double(), x.double().sum(-1, keepdim=True), atol=1e-5, rtol=1e-6)
    assert torch.equal(invariant.total(x)[1], invariant.total(x[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_are_the_plain_ones_within_rounding(dtype):
    g = torch.Generator().manual_seed(0)
    x, w, gate_up = (torch.randn(s, generator=g).to(dtype) for s in ((5, 3, 33), (33,), (5, 66)))
    ops, close = (
        InvariantOps(),
        {"atol": 1e-6, "rtol": 2e-6} if dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2},
    )
    torch.testing.assert_close(ops.rms_norm(x, w, 1e-5), rms_norm(x, w, 1e-5), **close)
    torch.testing.assert_close(ops.swiglu(gate_up), swiglu(gate_up), **close)
    got, added = ops.add_rms_norm(x, x, w, 1e-5)
    torch.testing.assert_close(got, rms_norm(x + x, w, 1e-5), **close)
    assert torch.equal(added, x + x)
    extreme = torch.tensor([[-1e4, 1e4, -90.0, 0.0, 1.0, 1.0, 1.0, 1.0]], dtype=dtype)
    torch.testing.assert_close(ops.swiglu(extreme), F.silu(extreme[:, :4]), atol=1e-30, rtol=1e-2)


class Fake(Linear):
    """A linear with a mistake that `agreeing_sizes` has to find."""

    def __init__(self, wrong):
        super().__init__(torch.randn(96, 64, generator=torch.Generator().manual_seed(0)))
        self.wrong = wrong

    def __call__(self, x):
        # One product a row, so that nothing but the deliberate mistake depends on the others.
        y = torch.cat([F.linear(row, self.weight) for row in x.split(1)])
        return self.wrong(x, y)


def nudge(y: torch.Tensor) -> torch.Tensor:
    """One bit of one output."""
    y[..., 5] = torch.nextafter(y[..., 5], torch.tensor(torch.inf))
    return y


def last_row(x, y):
    nudge(y[-1:])
    return y


def few_rows(x, y):
    return nudge(y) if len(x) < 16 else y


def many_rows(x, y):
    return nudge(y) if len(x) > 16 else y


def neighbours(x, y):
    return nudge(y) if len(x) > 1 and x[0].sum() > 0 else y


@pytest.mark.parametrize(
    ("wrong", "sizes"),
    [
        (lambda x, y: y, (4, 16, 32)),
        (last_row, (1,)),
        (few_rows, (16, 32)),
        (many_rows, (32,)),
        (neighbours, (1,)),
    ],
)
def test_sizes_that_do_not_agree_are_found(wrong, sizes):
    assert agreeing_sizes(Fake(wrong), torch.float32) == sizes


@pytest.mark.parametrize("sizes", [(1,), (4, 16, 32), (8,)])
def test_tiles_take_any_number_of_rows(sizes):
    seen = []

    class Counting(Linear):
        def __call__(self, x):
            seen.append(len(x))
            return super().__call__(x)

    linear = Counting(torch.randn(5, 7), torch.randn(5))
    tiled = InvariantLinear(linear, sizes)
    for n in (0, 1, 3, 4, 5, 31, 32, 33, 70):
        x = torch.randn(n, 7)
        torch.testing.assert_close(tiled(x), F.linear(x, linear.weight, linear.bias), atol=1e-5, rtol=1e-5)
    assert set(seen) <= set(sizes)


def test_twice_is_once():
    switched = make_invariant(model())
    first = switched.layers[0].qkv
    assert make_invariant(switched).layers[0].qkv is first
    assert type(first.inner) is Linear


def test_attention_equals_the_textbook_on_tiles_of_any_fill():
    """Lengths around the edges of both tiles, alone in a step and together."""
    switched, plain = make_invariant(model()), model()
    lengths = [1, QUERIES - 1, QUERIES, QUERIES + 1, KEYS - 1, KEYS, KEYS + 1, 2 * KEYS + 1]
    for n in lengths:
        tokens = [(7 * i + n) % 200 for i in range(n)]
        want = alone(plain, PagedSDPA, tokens)
        torch.testing.assert_close(alone(switched, PagedInvariant, tokens), want, atol=1e-3, rtol=1e-3)


# Sampling -------------------------------------------------------------------------------------------------------------


def requests(count: int) -> list[Request]:
    kinds = itertools.cycle(
        [
            SamplingParams(logprobs=3),
            SamplingParams(temperature=0.8, top_p=0.9, logprobs=2),
            SamplingParams(temperature=1.0, top_k=7),
            SamplingParams(temperature=1.3, min_p=0.02, logprobs=0),
        ]
    )
    return [Request(str(i), [1, 2], p, seed=i, max_tokens=4) for i, p in zip(range(count), kinds)]


def test_row_by_row_gives_a_row_the_same_answer_in_any_batch():
    logits = torch.randn(9, 501, generator=torch.Generator().manual_seed(0)) * 4
    asked, sampler = requests(9), RowByRow(Sampler())
    tokens, logprobs = sampler.sample(logits, asked)
    for i in range(9):
        assert sampler.sample(logits[i : i + 1], asked[i : i + 1]) == ([tokens[i]], [logprobs[i]])
    assert tokens == Sampler().sample(logits, asked)[0]
    order = [4, 0, 8, 2]
    assert sampler.sample(logits[order], [asked[i] for i in order]) == (
        [tokens[i] for i in order], [logprobs[i] for i in order]
    )  # fmt: skip


def test_row_by_row_hides_the_batch_from_a_sampler():
    class Counts:
        def sample(self, logits, requests):
            return [len(logits)] * len(logits), [None] * len(logits)

    logits = torch.zeros(3, 5)
    assert Counts().sample(logits, requests(3))[0] == [3, 3, 3]
    assert RowByRow(Counts()).sample(logits, requests(3))[0] == [1, 1, 1]


@pytest.mark.parametrize("result", [None, [1], ([1, 2], [None, None]), ([1], [])])
def test_row_by_row_judges_what_a_sampler_returns(result):
    class Wrong:
        def sample(self, logits, requests):
            return result

    with pytest.raises(MinillmError, match="for one request; got"):
        RowByRow(Wrong()).sample(torch.zeros(2, 5), requests(2))


# The real model -------------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_embedded_model(embedded_folder, tokenizer):
    config = ModelConfig.from_folder(embedded_folder)
    real = Transformer(config, load_weights(embedded_folder, config, torch.float32), 256, pack=True)
    texts = [
        "The capital of France is Paris, and the",
        "Once upon a time there was",
        "def fib(n):\n    return fib(n - 1)",
    ]
    sequences = [tokenizer.encode(t) for t in texts]
    n = len(sequences[0])
    case = (sequences, [{1: 4, 0: 3}, {2: 5, 0: n - 5, 1: 1}, {0: 1, 2: 1}, {0: 1}], 16, 5)
    assert difference(real, PagedSDPA, case) > 0.0
    fast = alone(real, PagedSDPA, sequences[0])
    make_invariant(real)
    assert difference(real, PagedInvariant, case) == 0.0
    torch.testing.assert_close(alone(real, PagedInvariant, sequences[0]), fast, atol=1e-3, rtol=1e-3)
