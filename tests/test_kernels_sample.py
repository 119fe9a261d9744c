"""Greedy and Gumbel-max in Triton: the sampler's tokens, the same bits of noise, rows that are no distribution."""

import contextlib
import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Guarded, guarded_outputs, traffic_of
from minillm.kernels import sample as module
from minillm.kernels.sample import (
    NO_TOKEN,
    best_tiled,
    greedy,
    greedy_bytes,
    greedy_reference,
    gumbel_bytes,
    gumbel_reference,
    gumbel_sample,
    scores_reference,
)
from minillm.kernels.triton_private import compile_ahead, jit, tl

from minillm import rng, sampler
from minillm.course.broken import broken, mutants
from minillm.errors import MinillmError
from minillm.request import Request, SamplingParams

BLOCK = 32  # of the vocabulary, so that small tests have many
EXTREME = [0.0, -0.0, 1.0, -1.0, 3.5, 60000.0, -60000.0, math.inf, -math.inf, math.nan]
TEMPERATURES = [0.0, 1e-6, 0.1, 0.7, 1.0, 2.0, 100.0]


@contextlib.contextmanager
def blocks_of(block):
    with mock.patch.object(module, "pick", return_value={"BLOCK": block, "num_warps": 4, "num_stages": 1}):
        yield


def logits_of(values, vocab, dtype, gap=3):
    """Rows of V logits in a buffer of NaN, with gaps between them."""
    x = Guarded(len(values), vocab, dtype=dtype, gap=gap)
    x.fill(torch.tensor(values, dtype=torch.float64).view(len(values), vocab))
    return x.tensor


