"""Lesson 11's exercise question as a test, and the glue that mounts a learner's prefix cache.

"After the cache is enabled, which costs fall, and which waits are still there?" The answer is counted on the engine's
own scheduler over shadow slots.
"""

from __future__ import annotations

import pytest

from minillm.cache.namespace import Namespace, PublicPrefixes
from minillm.cache.paged import PagedCache
from minillm.cache.prefix import RadixPrefixCache
from minillm.cache.prefix_hash import HashPrefixCache
from minillm.course.checks import prefix_tree as tree
from minillm.course.checks.prefix_part import prefix_part
from minillm.course.checks.prefix_suite import CHECKS, faults
from minillm.errors import MinillmError
from minillm.scheduler import Limits
from minillm.shadow import ShadowCore
from minillm.trace.prefixes import system_prompt

SHARED, OWN, NEW = 256, 16, 24


def engine(prefix, blocks=400, public=None):
    def make(pool, events):
        made = prefix(16) if prefix else None
        return PagedCache(pool, prefix=made, namespace="shadow", public=public, events=events)

    return ShadowCore(blocks, 16, limits=Limits(4, 512), make_cache=make)


def serve(core, prompt, new, **how):
    r = core.request(prompt, new, **how)
    core.add(r)
    core.finish_all()
    return r


def steps_of(core, request):
    return [(e.step, row[1]) for e in core.events.of("step") for row in e.data["rows"] if row[0] == request.request_id]


def account(prefix, long_prompts):
    """(forward tokens of the prompt, decode steps, steps in the queue) of a request whose beginning was seen before."""
    core = engine(prefix)
    first, second = (list(a.tokens) for a in system_prompt(2, shared=SHARED, own=OWN))
    serve(core, first, 1)
    start = core.events.step
    for i in range(long_prompts):
        core.add(core.request(range(50_000 * (i + 1), 50_000 * (i + 1) + 512), 1))
    r = serve(core, second, NEW)
    rows = steps_of(core, r)
    assert r.output_token_ids == core.shadow.expected(second, NEW)
    assert core.idle
    return sum(n for _, n in rows) - (NEW - 1), sum(n == 1 for _, n in rows), rows[0][0] - start


@pytest.mark.parametrize("prefix", [RadixPrefixCache, HashPrefixCache])
@pytest.mark.parametrize("long_prompts", [0, 3])
def test_what_falls_is_the_known_prefix_and_what_remains_is_decoding_and_the_queue(prefix, long_prompts):
    without, with_cache = account(None, long_prompts), account(prefix, long_prompts)
    assert without[0] - with_cache[0] == SHARED, "the forward tokens drop by exactly the hit"
    assert with_cache[0] == OWN, "what is new is computed"
    assert with_cache[1] == without[1] == NEW - 1, "decode steps remain"
    assert with_cache[2] == without[2] == long_prompts, "and so does the queue"


def test_tenants_find_their_own_and_what_is_public():
    public = PublicPrefixes([list(range(32))], 16)
    prompt = list(range(80))
    for allow, ann_again, bob in ((None, 64, 0), (public, 64, 32)):
        core = engine(RadixPrefixCache, public=allow)
        serve(core, prompt, 1, tenant="ann")
        assert serve(core, prompt, 1, tenant="bob").num_cached_tokens == bob
        assert serve(core, prompt, 1, tenant="ann").num_cached_tokens == ann_again


@pytest.mark.parametrize(("floor", "found"), [(0, 0), (4, 64), (8, 128)])
def test_a_noisy_tenant_cannot_evict_another_below_its_floor(floor, found):
    core = engine(lambda size: RadixPrefixCache(size, {"ann": floor}), blocks=40)
    text = list(range(128))
    serve(core, [*text, 1000], 1, tenant="ann")
    for i in range(20):
        serve(core, range(2000 + 200 * i, 2100 + 200 * i), 1, tenant="bob")
    assert serve(core, [*text, 1001], 1, tenant="ann").num_cached_tokens == found


# The glue

PART = prefix_part(tree.block_keys, tree.PrefixTree)
ANN = Namespace("engine", "ann")


@pytest.mark.parametrize("check", [name for name in CHECKS if name != "misuse"])
def test_the_mounted_reference_conforms(check):
    assert faults(PART, [check]) == {}


WRONG = [
    tree.AnyPlace,
    tree.AllOrNothing,
    tree.OverTheGap,
    tree.TwinsReplace,
    tree.TakesAll,
    tree.TwinEnds,
    tree.FirstOnly,
    tree.OldestFirst,
    tree.MostRecent,
    tree.Unmarked,
    tree.LastMarked,
    tree.HeldLeaves,
    tree.OneRound,
    tree.StopsAtHeld,
    tree.AllOrNone,
    tree.StillFound,
]


@pytest.mark.parametrize("kind", WRONG)
def test_the_suite_notices_each_mistake_through_the_glue(kind):
    assert faults(prefix_part(tree.block_keys, kind), [name for name in CHECKS if name != "misuse"])


def test_random_schedules_find_a_block_that_serves_another_prompt():
    assert tree.schedules(tree.PrefixTree, range(4)).startswith("every request")
    for kind in (tree.OverTheGap, tree.StillFound):
        assert "would read block" in tree.schedules(kind, range(4))


def test_evictable_promises_what_evict_gives():
    part = PART(2, {})
    who = ANN
    part.insert([1, 1, 2, 2], who, [1, 2])
    part.insert([1, 1, 3, 3], who, [1, 3])
    part.lock([2])
    assert part.evictable() == 1
    assert part.evict(5) == [3]
    part.unlock([2])
    assert part.evictable() == 2
    gone = []
    part.on_evict = gone.append
    assert part.evict(5) == [2, 1]
    assert gone == [2, 1]


@pytest.mark.parametrize(
    ("given", "said"), [(None, "list of ids"), ([1, 1], "names a block twice"), ([9], "it was given")]
)
def test_what_a_learners_insert_says_is_judged(given, said):
    class Odd(tree.PrefixTree):
        def insert(self, keys, ids):
            return given

    with pytest.raises(MinillmError, match=said):
        prefix_part(tree.block_keys, Odd)(1).insert([5, 6], ANN, [1, 2])


def test_too_few_keys_are_told():
    short = prefix_part(lambda tokens, size, namespace, leave: [], tree.PrefixTree)
    with pytest.raises(MinillmError, match="0 keys for 4 tokens"):
        short(2).match([1, 2, 3, 4], ANN)
