"""The sampler: exact probabilities, the draws that follow them, what a draw may depend on, and extreme input.

Each `check_*` is a plain function that raises AssertionError, so that the mutants at the end can show that it bites.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

import minillm.logits
import minillm.rng
import minillm.sampler
from minillm.errors import MinillmError, RequestError
from minillm.request import Request, SamplingParams
from minillm.sampler import LOGPROB_FLOOR, NO_TOKEN, Sampler, distribution, no_token_error, validate


def request(seed=0, prompt=(0,), output=(), eos=(), name="r", **params) -> Request:
    return Request(name, list(prompt), SamplingParams(**params), seed, frozenset(eos), output_token_ids=list(output))


def sample(logits, requests):
    return Sampler().sample(torch.as_tensor(logits), requests)


# An independent oracle: one row, float64, numpy, one sort, no shortcuts.


def oracle_edit(logits, req):
    x = np.asarray(logits, dtype=np.float64).copy()
    p = req.params
    for token, value in (p.logit_bias or {}).items():
        x[token] += value
    if len(req.output_token_ids) < p.min_tokens:
        for token in set(p.stop_token_ids) | (set() if p.ignore_eos else set(req.eos_token_ids)):
            if token < len(x):
                x[token] = -np.inf
    for token in set(req.prompt_token_ids) | set(req.output_token_ids):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(req.output_token_ids):
        x[token] -= p.presence_penalty + p.frequency_penalty * req.output_token_ids.count(token)
    return x


def oracle(logits, req, nudge=0.0):
    """Probabilities [V]. nudge moves the thresholds of top-p and min-p, to tell whether a case sits on a boundary."""
    p = req.params
    x = oracle_edit(logits, req)
    if p.greedy:
        probs = np.zeros(len(x))
        probs[int(np.argmax(x))] = 1.0
        return probs
    probs = np.exp((x - x.max()) / p.temperature)
    probs[probs < min(p.min_p * (1 + nudge), 1.0) * probs.max()] = 0.0
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if p.top_k:
        probs[order[p.top_k :]] = 0.0
    probs /= probs.sum()
    if p.top_p < 1.0:
        mass, limit = 0.0, p.top_p + nudge
        for place, token in enumerate(order):
            if mass >= limit and place > 0:
                probs[token] = 0.0
            else:
                mass += probs[token]
    return probs / probs.sum()


# 1. The distribution is exact.

FIXED = torch.tensor([2.0, 1.0, 1.0, 0.5, 0.25, 0.0, -0.5, -1.0, -1.0, -3.0, -math.inf, 3.0])
SEEN = {"prompt": (3, 9, 9), "output": (11, 11, 0, 7)}
CASES = {
    "plain": {},
    "temperature": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 4},
    "top_k tie": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "top_p tie": {"top_p": 0.76},
    "min_p": {"min_p": 0.1},
    "top_k then top_p": {"top_k": 5, "top_p": 0.85},
    "temperature then top_p": {"temperature": 2.0, "top_p": 0.7},
    "all": {"temperature": 1.5, "min_p": 0.08, "top_k": 6, "top_p": 0.9},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.25},
    "frequency": {"frequency_penalty": 0.75},
    "bias": {"logit_bias": {9: 5.0, 11: -100.0}},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": (0,)},
    "greedy": {"temperature": 0.0},
    "greedy penalised": {"temperature": 0.0, "frequency_penalty": 1.0},
}


def case(name: str) -> Request:
    return request(eos=(11,), **SEEN, **CASES[name])


def many(req: Request, seeds: int, positions: int) -> list[Request]:
    """The request with other seeds and longer prompts of the same set of tokens."""
    prompts = [req.prompt_token_ids + [9] * n for n in range(positions)]
    return [replace(req, seed=seed, prompt_token_ids=prompt) for prompt in prompts for seed in range(seeds)]


def check_distribution():
    for name in CASES:
        req = case(name)
        got = distribution(FIXED[None], [req])[0].numpy()
        np.testing.assert_allclose(got, oracle(FIXED, req), atol=1e-6, err_msg=name)


def test_distribution_is_the_oracles():
    check_distribution()


finite = st.integers(-320, 320).map(lambda n: n / 32)


@st.composite
def rows(draw):
    """A row (often full of ties, sometimes long enough for a head of 256) and a request."""
    size = draw(st.sampled_from((1, 2, 3, 7, 40, 300, 700)))
    if size <= 40:
        row = draw(st.lists(st.one_of(finite, st.just(-math.inf)), min_size=size, max_size=size))
    else:
        spread = draw(st.sampled_from((0, 1, 40, 300)))
        generator = random.Random(draw(st.integers(0, 10**6)))
        row = [generator.randint(-spread, spread) / 32 for _ in range(size)]
    assume(max(row) > -math.inf)
    tokens = st.lists(st.integers(0, size - 1), max_size=6)
    req = request(
        draw(st.integers(0, 2**63 - 1)),
        prompt=draw(tokens) or [0],
        output=draw(tokens),
        eos=draw(st.sampled_from(((), (0,), (size - 1, size + 5)))),
        temperature=draw(st.sampled_from((0.0, 0.3, 1.0, 1.0, 2.5))),
        top_k=draw(st.sampled_from((0, -1, 1, 2, 5, 256, 299, 100_000))),
        top_p=draw(st.sampled_from((1.0, 1e-9, 0.31, 0.77, 0.953))),
        min_p=draw(st.sampled_from((0.0, 0.0, 0.013, 0.37, 1.0))),
        repetition_penalty=draw(st.sampled_from((1.0, 1.0, 0.7, 1.3))),
        presence_penalty=draw(st.sampled_from((0.0, 0.0, -1.1, 0.9))),
        frequency_penalty=draw(st.sampled_from((0.0, 0.0, -0.45, 1.9))),
        logit_bias=draw(st.none() | st.dictionaries(st.integers(0, size - 1), finite, max_size=3)),
        min_tokens=draw(st.sampled_from((0, 0, 3))),
    )
    return row, req


@settings(max_examples=300, deadline=None)
@given(rows(), st.sampled_from((torch.float32, torch.float16)))
def test_distribution_against_the_oracle(row_and_request, dtype):
    row, req = row_and_request
    x = oracle_edit(row, req)
    assume(x.max() > -math.inf)
    gaps = np.diff(np.unique(x[np.isfinite(x)]))
    assume(not len(gaps) or gaps.min() > 1e-4)  # two edits that nearly, not exactly, meet: the order is rounding's
    expected = oracle(row, req)
    for nudge in (-1e-5, 1e-5):  # on a boundary of top-p or min-p rounding decides; nothing to compare
        assume(np.array_equal(oracle(row, req, nudge) > 0, expected > 0))
    got = distribution(torch.tensor(row, dtype=dtype)[None], [req])[0].numpy()
    np.testing.assert_allclose(got, expected, atol=1e-5)
    [token], _ = sample(torch.tensor(row, dtype=dtype)[None], [req])
    assert expected[token] > 0


def test_the_token_that_crosses_top_p_stays():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()[None]
    support = lambda p: (distribution(logits, [request(top_p=p)])[0] > 0).tolist()
    assert support(0.49) == [True, False, False]
    assert support(0.51) == [True, True, False]
    assert support(0.79) == [True, True, False]
    assert support(0.81) == [True, True, True]


def check_heads():
    """The short cut over the best 256 and 4,096 tokens changes nothing, also where equal logits straddle its end."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(9000, generator=generator)
    flat = torch.zeros(9000)
    steps = torch.cat([torch.full((250,), 2.0), torch.full((20,), 1.0), torch.zeros(8730)]).flip(0)
    logits = torch.stack([noise * 4, noise, flat, steps, (noise * 4).bfloat16().float()]).repeat_interleave(6, 0)
    wanted = [
        {"top_k": 3},
        {"top_k": 260},
        {"top_p": 0.90003},
        {"top_k": 5000, "top_p": 0.99907},
        {"min_p": 0.2},
        {"top_p": 0.5},
    ]
    requests = [request(**p) for p in wanted * 5]
    got = distribution(logits, requests)
    for i, req in enumerate(requests):
        expected = oracle(logits[i].double(), req)
        assert np.array_equal(got[i].numpy() > 0, expected > 0), f"row {i}: {req.params}"
        np.testing.assert_allclose(got[i].numpy(), expected, atol=1e-6)


