"""What a step of the paged cache costs: of what is known already nothing is looked at again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.cache.namespace import PublicPrefixes
from minillm.cache.paged import PagedCache
from minillm.cache.pool import KVPool
from minillm.cache.prefix import RadixPrefixCache
from minillm.cache.prefix_hash import HashPrefixCache
from minillm.cache.view import Tokens
from minillm.models.presets import PRESETS
from minillm.request import Request, SamplingParams
from minillm.scheduler import Limits
from minillm.shadow import ShadowCore

both_kinds = pytest.mark.parametrize("kind", [RadixPrefixCache, HashPrefixCache])


def core_with(kind=RadixPrefixCache, blocks=16, size=2, limits=None, **options):
    return ShadowCore(blocks, size, limits=limits or Limits(8, 64), make_cache=lambda pool, events: PagedCache(
        pool, prefix=kind(size), namespace="shadow", events=events, **options))  # fmt: skip


# Tokens in place


@given(st.lists(st.integers(0, 9), max_size=6), st.lists(st.integers(0, 9), max_size=6), st.data())
def test_a_view_is_the_list_that_it_stands_for(prompt, output, data):
    r = Request("a", prompt, SamplingParams(), 0, output_token_ids=output)
    end = data.draw(st.integers(0, len(prompt + output)))
    view, whole = Tokens(r, end), (prompt + output)[:end]
    assert list(view) == whole
    assert len(view) == end
    assert [view[i] for i in range(-end, end)] == [whole[i] for i in range(-end, end)]
    bound = st.one_of(st.none(), st.integers(-8, 8))
    at = slice(data.draw(bound), data.draw(bound), data.draw(st.sampled_from([None, 1, 2, -1])))
    assert view[at] == whole[at]
    for wrong in (end, -end - 1):
        with pytest.raises(IndexError):
            view[wrong]
    output.append(1)
    assert list(view) == whole


class Counting(Tokens):
    """Counts the tokens that are looked at."""

    looked = 0

    def __getitem__(self, at):
        got = super().__getitem__(at)
        Counting.looked += len(got) if isinstance(at, slice) else 1
        return got

    def __iter__(self):
        Counting.looked += len(self)
        return super().__iter__()


@pytest.fixture
def looked(monkeypatch):
    from minillm.cache import paged

    monkeypatch.setattr(paged, "Tokens", Counting)
    monkeypatch.setattr(Counting, "looked", 0)
    return Counting


@both_kinds
@pytest.mark.parametrize("twins", [1, 3])
def test_a_token_is_shown_to_the_prefix_cache_a_bounded_number_of_times(kind, twins, looked):
    """Also where others compute the same at the same time, so that the cache has their blocks and not the request's."""

    def play(length):
        core = core_with(kind, blocks=twins * length, size=2)
        Counting.looked = 0
        for _ in range(twins):
            core.add(core.request([1] * 8, length))
        core.finish_all()
        return Counting.looked

    short, long = play(100), play(200)
    assert short < 8 * twins * 108
    assert long < 2.2 * short, "linear in the tokens, not in their square"


def test_what_is_public_of_a_prompt_is_found_once(monkeypatch):
    calls = []
    leading = PublicPrefixes.leading
    monkeypatch.setattr(PublicPrefixes, "leading", lambda self, tokens: (calls.append(1), leading(self, tokens))[1])
    core = core_with(public=PublicPrefixes([[1, 1]], 2))
    core.add(core.request([1, 1, 2], 12))
    core.finish_all()
    assert len(calls) == 1


# The head of the queue


def blocked(kind, limits=None):
    """(core, a runner, the head that does not fit beside it)."""
    core = core_with(kind, blocks=10, limits=limits or Limits(8, 64))
    runner, head = core.request([1, 2, 3, 4] * 3, 7), core.request([5, 6] * 5, 2)
    core.add(runner)
    core.step()
    core.add(head)
    return core, runner, head


@both_kinds
def test_a_head_that_does_not_fit_is_not_looked_up_again_until_something_is_freed(kind, looked, monkeypatch):
    core, runner, head = blocked(kind)
    walked = []
    peek = core.kv.prefix.peek
    monkeypatch.setattr(
        core.kv.prefix, "peek", lambda tokens, namespace: (walked.append(1), peek(tokens, namespace))[1]
    )
    monkeypatch.setattr(core.kv.prefix, "match", lambda *a: pytest.fail("walked a second time"))
    while not runner.finished:
        core.step()
    core.finish_all()
    assert head.output_token_ids == core.shadow.expected(head.prompt_token_ids, 2)
    assert len(walked) == 2, "once in vain, once when the other had ended"


