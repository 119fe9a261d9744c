"""Prefix caches against a slow dictionary: same answers to the same calls, whatever collides and whoever asks.

The laws of a cache are in minillm/course/checks/prefix_suite.py, which also judges a learner's. Here a state machine
drives the radix tree, the hash table, and a hash table in which everything collides, next to the model; and each
mistake of `MUTANTS` is shown to be noticed.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minillm.cache.eviction import FIFO, LFU, LRU
from minillm.cache.prefix import Namespace, RadixPrefixCache
from minillm.cache.prefix_hash import HashPrefixCache
from minillm.course.checks.prefix_suite import CHECKS, PrefixModel, faults
from minillm.errors import MinillmError


class Colliding(HashPrefixCache):
    """Every block has the same hash."""

    def __init__(self, block_size, floors=None, policy=None, on_evict=None):
        super().__init__(block_size, floors, policy, on_evict, hash_function=lambda before, reader, tokens: 0)


class HalfColliding(HashPrefixCache):
    """The hash knows the block's first token, but neither who may read it nor what came before."""

    def __init__(self, block_size, floors=None, policy=None, on_evict=None):
        super().__init__(block_size, floors, policy, on_evict, hash_function=lambda before, reader, tokens: tokens[0])


KINDS = [RadixPrefixCache, HashPrefixCache, Colliding, HalfColliding]
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@pytest.mark.parametrize("check", CHECKS)
def test_a_prefix_cache_conforms(kind, check):
    assert faults(kind, [check]) == {}


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
        self.caches = [
            kind(2, floors, self.policy(), on_evict=lambda *call, log=log: log.append(call))
            for kind, log in zip(self.kinds, self.gone)
        ]
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
        prefixes = {kept.id: path for path, kept in self.model.kept.items()}
        promised = self.model.evictable(tenant)
        wanted = self.model.evict(n, tenant)
        assert len(wanted) >= min(n, promised)
        assert self.floors or len(wanted) == min(n, promised)
        for log in self.gone:
            log.clear()
        self.same(wanted, lambda cache: cache.evict(n, tenant))
        for log in self.gone:
            assert [id for _, _, id in log] == wanted
            for tokens, namespace, id in log:
                assert self.model.paths(tokens, namespace)[-1] == prefixes[id], "the name of a block that leaves"

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


# Mistakes, and what notices them


class EverybodysTenant(RadixPrefixCache):
    def _walk(self, tokens, namespace, at):
        return super()._walk(tokens, Namespace(namespace.engine, "", namespace.adapter, namespace.public_tokens), at)

    def insert(self, tokens, namespace, ids, known=0):
        return super().insert(
            tokens, Namespace(namespace.engine, "", namespace.adapter, namespace.public_tokens), ids, known
        )


class OneAdapter(RadixPrefixCache):
    def _add(self, block):
        block.model = (block.model[0], "")
        super()._add(block)

    def _walk(self, tokens, namespace, at):
        return super()._walk(tokens, Namespace(namespace.engine, namespace.tenant, "", namespace.public_tokens), at)


class OneEngine(OneAdapter):
    def _add(self, block):
        block.model = ("", block.model[1])
        RadixPrefixCache._add(self, block)

    def _walk(self, tokens, namespace, at):
        other = Namespace("", namespace.tenant, namespace.adapter, namespace.public_tokens)
        return RadixPrefixCache._walk(self, tokens, other, at)


class RunOfAnyScope(RadixPrefixCache):
    """A run is compared by tokens only: inside it, nobody asks whose it is."""

    def _walk(self, tokens, namespace, at):
        path = super()._walk(tokens, namespace, at)
        while path and path[-1].place.blocks[-1] is not path[-1]:
            block, end = path[-1], (path[-1].depth + 1) * self.block_size
            following = block.place.blocks[block.depth - block.place.blocks[0].depth + 1]
            if tuple(tokens[end - self.block_size : end]) != following.tokens:
                break
            path.append(following)
        return path


class TrustsTheHash(Colliding):
    def _verified(self, block, before, model, scope, tokens):
        return True


class TokensOnly(Colliding):
    def _verified(self, block, before, model, scope, tokens):
        return block.tokens == tokens and block.scope == scope and block.model == model


class ChainOnly(Colliding):
    def _verified(self, block, before, model, scope, tokens):
        return block.parent is before and block.scope == scope and block.model == model


