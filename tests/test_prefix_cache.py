"""Prefix caches against a slow dictionary: same answers to the same calls, whatever collides and whoever asks.

The laws of a cache are in minillm/course/checks/prefix_suite.py, which also judges a learner's. Here a state machine
drives the radix tree, the hash table, and a hash table in which everything collides, next to the model; and each
mistake of prefix_mutants.py is shown to be noticed.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prefix_mutants import (
    INSIDE,
    MUTANTS,
    Colliding,
    EverybodysTenant,
    HalfColliding,
    LocksOnce,
    NoFloors,
    OldPlaceInTheQueue,
    StaysInTheOldRun,
    TrustsTheHash,
)

from minillm.cache.eviction import FIFO, LFU, LRU
from minillm.cache.prefix import Namespace, RadixPrefixCache
from minillm.cache.prefix_hash import HashPrefixCache
from minillm.course.checks.prefix_suite import CHECKS, PrefixModel, faults
from minillm.errors import MinillmError

KINDS = [RadixPrefixCache, HashPrefixCache, Colliding, HalfColliding]
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@pytest.mark.parametrize("check", CHECKS)
def test_a_prefix_cache_conforms(kind, check):
    assert faults(kind, [check]) == {}


class Naive(PrefixModel):
    """What a learner might write: no tree, no queue, five methods. Nothing else may be asked of it."""

    def insert(self, tokens, namespace, ids):
        paths = self.paths(tokens, namespace)
        homes = {kept.id: path for path, kept in self.kept.items()}
        if len(tokens) != self.block_size * len(ids) or any(
            homes.get(id, path) != path for path, id in zip(paths, ids)
        ):
            raise ValueError("not whole blocks, or an id of another block")
        return super().insert(tokens, namespace, ids)

    def unlock(self, ids):
        if any(self.locks[id] < 1 for id in ids):
            raise ValueError("not locked")
        super().unlock(ids)

    def evict(self, n, tenant=None):
        if n < 0:
            raise ValueError("negative")
        return super().evict(n, tenant)


class Halfway:
    """One that is not written yet."""

    def __init__(self, block_size, floors):
        pass

    def match(self, tokens, namespace):
        raise NotImplementedError


def test_the_suite_asks_for_five_methods_and_answers_in_words():
    def make(block_size, floors):
        cache = Naive(block_size, floors)
        return SimpleNamespace(
            **{name: getattr(cache, name) for name in ("match", "insert", "lock", "unlock", "evict")}
        )

    assert faults(make) == {}
    found = faults(Halfway)
    assert set(found) == set(CHECKS)
    assert found["whole blocks"] == "raised NotImplementedError: "
    assert found["locks"] == "raised AttributeError: 'Halfway' object has no attribute 'insert'"

    class Empty(Naive):
        def match(self, tokens, namespace):
            return [], 0

    assert faults(Empty, ["whole blocks"]) == {"whole blocks": "the same tokens: expected ([5, 3, 9], 12), got ([], 0)"}


# Against the model

BLOCKS = 14
TENANTS = ["", "ann", "bob"]
# Few readers and few blocks, so that prefixes meet.
namespaces = st.sampled_from(
    [
        *(Namespace("e", "ann"), Namespace("e", "ann", "", 5), Namespace("e", "bob", "", 4), Namespace("e", "", "", 2)),
        *(Namespace("f", "ann"), Namespace("e", "ann", "x")),
    ]
)
prompts = st.builds(
    lambda blocks, tail: [token for block in blocks for token in block] + tail,
    st.lists(st.sampled_from([(0, 0), (0, 1)]), max_size=4),
    st.sampled_from([[], [0]]),
)
HOW = ["early", "late", "done", "done"]  # when a request locks its blocks: before insert, after it; or it is over then
KEYS = {LRU: lambda kept: kept.last_used, LFU: lambda kept: kept.uses, FIFO: lambda kept: kept.born}


def refused(call):
    try:
        call()
    except MinillmError:
        return
    raise AssertionError("a mistake of the caller was taken")


class Prefixes(RuleBasedStateMachine):
    """Ids are handed out as an engine does it, so that twins come up: requests that computed the same at once."""

    kinds = KINDS
    policy = LRU

    @initialize(floors=st.sampled_from([{}, {"ann": 2}, {"ann": 1, "bob": 2}]))
    def make(self, floors):
        self.floors = floors
        self.model = PrefixModel(2, floors, KEYS[self.policy])
        self.gone: list[list] = [[] for _ in self.kinds]
        self.caches = [kind(2, floors, self.policy(), on_evict=log.append) for kind, log in zip(self.kinds, self.gone)]
        self.queries = 0
        self.tables: list[tuple[list[int], Namespace, list[int]]] = []  # tokens, namespace, ids of each request

    def same(self, wanted, call):
        for cache in self.caches:
            got = call(cache)
            assert got == wanted, f"{type(cache).__name__}: expected {wanted}, got {got}"

    def free(self) -> list[int]:
        used = {kept.id for kept in self.model.kept.values()} | {i for _, _, ids in self.tables for i in ids}
        return [i for i in range(1, BLOCKS + 1) if i not in used]

    @rule(tokens=prompts, namespace=namespaces)
    def match(self, tokens, namespace):
        self.queries += 1
        wanted = self.model.match(tokens, namespace)
        self.same(wanted, lambda cache: cache.match(tokens, namespace))

    @rule(tokens=prompts, namespace=namespaces)
    def peek(self, tokens, namespace):
        ids = [self.model.kept[path].id for path in self.model.known(tokens, namespace)]
        self.same((ids, 2 * len(ids)), lambda cache: cache.peek(tokens, namespace))

    @precondition(lambda self: self.model.kept)
    @rule(data=st.data())
    def hit(self, data):
        """Match a prefix that is known."""
        (engine, adapter), blocks = data.draw(st.sampled_from(sorted(self.model.kept, key=repr)))
        public = 2 * sum(scope is None for scope, _ in blocks)
        tokens = [token for _, block in blocks for token in block]
        self.match(tokens, Namespace(engine, blocks[-1][0] or "", adapter, public))

    @rule(tokens=prompts, namespace=namespaces, use=st.integers(0, 4), how=st.sampled_from(HOW))
    def begin(self, tokens, namespace, use, how):
        """A request that uses a part of what is known, as one does that began before the rest was there."""
        del tokens[len(tokens) // 2 * 2 :]
        known = [self.model.kept[path].id for path in self.model.known(tokens, namespace)][:use]
        missing = len(tokens) // 2 - len(known)
        if missing > len(self.free()):
            return
        ids = known + self.free()[:missing]
        if how == "early":
            self.lock(ids)
        wanted = self.model.insert(tokens, namespace, ids)
        self.same(wanted, lambda cache: cache.insert(tokens, namespace, ids))
        if how == "late":
            self.lock(ids)
        if how != "done":
            self.tables.append((tokens, namespace, ids))

    def lock(self, ids):
        self.model.lock(ids)
        for cache in self.caches:
            cache.lock(ids)

    @precondition(lambda self: self.tables and self.free())
    @rule(data=st.data(), token=st.integers(0, 1), trusted=st.booleans())
    def grow(self, data, token, trusted):
        tokens, namespace, ids = data.draw(st.sampled_from(self.tables))
        new = self.free()[0]
        self.lock([new])
        tokens += [token, token]
        ids.append(new)
        wanted = self.model.insert(tokens, namespace, ids)
        self.same(wanted, lambda cache: cache.insert(tokens, namespace, ids, known=(len(ids) - 1) * trusted))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data):
        _, _, ids = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.model.unlock(ids)
        for cache in self.caches:
            cache.unlock(ids)

    @rule(n=st.integers(0, 5), tenant=st.sampled_from([None, *TENANTS]))
    def evict(self, n, tenant):
        promised = self.model.evictable(tenant)
        wanted = self.model.evict(n, tenant)
        assert len(wanted) >= min(n, promised)
        assert self.floors or len(wanted) == min(n, promised)
        for log in self.gone:
            log.clear()
        self.same(wanted, lambda cache: cache.evict(n, tenant))
        for log in self.gone:
            assert log == wanted

    @rule(tokens=prompts, namespace=namespaces, wrong=st.integers(-1, BLOCKS + 1))
    def misuse(self, tokens, namespace, wrong):
        del tokens[len(tokens) // 2 * 2 :]
        cached = {kept.id for kept in self.model.kept.values()}
        known = [self.model.kept[path].id for path in self.model.known(tokens, namespace)]
        if known and known[-1] == wrong and len(known) * 2 == len(tokens):
            return  # that is where it belongs
        for cache in self.caches:
            if tokens and (wrong < 1 or wrong in cached):
                ids = [*range(BLOCKS + 2, BLOCKS + 1 + len(tokens) // 2), wrong]
                refused(lambda: cache.insert(tokens, namespace, ids))  # noqa: B023
            if not self.model.locks[wrong]:
                refused(lambda: cache.unlock([*self.model.locks.elements(), wrong]))  # noqa: B023

    @rule(sure=st.integers(0, 9))
    def clear(self, sure):
        if sure:  # seldom, or nothing grows
            return
        ids = {kept.id for kept in self.model.kept.values()}
        self.model.kept.clear()
        self.same(ids, lambda cache: set(cache.clear()))

    @invariant()
    def agrees(self):
        if not hasattr(self, "model"):
            return
        ids = {kept.id for kept in self.model.kept.values()}
        for cache in self.caches:
            cache.check()
            assert len(cache) == len(ids)
            assert {i for i in range(BLOCKS + 2) if i in cache} == ids
            assert cache.stats.queries == self.queries
            assert cache.stats.request_hits <= cache.stats.block_hits <= cache.stats.queried_blocks
        for tenant in (None, *TENANTS):
            promised = self.model.evictable(tenant)
            self.same(promised, lambda cache, tenant=tenant: cache.evictable(tenant))
            assert (promised > 0) == any(self.model.may_leave(path, tenant) for path in self.model.kept)


class LeastFrequent(Prefixes):
    policy = LFU


class FirstIn(Prefixes):
    policy = FIFO


TestLeastRecent = Prefixes.TestCase
TestLeastRecent.settings = settings(max_examples=60, stateful_step_count=40)
TestLeastFrequent = LeastFrequent.TestCase
TestLeastFrequent.settings = settings(max_examples=30, stateful_step_count=40)
TestFirstIn = FirstIn.TestCase
TestFirstIn.settings = settings(max_examples=30, stateful_step_count=40)


@pytest.mark.parametrize("wrong", MUTANTS, ids=lambda kind: kind.__name__)
def test_the_suite_notices_a_mistake(wrong):
    found = faults(wrong)
    assert MUTANTS[wrong] in found, f"noticed by {sorted(found)} only"


SEEN = [*INSIDE, EverybodysTenant, LocksOnce, NoFloors, OldPlaceInTheQueue, StaysInTheOldRun, TrustsTheHash]


def play(kind, examples):
    case = type("Played", (Prefixes,), {"kinds": [kind]}).TestCase
    case.settings = settings(
        max_examples=examples, stateful_step_count=40, database=None, derandomize=True, phases=[Phase.generate]
    )
    case("runTest").runTest()


@pytest.mark.parametrize("wrong", SEEN, ids=lambda kind: kind.__name__)
def test_the_state_machine_notices_a_mistake(wrong):
    with pytest.raises(Exception):  # noqa: B017 a broken tree fails in many ways
        play(wrong, 1000)


def test_the_state_machine_notices_nothing_else():
    play(RadixPrefixCache, 20)