def test_heads_are_only_a_short_cut():
    check_heads()


# 2. Draws follow the distribution.


def check_draws(names=tuple(CASES)):
    """Chi-square of many draws, over seeds and positions, against the exact probabilities."""
    for name in names:
        requests = many(case(name), seeds=100, positions=100)
        tokens, _ = sample(FIXED.expand(len(requests), -1), requests)
        counts = np.bincount(tokens, minlength=len(FIXED))
        expected = oracle(FIXED, case(name)) * len(requests)
        assert counts[expected == 0].sum() == 0, f"{name}: a token that was filtered out is drawn"
        support = expected > 0
        if support.sum() > 1:
            p = stats.chisquare(counts[support], expected[support]).pvalue
            assert p > 1e-3, f"{name}: chi-square p = {p:.2g}, counts {counts}, expected {expected.round(1)}"


def test_draws_follow_the_distribution():
    check_draws()


def test_draws_over_a_long_row():
    """4,000 tokens, Zipf: the tail of the noise is right, not only its middle."""
    weights = 1 / np.arange(1, 4001)
    requests = many(request(), seeds=100, positions=100)
    tokens, _ = sample(torch.tensor(np.log(weights)).float().expand(len(requests), -1), requests)
    expected = weights / weights.sum() * len(requests)
    counts = np.bincount(tokens, minlength=4000)
    edges = [0, 1, 2, 3, 5, 10, 30, 100, 300, 1000, 2000, 3000]
    p = stats.chisquare(np.add.reduceat(counts, edges), np.add.reduceat(expected, edges)).pvalue
    assert p > 1e-3


