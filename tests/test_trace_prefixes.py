"""Workloads of shared prefixes: seeded, in order of arrival, and sharing exactly what they say."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.cache.prefix import Namespace, RadixPrefixCache
from minillm.errors import MinillmError
from minillm.trace import prefixes
from minillm.trace.prefixes import few_shot, multi_turn, retrieval, reusable, system_prompt

GENERATORS = [system_prompt, few_shot, retrieval, multi_turn]
every = pytest.mark.parametrize("make", GENERATORS)


@every
def test_a_seed_is_a_workload(make):
    assert make(8, seed=3) == make(8, seed=3)
    assert make(8, seed=3) != make(8, seed=4)


@every
def test_arrivals_are_in_order_and_plain_tokens(make):
    workload = make(8, seed=1, tenants=("ann", "bob"))
    times = [a.time for a in workload]
    assert times == sorted(times)
    assert times[0] > 0
    low, high = prefixes.VOCAB
    for a in workload:
        assert a.tokens
        assert all(isinstance(t, int) and low <= t < high for t in a.tokens)
    assert {a.tenant for a in workload} == {"ann", "bob"}


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y), min(len(a.tokens), len(b.tokens)))


def test_system_prompts_are_shared_within_a_product_and_nothing_else_is():
    workload = system_prompt(20, shared=100, own=7, products=3)
    assert len({a.group for a in workload}) == 3
    for i, a in enumerate(workload):
        for b in workload[:i]:
            assert common(a, b) == (100 if a.group == b.group else 0)


def test_shuffled_examples_share_the_instruction_and_the_same_tokens():
    steady, shuffled = few_shot(30, instruction=11), few_shot(30, instruction=11, shuffled=True)
    for a, b in zip(steady, shuffled, strict=True):
        assert (a.time, a.group, sorted(a.tokens)) == (b.time, b.group, sorted(b.tokens))
        assert a.tokens[-30:] == b.tokens[-30:]
    firsts = {a.tokens[:11] for a in shuffled}
    assert len(firsts) == 2
    assert sum(reusable(shuffled, 1)) < 0.75 * sum(reusable(steady, 1))


def test_the_order_of_documents_decides_what_is_shared():
    saved = {}
    for order in ("library", "rank", "question first"):
        workload = retrieval(60, order=order, seed=2)
        saved[order] = sum(reusable(workload, 16))
        assert sorted(workload[5].tokens) == sorted(retrieval(60, order="rank", seed=2)[5].tokens)
    assert saved["library"] > 1.2 * saved["rank"]
    assert saved["question first"] <= 60 * 32, "only the instruction is left"


def test_a_turn_begins_with_the_whole_turn_before_it():
    workload = multi_turn(3, turns=4, system=10, message=5, new_tokens=6)
    for name in {a.group for a in workload}:
        turns = [a for a in workload if a.group == name]
        for before, after in pairwise(turns):
            assert after.tokens[: len(before.tokens)] == before.tokens
            assert len(after.tokens) == len(before.tokens) + 6 + 5
    assert len({a.tokens[:10] for a in workload}) == 1


def test_answers_of_an_engine_stand_in_the_history():
    workload = multi_turn(1, turns=2, message=5, new_tokens=2, answer=lambda prompt: [len(prompt), 7])
    first, second = workload
    assert second.tokens[len(first.tokens) :][:2] == (len(first.tokens), 7)


@given(seed=st.integers(0, 50), block=st.sampled_from([1, 4, 16]), apart=st.booleans())
def test_reusable_is_what_a_cache_that_forgets_nothing_finds(seed, block, apart):
    make = GENERATORS[seed % 4]
    workload = make(6, seed=seed, tenants=("ann", "bob"))
    cache, next_id, found = RadixPrefixCache(block), 1, []
    for a in workload:
        who = Namespace("engine", a.tenant if apart else "")
        ids, _ = cache.match(a.tokens, who)
        found.append(min(len(ids), (len(a.tokens) - 1) // block) * block)
        whole = len(a.tokens) // block
        ids += range(next_id, next_id + whole - len(ids))
        next_id += whole
        cache.insert(a.tokens[: whole * block], who, ids)
    assert reusable(workload, block, apart=apart) == found


def test_a_prompt_that_is_known_as_a_whole_leaves_one_token_to_compute():
    (a,) = system_prompt(1, shared=28, own=4)
    assert reusable([a, a], 16) == [0, 16], "32 known tokens, one of which must be computed: one whole block"
    assert reusable([a, a], 1) == [0, 31]


@pytest.mark.parametrize("wrong", [{"shared": 0}, {"own": -1}, {"n": True}, {"rate": 0}, {"products": 1.5}])
def test_sizes_are_judged(wrong):
    with pytest.raises(MinillmError, match=next(iter(wrong))):
        system_prompt(**wrong)


def test_retrieval_names_what_it_cannot_do():
    with pytest.raises(MinillmError, match="library of 2"):
        retrieval(library=2, documents=3)
    with pytest.raises(MinillmError, match="question first"):
        retrieval(order="random")