@both_kinds
def test_a_head_whose_hit_grows_is_admitted_though_nothing_was_freed(kind):
    """The runner writes what the head waits for: its blocks are shared, and the head needs fewer of its own."""
    core = core_with(kind, blocks=8, limits=Limits(8, 4))
    runner, head = core.request([1] * 12, 3), core.request([1] * 12 + [2], 1)
    core.add(runner)
    core.step()
    asked = [core.kv.admit(head)]
    core.step()
    asked.append(core.kv.admit(head))
    core.step()
    asked.append(core.kv.admit(head))
    assert asked == [False, False, True]
    assert not runner.finished
    core.kv.release(head)
    core.finish_all()


@both_kinds
def test_a_head_that_others_crowd_out_is_asked_again_with_other_limits(kind):
    core, runner, head = blocked(kind)
    assert not core.kv.admit(head, 0)
    assert not core.kv.admit(head, 1)
    core.abort(runner)
    assert core.kv.admit(head, 2)
    core.kv.release(head)


@both_kinds
def test_a_head_is_asked_again_after_a_release_though_less_can_be_had_than_before(kind):
    """Another request holds the blocks that the head would share: neither to be had now, nor needed."""
    core = core_with(kind, blocks=9)
    common = [1, 2, 3, 4, 5, 6, 7, 8]
    core.add(core.request(common, 1))
    core.finish_all()
    other, head, sharer = (core.request(p) for p in ([9] * 3, common + [7] * 8, [*common, 5]))
    assert core.kv.admit(other)
    assert not core.kv.admit(head)
    before = core.kv.available()
    assert core.kv.admit(sharer)
    assert not core.kv.admit(head)
    core.kv.release(other)
    assert core.kv.available() < before
    assert core.kv.admit(head)
    for r in (head, sharer):
        core.kv.release(r)
    assert core.idle


def test_two_that_hold_the_very_same_blocks_are_not_alone():
    """Neither may take what was to be left free, though no block is live but those that both would hold."""
    core = core_with(blocks=4)
    first, second = core.request([1, 2, 3, 4], 9), core.request([1, 2, 3, 4, 5], 9)
    core.add(first)
    core.step()
    assert core.kv.prefix.peek(second.tokens, core.kv.namespace(second))[0] == first.block_ids
    assert core.kv.num_live == 2
    assert not core.kv.admit(second, keep_free=2)
    assert core.kv.admit(second, keep_free=1)
    core.kv.release(second)
    core.kv.release(first)
    assert core.idle
    assert core.kv.admit(second, keep_free=4), "alone, it may have all"


# Statistics


@both_kinds
def test_a_request_that_comes_back_is_no_second_query(kind):
    core = core_with(kind, blocks=8)
    r = core.request([1, 2, 3, 4, 5], 6)
    core.add(r)
    core.step()
    core.scheduler._preempt(r, core.scheduler.schedule())
    core.finish_all()
    assert r.num_preemptions == 1
    stats = core.kv.prefix.stats
    assert (stats.queries, stats.queried_tokens, stats.request_hits, stats.block_hits) == (1, 5, 0, 0)
    assert [e.data["tokens"] for e in core.events.of("hit")] == [4], "it was a hit all the same"


def test_a_pool_costs_what_is_used_of_it():
    """A default engine reserves gigabytes; one that serves a sentence must not fill them with zeros first."""
    config = PRESETS["llama-3.1-8b"].replace(num_layers=2)
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1])
    pool = KVPool(config, 8000, 16, torch.bfloat16)  # 1 GB
    with open("/proc/self/statm") as file:
        used = (int(file.read().split()[1]) - before) * 4096
    assert pool.nbytes > 1e9
    assert used < 0.05 * pool.nbytes
    assert pool.k.data_ptr() % 64 == pool.v.data_ptr() % 64 == 0
    assert not pool.k[:, [0, 4000, 8000]].any()
    pool.write_blocks([8000], [[torch.ones_like(t) for t in pool.read_block(8000)]])
    assert pool.k[:, 8000].all()
    assert not pool.k[:, 7999].any()