@st.composite
def rows(draw, elements):
    count, vocab = draw(st.integers(0, 3)), draw(st.sampled_from([1, 2, 31, 32, 33, 64, 97]))
    seed = draw(st.integers(0, 2**20))
    chosen = draw(st.lists(st.sampled_from(elements), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(seed)
    if draw(st.booleans()):  # few different values: many ties
        index = torch.randint(len(chosen), (count, vocab), generator=generator)
        values = torch.tensor(chosen, dtype=torch.float64)[index]
    else:
        values = torch.randn(count, vocab, generator=generator, dtype=torch.float64) * 4
        for row in range(count):  # an extreme value here and there
            at = torch.randint(vocab, (len(chosen),), generator=generator)
            values[row, at] = torch.tensor(chosen, dtype=torch.float64)
    return logits_of(values.tolist(), vocab, draw(st.sampled_from([torch.float16, torch.float32])))


@settings(max_examples=25)
@given(rows(EXTREME))
def test_greedy_is_the_sampler_s(logits):
    with blocks_of(BLOCK), guarded_outputs() as outputs:
        got = greedy(logits)
    assert got.dtype == torch.int64
    assert got.tolist() == sampler.greedy(logits) == greedy_reference(logits).tolist()
    assert got.tolist() == best_tiled(logits, BLOCK)[2].tolist()
    for output in outputs:
        output.check()


def test_greedy_in_blocks_of_the_table():
    logits = torch.randn(2, 9001, generator=torch.Generator().manual_seed(3))
    logits[0, 9000] = logits[1, [4096, 8191]] = 50.0
    assert greedy(logits).tolist() == [9000, 4096]


@jit
def _noise(IDS, KEYS, BITS, NOISE, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    token = tl.load(IDS + i).to(tl.uint32, bitcast=True)
    low = tl.load(KEYS).to(tl.uint32, bitcast=True)
    high = tl.load(KEYS + 1).to(tl.uint32, bitcast=True)
    bits = module.mix32(module.mix32(token ^ low) ^ high)
    tl.store(BITS + i, bits.to(tl.int32, bitcast=True))
    tl.store(NOISE + i, module.gumbel_noise(token, low, high))


def noise(ids, key):
    bits, made = torch.empty_like(ids), torch.empty(len(ids))
    _noise[(1,)](ids, key, bits, made, COUNT=len(ids))
    return bits, made


def wrong_noise(seed=0, position=0, first=0):
    """How the kernel's noise differs from rng's, in words; None where it does not."""
    ids, keys = torch.arange(first, first + 4096, dtype=torch.int32), rng.keys([(seed, position)])
    bits, made = noise(ids, keys)
    if not torch.equal(bits, rng._mix32(rng._mix32(ids ^ keys[:, :1]) ^ keys[:, 1:])[0]):
        return "bits"
    want = rng.gumbel(keys, ids)[0]
    return None if bool(((made - want).abs() <= 2e-6 * want.abs().clamp_min(1)).all()) else "noise"


@settings(max_examples=10)
@given(st.integers(0, 2**63), st.integers(0, 2**20), st.integers(0, 2**18))
def test_the_hash_has_the_bits_of_rng(seed, position, first):
    assert wrong_noise(seed, position, first) is None


def test_noise_keeps_its_digits_where_it_is_largest():
    """2^18 tokens: the smallest u is near 2^-18, where log(1 - u) has lost a third of its digits and log1p(-u) none."""
    worst, largest = 0.0, -math.inf
    for first in range(0, 2**18, 2**15):
        ids, keys = torch.arange(first, first + 2**15, dtype=torch.int32), rng.keys([(1, 1)])
        made, want = noise(ids, keys)[1], rng.gumbel(keys, ids)[0]
        worst = max(worst, float(((made - want).abs() / want.abs().clamp_min(1)).max()))
        largest = max(largest, float(want.max()))
    assert largest > 11
    assert worst < 2e-6


def disagreements(logits, keys, temperature, got):
    """Rows whose token is not the reference's, nor as good: logarithms that round differently may swap near equals."""
    want, scores = gumbel_reference(logits, keys, temperature), scores_reference(logits, keys, temperature)
    return [
        row for row in range(len(logits))
        if got[row] != want[row]
        and not (got[row] >= 0 and temperature[row] > 0
                 and float(scores[row, want[row]] - scores[row, got[row]]) < 1e-5)
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy says what inf and NaN do
@settings(max_examples=25)
@given(rows(EXTREME), st.data())
def test_gumbel_draws_the_reference_s_tokens(logits, data):
    count = len(logits)
    draws = data.draw(st.lists(st.tuples(st.integers(0, 2**63), st.integers(0, 999)), min_size=count, max_size=count))
    temperature = torch.tensor(data.draw(st.lists(st.sampled_from(TEMPERATURES), min_size=count, max_size=count)))
    keys, temperature = rng.keys(draws), temperature.float()
    with blocks_of(BLOCK), guarded_outputs() as outputs:
        got = gumbel_sample(logits, keys, temperature)
    assert disagreements(logits, keys, temperature, got) == []
    assert [t == NO_TOKEN for t in got.tolist()] == [t == NO_TOKEN for t in sampler.greedy(logits)]
    for output in outputs:
        output.check()


def test_the_tokens_of_the_sampler():
    """A mixed batch: greedy requests and random ones, none of them filtered."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(14, 300, generator=generator) * 3
    requests = [
        Request(f"r{i}", [0] * (1 + i % 5), SamplingParams(temperature=TEMPERATURES[i % len(TEMPERATURES)]), seed=i)
        for i in range(len(logits))
    ]
    want, _ = sampler.Sampler().sample(logits, requests)
    keys = rng.keys((r.seed, r.num_tokens) for r in requests)
    with blocks_of(256):
        got = gumbel_sample(logits, keys, torch.tensor([r.params.temperature for r in requests]))
    assert got.tolist() == want


def test_temperature_zero_is_greedy_and_small_ones_still_draw():
    logits, keys = torch.full((8, 40), 12.0), rng.keys((1, i) for i in range(8))
    with blocks_of(64):
        assert gumbel_sample(logits, keys, torch.zeros(8)).tolist() == [0] * 8
        assert len(set(gumbel_sample(logits, keys, torch.full((8,), 1e-6)).tolist())) > 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("vocab", [32, 97])
def test_traffic_is_the_analytic_one(dtype, vocab):
    logits, keys, temperature = torch.randn(3, vocab).to(dtype), rng.keys([(0, i) for i in range(3)]), torch.ones(3)
    with blocks_of(BLOCK):
        traffic = traffic_of(lambda: greedy(logits))
        assert (traffic.loaded, traffic.stored) == greedy_bytes(3, vocab, dtype.itemsize, BLOCK)
        traffic = traffic_of(lambda: gumbel_sample(logits, keys, temperature))
        assert (traffic.loaded, traffic.stored) == gumbel_bytes(3, vocab, dtype.itemsize, BLOCK)


def report():
    """Everything that a mutant could turn wrong, as a list of what is."""
    generator = torch.Generator().manual_seed(9)
    found = [wrong_noise()] if wrong_noise() else []
    hard = torch.randn(6, 97, generator=generator) - 50.0  # all negative: a masked-out 0 would win
    hard[0, [40, 50]] = -1.0  # a tie
    hard[1, 96] = -1.0  # the last token
    hard[2, 33] = math.nan
    hard[3, 64:] = -math.inf
    hard[4] = -math.inf
    with blocks_of(64):
        found += ["greedy"] if greedy(hard).tolist() != sampler.greedy(hard) else []
        logits = torch.randn(6, 97, generator=generator) * 2 + 40
        logits[:2] = 40.0  # equals: only the noise decides
        keys, temperature = rng.keys((3, i) for i in range(6)), torch.tensor([1e-6, 1e-6, 0.3, 0.3, 3.0, 3.0])
        got = gumbel_sample(logits, keys, temperature)
        found += ["gumbel"] if disagreements(logits, keys, temperature, got) else []
    return found


@pytest.mark.parametrize("name", [n for n in mutants("sample") if n != "sample/int32_offset"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_wrong_kernel_is_noticed(name):
    assert report() == []
    with broken(name):
        assert report() != []
    assert report() == []


def test_offsets_have_64_bits():
    """Row 2 starts past 2^31 elements. Only the pages of the rows are ever touched, so this needs no memory."""
    vocab, stride = 40, 2**30 + 16
    x = torch.empty(2 * stride + vocab, dtype=torch.float16).as_strided((3, vocab), (stride, 1))
    x.copy_(torch.randn(3, vocab, generator=torch.Generator().manual_seed(0)))
    keys, temperature = rng.keys([(0, i) for i in range(3)]), torch.ones(3)
    assert greedy(x).tolist() == sampler.greedy(x.contiguous())
    assert disagreements(x.contiguous(), keys, temperature, gumbel_sample(x, keys, temperature)) == []


def test_an_offset_of_32_bits_is_seen_in_the_compiled_code():
    def wide(name) -> bool:
        ahead = next(a for a in module.AHEAD if a.kernel.__name__ == name)
        ir = compile_ahead(getattr(module, name), ahead.signature, ahead.constants, "sm_90").asm["ttir"].splitlines()
        return any("arith.extsi" in line and "%stride : i32" in line for line in ir)

    assert wide("_best_of_block")
    assert wide("_best_noisy_of_block")
    with broken("sample/int32_offset"):
        assert not wide("_best_of_block")


def test_bad_input_is_refused_in_words():
    x, keys, t = torch.randn(2, 8), rng.keys([(0, 0), (0, 1)]), torch.ones(2)
    for call, words in (
        (lambda: greedy(torch.randn(8)), "logits must be [rows, vocabulary], got [8]"),
        (lambda: greedy(torch.zeros(2, 0)), "logits must have a vocabulary of 1"),
        (lambda: greedy(torch.zeros(2, 8, dtype=torch.int64)), "must be float16, bfloat16, float32, got int64"),
        (lambda: greedy(torch.randn(8, 2).t()), "call .contiguous() first"),
        (lambda: greedy(x.bfloat16()), "wrongly in bf16"),
        (lambda: gumbel_sample(x, keys[:1], t), "keys must be [2, 2], got [1, 2]"),
        (lambda: gumbel_sample(x, keys.long(), t), "keys must be int32, got int64"),
        (lambda: gumbel_sample(x, keys, torch.ones(3)), "temperature must be [2], got [3]"),
        (lambda: gumbel_sample(x, keys, t.double()), "temperature must be float32, got float64"),
    ):
        with pytest.raises(MinillmError) as caught:
            call()
        assert words in str(caught.value)