class AnyReader(Colliding):
    def _verified(self, block, before, model, scope, tokens):
        return block.parent is before and block.tokens == tokens and block.model == model


class AnyModel(Colliding):
    def _verified(self, block, before, model, scope, tokens):
        return block.parent is before and block.tokens == tokens and block.scope == scope


class HalfPublic(RadixPrefixCache):
    """A block that a public prefix only touches counts as public."""

    def insert(self, tokens, namespace, ids, known=0):
        return super().insert(tokens, rounded_up(namespace, self.block_size), ids, known)

    def _walk(self, tokens, namespace, at):
        return super()._walk(tokens, rounded_up(namespace, self.block_size), at)


def rounded_up(namespace, block_size):
    whole = -(-namespace.public_tokens // block_size) * block_size
    return Namespace(namespace.engine, namespace.tenant, namespace.adapter, whole)


class NothingPublic(RadixPrefixCache):
    def insert(self, tokens, namespace, ids, known=0):
        return super().insert(tokens, Namespace(namespace.engine, namespace.tenant, namespace.adapter), ids, known)

    def _walk(self, tokens, namespace, at):
        return super()._walk(tokens, Namespace(namespace.engine, namespace.tenant, namespace.adapter), at)


class LostInASplit(RadixPrefixCache):
    def _split(self, run, last):
        below = run.children
        super()._split(run, last)
        next(iter(run.children.values())).children = {}
        run.children.update(below)


class StaysInTheOldRun(RadixPrefixCache):
    def _split(self, run, last):
        super()._split(run, last)
        for child in run.children.values():
            for block in child.blocks:
                block.place = run


class NeverTouches(RadixPrefixCache):
    def match(self, tokens, namespace):
        return self.peek(tokens, namespace)


class ForgetsTheChildren(RadixPrefixCache):
    """A block that becomes a leaf does not learn when its children were used."""

    def _drop(self, block):
        if block.parent is not None:
            block.last_used = 0
        super()._drop(block)


class OldPlaceInTheQueue(RadixPrefixCache):
    def _touch(self, block):
        block.last_used = self._time
        if not block.ticket and not block.children and not block.pins:
            self._queue(block).put(block)


class LocksOnce(RadixPrefixCache):
    def lock(self, ids):
        super().lock([id for id in ids if id not in self._locks])

    def unlock(self, ids):
        super().unlock([id for id in ids if id in self._locks])


class LocksCachedOnly(RadixPrefixCache):
    def lock(self, ids):
        super().lock([id for id in ids if id in self])

    def unlock(self, ids):
        super().unlock([id for id in ids if id in self])


class PinsOneBlock(RadixPrefixCache):
    """Neither the blocks above a locked one are pinned, nor do children keep a block."""

    def _pin(self, block):
        block.pins += 1
        self._count_loose(block, -1)
        self._queue(block).drop(block)

    def _unpin(self, block):
        block.pins -= 1
        self._count_loose(block, 1)
        self._queue(block).put(block)


class AnyBlockLeaves(RadixPrefixCache):
    def _take(self, block):
        super()._take(block)
        for b in block.chain():
            if not b.pins:
                self._queue(b).put(b)


class NoFloors(RadixPrefixCache):
    def __init__(self, block_size, floors=None, policy=None, on_evict=None):
        super().__init__(block_size, {}, policy, on_evict)


class FloorAgainstOneself(RadixPrefixCache):
    def _next(self, tenant):
        return super()._next(None)


class FloorOneTooLow(RadixPrefixCache):
    def __init__(self, block_size, floors=None, policy=None, on_evict=None):
        super().__init__(block_size, {t: n - 1 for t, n in (floors or {}).items()}, policy, on_evict)


class TakesTwins(RadixPrefixCache):
    def insert(self, tokens, namespace, ids, known=0):
        for block, id in zip(self._walk(tokens, namespace, None), ids):
            if block.id != id and id not in self._blocks:
                del self._blocks[block.id]
                block.id = id
                self._blocks[id] = block
        return super().insert(tokens, namespace, ids, known)


class NoTrace(RadixPrefixCache):
    """An insert that is refused has begun already."""

    def insert(self, tokens, namespace, ids, known=0):
        if any(id in self for id in ids[1:]) and ids[0] not in self:
            super().insert(tokens[: self.block_size], namespace, ids[:1])
        return super().insert(tokens, namespace, ids, known)


MUTANTS = {
    EverybodysTenant: "namespaces", OneAdapter: "namespaces", OneEngine: "namespaces", RunOfAnyScope: "random games",
    TrustsTheHash: "whole blocks", TokensOnly: "whole blocks", ChainOnly: "whole blocks", AnyReader: "namespaces",
    AnyModel: "namespaces", HalfPublic: "public prefixes", NothingPublic: "public prefixes", LostInASplit: "branches",
    StaysInTheOldRun: "leaves first", NeverTouches: "least recently used",
    ForgetsTheChildren: "least recently used", OldPlaceInTheQueue: "least recently used", LocksOnce: "locks",
    LocksCachedOnly: "locks", PinsOneBlock: "locks", AnyBlockLeaves: "leaves first", NoFloors: "floors",
    FloorAgainstOneself: "floors", FloorOneTooLow: "floors", TakesTwins: "twins", NoTrace: "misuse",
}  # fmt: skip


@pytest.mark.parametrize("wrong", MUTANTS, ids=lambda kind: kind.__name__)
def test_the_suite_notices_a_mistake(wrong):
    found = faults(wrong)
    assert MUTANTS[wrong] in found, f"noticed by {sorted(found)} only"


# What only the inside shows


class ExtendsAcrossReaders(RadixPrefixCache):
    """A tenant's block is put at the end of a public run."""

    def _add(self, block):
        parent = block.parent
        if parent is not None and parent.place.blocks[-1] is parent and not parent.place.children:
            block.place = parent.place
            parent.place.blocks.append(block)
        else:
            super()._add(block)


class CountsAllBlocks(RadixPrefixCache):
    def evictable(self, tenant=None):
        return len(self)


class CountsNoPins(RadixPrefixCache):
    def _unpin(self, block):
        loose = self._loose.copy(), self._num_loose
        super()._unpin(block)
        self._loose, self._num_loose = loose


class ShieldsNothing(RadixPrefixCache):
    def _shield(self, block):
        pass

    def _unshield(self, block):
        pass


class NamesOnlyTheBlock(RadixPrefixCache):
    def _named(self, block):
        prefix, namespace = super()._named(block)
        return prefix[-self.block_size :], namespace


class NamesNobody(RadixPrefixCache):
    def _named(self, block):
        prefix, namespace = super()._named(block)
        return prefix, Namespace(namespace.engine, "", namespace.adapter, namespace.public_tokens)


class NamesNothingPublic(RadixPrefixCache):
    def _named(self, block):
        prefix, namespace = super()._named(block)
        return prefix, Namespace(namespace.engine, namespace.tenant, namespace.adapter)


class ForgetsLocksOnClear(RadixPrefixCache):
    def clear(self):
        self._locks.clear()
        return super().clear()


class PeeksWithATouch(RadixPrefixCache):
    def peek(self, tokens, namespace):
        return self.match(tokens, namespace)


class UnlocksHalf(RadixPrefixCache):
    def unlock(self, ids):
        for id in ids:
            super().unlock([id])


class KnownIsZero(RadixPrefixCache):
    """Starts behind the known blocks, but counts them once more."""

    def _walk(self, tokens, namespace, at):
        path = super()._walk(tokens, namespace, at)
        return path if at is None else [*list(at.chain())[::-1], *path]


class LeavesTheRoot(RadixPrefixCache):
    def _forget(self, block):
        root = self._roots[block.model]
        super()._forget(block)
        self._roots[block.model] = root


INSIDE = [
    ExtendsAcrossReaders, CountsAllBlocks, CountsNoPins, ShieldsNothing, NamesOnlyTheBlock, NamesNobody,
    NamesNothingPublic, ForgetsLocksOnClear, PeeksWithATouch, UnlocksHalf, KnownIsZero, LeavesTheRoot,
]  # fmt: skip


@pytest.mark.parametrize("wrong", [*INSIDE, *MUTANTS], ids=lambda kind: kind.__name__)
def test_the_state_machine_notices_a_mistake(wrong):
    case = type("Wrong", (Prefixes,), {"kinds": [wrong]}).TestCase
    case.settings = settings(
        max_examples=300, stateful_step_count=40, database=None, derandomize=True, phases=[Phase.generate]
    )
    with pytest.raises(Exception):  # noqa: B017 a broken tree fails in many ways
        case("runTest").runTest()