# 3. The noise.


def plain_uniform(seed, position, token):
    """The definition of `rng.uniform` in unbounded integers."""
    mask = 2**32 - 1

    def mix32(x):
        x ^= x >> 16
        x = x * 0x7FEB352D & mask
        x ^= x >> 15
        x = x * 0x846CA68B & mask
        return x ^ x >> 16

    k = minillm.rng.key(seed, position)
    x = mix32(mix32(token ^ k & mask) ^ k >> 32)
    return min(((x & 2**31 - 1) + 0.5) / 2**31, 1 - 2**-24)


def test_noise_is_the_documented_function_of_seed_position_token():
    draws = [(0, 0), (1, 0), (0, 1), (2**63 - 1, 5), (2**63 + 100, 131071), (12345, 777)]
    ids = torch.tensor([0, 1, 2, 49151, 151935, 2**31 - 1])
    got = minillm.rng.uniform(minillm.rng.keys(draws), ids)
    for i, draw in enumerate(draws):
        for j, token in enumerate(ids.tolist()):
            assert got[i, j].item() == pytest.approx(plain_uniform(*draw, token), abs=1e-7)


def check_noise():
    draws = [(s, p) for s in range(40) for p in range(40)]
    u = minillm.rng.uniform(minillm.rng.keys(draws), torch.arange(40)).view(40, 40, 40).numpy()
    assert u.min() > 0
    assert u.max() < 1
    assert stats.kstest(u.ravel(), "uniform").pvalue > 1e-3
    assert len(np.unique(u)) > 0.99 * u.size, "numbers repeat"
    for axis, what in enumerate(("seed", "position", "token id")):
        a, b = u.take(range(39), axis), u.take(range(1, 40), axis)
        r = np.corrcoef(a.ravel(), b.ravel())[0, 1]
        assert abs(r) < 4 / math.sqrt(a.size), f"neighbours in {what} are correlated: {r:.3f}"
        cells = np.histogram2d(a.ravel(), b.ravel(), bins=8, range=((0, 1), (0, 1)))[0]
        assert stats.chisquare(cells.ravel()).pvalue > 1e-3, f"pairs of neighbours in {what} are not uniform"
        means = u.mean(axis=tuple({0, 1, 2} - {axis}))
        assert np.abs(means - 0.5).max() < 4.5 * math.sqrt(1 / 12 / 1600), f"some {what} has a bias"


def test_noise_is_uniform_and_its_neighbours_independent():
    check_noise()


def test_noise_is_finite_at_both_ends():
    keys = minillm.rng.keys([(3, 1)])
    assert minillm.rng.gumbel(keys, torch.arange(2_000_000)).isfinite().all()


# 4. What a draw may depend on.


def mixed_batch():
    generator = torch.Generator().manual_seed(7)
    logits = (torch.randn(len(CASES) * 2, 5000, generator=generator) * 3).bfloat16()
    options = [p | {"logprobs": i % 4} for i, p in enumerate([*CASES.values()] * 2)]
    requests = [request(i % 5, prompt=range(1 + i), output=(i, 4), eos=(1,), **p) for i, p in enumerate(options)]
    return logits, requests


def check_batch_changes_nothing():
    logits, requests = mixed_batch()
    together = list(zip(*sample(logits, requests), strict=True))
    order = list(range(len(requests)))
    random.Random(3).shuffle(order)
    shuffled = list(zip(*sample(logits[order], [requests[i] for i in order]), strict=True))
    assert shuffled == [together[i] for i in order], "the order of the batch changes a token"
    for i, req in enumerate(requests):
        alone = sample(logits[i : i + 1], [req])
        assert (alone[0][0], alone[1][0]) == together[i], f"row {i} alone gives another token than in a batch"


def test_neither_batch_order_nor_batch_size_changes_a_token():
    check_batch_changes_nothing()


def test_preemption_changes_nothing():
    """A request that is computed again from its tokens draws what it drew; only tokens and seed are its state."""
    logits, _ = mixed_batch()
    first = request(9, prompt=(1, 2, 3))
    for row in logits[:8]:
        first.output_token_ids += sample(row[None], [first])[0]
    again = request(9, prompt=(1, 2, 3), output=first.output_token_ids[:4])
    again.num_computed_tokens = 2
    for row in logits[4:8]:
        again.output_token_ids += sample(row[None], [again])[0]
    assert again.output_token_ids == first.output_token_ids
    # The boundary between prompt and output is not part of the key.
    resent = request(9, prompt=(1, 2, 3, *first.output_token_ids[:4]))
    assert sample(logits[4:5], [resent])[0] == first.output_token_ids[4:5]


def check_draws_differ():
    """Seed, position and token id all enter the noise: draws in a row of equals look drawn."""
    for what, requests in (
        ("position", [request(1, prompt=[0] * n) for n in range(1, 201)]),
        ("seed", [request(n) for n in range(200)]),
    ):
        tokens, _ = sample(torch.zeros(200, 50), requests)
        assert len(set(tokens)) > 40, f"the draw does not depend on the {what}"


def test_seed_and_position_enter_the_draw():
    check_draws_differ()


def test_sampling_changes_neither_logits_nor_requests():
    logits, requests = mixed_batch()
    before, described = logits.clone(), repr(requests)
    first = sample(logits, requests)
    assert torch.equal(logits, before)
    assert repr(requests) == described
    assert sample(logits, requests) == first


# 5. Ties, greedy, log-probabilities.


def check_ties():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        row = torch.zeros(6000, dtype=dtype)
        row[[17, 400, 5999]] = 3.0
        for params in (
            {"temperature": 0.0},
            {"top_k": 1},
            {"top_p": 1e-9},
            {"temperature": 0.0, "logit_bias": {3: 0.5}},
        ):
            assert sample(row[None], [request(**params)])[0] == [17], f"{params} {dtype}: the lower id must win"
        support = distribution(row[None], [request(top_k=5)])[0].nonzero().flatten().tolist()
        assert support == [0, 1, 17, 400, 5999]
        _, [found] = sample(row[None], [request(temperature=0.0, logprobs=5)])
        assert list(found) == [17, 400, 5999, 0, 1]
        assert [f.rank for f in found.values()] == [1, 2, 3, 4, 5]


def test_the_lower_id_wins_a_tie():
    check_ties()


def check_logprobs():
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(2)) * 2
    raw = torch.log_softmax(logits.double(), -1)
    requests = [
        request(logprobs=n, temperature=2.0, logit_bias={199 - n: 100.0}, frequency_penalty=1.0, output=(0, 0), top_k=3)
        for n in (0, 2, 20)
    ]
    tokens, found = sample(logits, requests)
    assert tokens == [199, 197, 179], "a bias of 100 decides"
    for i, (token, entry) in enumerate(zip(tokens, found, strict=True)):
        n = requests[i].params.logprobs
        top = raw[i].sort(descending=True).indices[:n].tolist()
        assert list(entry) == [token, *(t for t in top if t != token)], "the drawn token, then the most likely ones"
        for t, one in entry.items():
            assert one.token_id == t
            assert one.logprob == pytest.approx(raw[i, t].item(), abs=1e-5), "of the raw logits"
            assert one.rank == 1 + int((raw[i] > raw[i, t]).sum())


def test_logprobs_are_of_the_models_own_distribution():
    check_logprobs()


def test_logprobs_only_for_those_who_ask():
    _, found = sample(torch.zeros(2, 4), [request(), request(logprobs=0, temperature=0.0)])
    assert found[0] is None
    assert list(found[1]) == [0]
    assert found[1][0].logprob == pytest.approx(math.log(1 / 4))


def test_logprobs_are_finite_json():
    row = [0.0, -math.inf, math.inf, -1e30]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        _, [found] = sample(torch.tensor([row], dtype=dtype), [request(temperature=0.0, logprobs=20)])
        json.dumps({t: one.logprob for t, one in found.items()}, allow_nan=False)
        assert [one.logprob for one in found.values()] == [0.0] + [LOGPROB_FLOOR] * 3
        assert next(iter(found)) == 2
        assert sorted(found) == [0, 1, 2, 3]


# 6. Rows that are no distribution.

OPTIONS = (
    {"temperature": 0.0},
    {},
    {"top_k": 2},
    {"top_p": 0.5},
    {"min_p": 0.1},
    {"temperature": 0.0, "presence_penalty": 1.0},
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_fails_its_own_request_alone(dtype):
    good = torch.tensor([0.0, 9.0, 1.0, 2.0])
    bad = torch.tensor([0.0, 9.0, math.nan, 2.0])
    for p in OPTIONS:
        requests = [request(name=f"id-{i}", logprobs=1, output=(0,), **p) for i in range(3)]
        logits = torch.stack([good, bad, good]).to(dtype)
        tokens, found = sample(logits, requests)
        assert tokens[1] == NO_TOKEN
        assert found[1] is None
        assert tokens[0] == sample(good.to(dtype)[None], requests[:1])[0][0]
        assert found[0]
        assert found[2]
        error = no_token_error(logits[1], requests[1])
        assert isinstance(error, MinillmError)
        assert "id-1" in str(error)
        assert "1 of 4 logits are NaN" in str(error)


def test_no_token_left():
    for p in OPTIONS:
        tokens, found = sample(torch.full((1, 3), -math.inf), [request(logprobs=1, **p)])
        assert tokens == [NO_TOKEN]
        assert found == [None]
        banned = request(name="b", eos=(0,), min_tokens=2, stop_token_ids=(1,), **p)
        row = torch.tensor([[1.0, 2.0, -math.inf]])
        assert sample(row, [banned])[0] == [NO_TOKEN]
        assert "min_tokens" in str(no_token_error(row[0], banned))
        with pytest.raises(MinillmError, match="request b"):
            distribution(row, [banned])
    assert "every logit is -inf" in str(no_token_error(torch.full((3,), -math.inf), request()))


def test_wrong_shape_is_refused():
    with pytest.raises(MinillmError, match=r"\[2, vocabulary\]"):
        sample(torch.zeros(3, 4), [request(), request()])


# 7. Extreme values.


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-5}, {"temperature": 1e-300}, {"top_p": 1e-9}, {"top_p": 5e-324}, {"min_p": 1.0},
        {"top_k": 1},
        {"temperature": 1e-300, "top_p": 1e-9, "min_p": 1.0, "top_k": 10**9},
    ],
)  # fmt: skip
def test_extreme_filters_give_the_best_token(params):
    row = torch.tensor([[1.0, 3.0, 2.998046875, -math.inf, -60000.0]])
    for dtype in (torch.float32, torch.float16):
        requests = [request(seed, **params) for seed in range(50)]
        assert set(sample(row.to(dtype).expand(50, -1), requests)[0]) == {1}


def test_other_extremes():
    assert sample(torch.zeros(1, 1), [request(top_k=5, top_p=0.1, min_p=1.0, logprobs=20)])[0] == [0]
    inf = torch.tensor([[0.0, math.inf, math.inf, 1.0]], dtype=torch.float16).expand(200, -1)
    for p in ({}, {"temperature": 1e-5}, {"temperature": 100.0}, {"top_p": 0.99}, {"presence_penalty": 2.0}):
        drawn = set(sample(inf, [request(seed, output=(3,), **p) for seed in range(200)])[0])
        assert drawn == {1, 2}, f"{p}: probability is shared by the tokens at +inf"
    bias = {"logit_bias": {0: -100.0, 3: 100.0}}
    assert set(sample(torch.zeros(50, 4), [request(seed, temperature=2.0, **bias) for seed in range(50)])[0]) == {3}
    assert sample(torch.zeros(1, 4), [request(temperature=0.0, repetition_penalty=1e-300)])[0] == [0]


def test_min_tokens_bans_what_would_end_the_text():
    row = torch.tensor([[9.0, 8.0, 7.0, 1.0]])
    fixed = {"temperature": 0.0, "eos": (0, 77), "stop_token_ids": (1,), "min_tokens": 2}
    pick = lambda **p: sample(row, [request(**fixed, **p)])[0]
    assert pick() == [2]
    assert pick(output=(3,)) == [2]
    assert pick(output=(3, 3)) == [0]
    assert pick(ignore_eos=True) == [0], "under ignore_eos the EOS token ends nothing"


def test_token_ids_outside_the_vocabulary_are_refused_by_field():
    validate(SamplingParams(logit_bias={9: 1.0}, stop_token_ids=(9,)), 10)
    with pytest.raises(RequestError, match=r"logit_bias: token id 10 .*\(0 to 9\)") as error:
        validate(SamplingParams(logit_bias={10: 1.0}), 10)
    assert error.value.field == "logit_bias"
    with pytest.raises(RequestError, match="stop_token_ids: token id 99"):
        validate(SamplingParams(stop_token_ids=(3, 99)), 10)


# 8. Mutants: each must fail the check that is meant to catch it.


def higher_id_first(scores, width):
    values, ids = scores.flip(-1).sort(dim=-1, descending=True, stable=True)
    return values, scores.shape[-1] - 1 - ids, torch.full_like(ids[:, 0], scores.shape[-1])


apply_penalties, kept = minillm.logits.apply_penalties, minillm.logits.kept
key, gumbel = minillm.rng.key, minillm.rng.gumbel
logprobs = minillm.sampler.logprobs

MUTANTS = [
    # what, module, name, mutated, the check that catches it
    ("top-p drops the token that crosses", minillm.logits, "kept",
     lambda v, t, k, p: torch.where(p < 2, (kept(v, t, k, p) - 1).clamp(min=1), kept(v, t, k, p)), check_distribution),
    ("top-p keeps one more", minillm.logits, "kept",
     lambda v, t, k, p: torch.where(p < 2, kept(v, t, k, p) + 1, kept(v, t, k, p)), check_distribution),
    ("top-k off by one", minillm.logits, "kept", lambda v, t, k, p: kept(v, t, k + 1, p), check_distribution),
    ("top-p not renormalised after top-k", minillm.logits, "kept",
     lambda v, t, k, p: torch.minimum(kept(v, t, k * math.inf, p), k.clamp(max=10**9).long()), check_distribution),
    ("temperature after top-p", minillm.sampler, "apply_temperature",
     lambda x, t: x - x.amax(-1, keepdim=True), check_distribution),
    ("temperature multiplied", minillm.sampler, "apply_temperature",
     lambda x, t: (x - x.amax(-1, keepdim=True)) * t[:, None], check_distribution),
    ("min-p against 1, not the best", minillm.sampler, "apply_min_p",
     lambda x, m: x.masked_fill(x.log_softmax(-1) < m.log()[:, None], -math.inf), check_distribution),
    ("penalties with the sign flipped", minillm.logits, "apply_penalties",
     lambda x, a, b, r, p, f: apply_penalties(x, a, b, 1 / r, -p, -f), check_distribution),
    ("presence counted each time", minillm.logits, "apply_penalties",
     lambda x, a, b, r, p, f: apply_penalties(x, a, b, r, 0.0, p + f), check_distribution),
    ("penalties see the prompt", minillm.logits, "apply_penalties",
     lambda x, a, b, r, p, f: apply_penalties(x, a, [*a, *b], r, p, f), check_distribution),
    ("repetition does not see the prompt", minillm.logits, "apply_penalties",
     lambda x, a, b, r, p, f: apply_penalties(x, [], b, r, p, f), check_distribution),
    ("equals: higher id first", minillm.logits, "head", higher_id_first, check_ties),
    ("ties at the end of a head trusted", minillm.logits, "head",
     lambda s, w: tuple(x[..., :w] for x in higher_id_first(s, w)), check_heads),
    ("position not in the key", minillm.rng, "key", lambda seed, position: key(seed, 0), check_draws_differ),
    ("seed not in the key", minillm.rng, "key", lambda seed, position: key(0, position), check_draws_differ),
    ("seed and position added", minillm.rng, "key", lambda seed, position: key(0, seed + position), check_noise),
    ("key not mixed", minillm.rng, "key", lambda seed, position: (seed << 32) + position, check_noise),
    ("the same noise for every token", minillm.rng, "gumbel",
     lambda k, ids: gumbel(k, torch.zeros_like(ids)), check_draws_differ),
    ("noise by place in the batch", minillm.rng, "gumbel",
     lambda k, ids: gumbel(k + torch.arange(len(k), dtype=torch.int32)[:, None], ids), check_batch_changes_nothing),
    ("uniform instead of Gumbel noise", minillm.rng, "gumbel", minillm.rng.uniform, check_draws),
    ("Gumbel with the sign flipped", minillm.rng, "gumbel", lambda k, ids: -gumbel(k, ids), check_draws),
    ("logprobs after the edits", minillm.sampler, "logprobs",
     lambda x, t, r: logprobs(minillm.sampler.edited(x, r), t, r), check_logprobs),
]  # fmt: skip


@pytest.mark.parametrize(("what", "module", "name", "mutated", "check"), MUTANTS, ids=[m[0] for m in MUTANTS])
def test_mutants_are_caught(monkeypatch, what, module, name, mutated, check):
    monkeypatch.setattr(module, name, mutated)
    with pytest.raises(AssertionError):
        check()
