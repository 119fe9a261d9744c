"""What leaves a prefix cache, in which order, at which cost; what is told to others; and what its check sees.

Costs are counted in comparisons of keys, steps along a chain and blocks hashed, never by a clock.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter

import pytest

from minillm.cache import prefix_base
from minillm.cache.eviction import FIFO, LFU, LRU, CachedBlock, EvictionQueue
from minillm.cache.prefix import Namespace, RadixPrefixCache
from minillm.cache.prefix_hash import HashPrefixCache
from minillm.course.checks.prefix_suite import A, B
from minillm.errors import MinillmError

both_kinds = pytest.mark.parametrize("kind", [RadixPrefixCache, HashPrefixCache])


# Costs


class Counted(int):
    compared = 0

    def __eq__(self, other):
        Counted.compared += 1
        return int(self) == int(other)

    def __lt__(self, other):
        Counted.compared += 1
        return int(self) < int(other)

    __hash__ = int.__hash__


class CountedLRU:
    def key(self, block):
        return Counted(block.last_used)


def filled(kind, chains, depth, floors=None):
    """So many chains, touched in a random order; ids count along the chains."""
    cache = kind(2, floors, CountedLRU())
    for c in range(chains):
        tokens = [t for d in range(depth) for t in (c, d)]
        cache.insert(tokens, A, range(c * depth + 1, (c + 1) * depth + 1))
    order = list(range(chains))
    random.Random(0).shuffle(order)
    for c in order:
        cache.match([t for d in range(depth) for t in (c, d)], A)
    return cache, order


def comparisons_per_block(cache, n):
    Counted.compared = 0
    assert len(cache.evict(n)) == n
    return Counted.compared / n


def busy_scan(kind):
    """The tempting way: look at the blocks in use again each time."""

    class Scans(kind):
        def _next(self, tenant):
            free = [b for b in self._blocks.values() if not b.children and not b.pins]
            return min(free, key=self.policy.key, default=None)

    return Scans


def lock_oldest(cache, order, depth, requests=256):
    for c in order[:requests]:
        cache.lock(range(c * depth + 1, (c + 1) * depth + 1))


@both_kinds
def test_an_evicted_block_costs_log_n_however_many_are_busy(kind):
    """100,000 blocks cached, the least recently used ones held by 256 requests."""
    chains, depth = 10_000, 10
    cache, order = filled(kind, chains, depth)
    lock_oldest(cache, order, depth)
    assert cache.evictable() == (chains - 256) * depth
    cost = comparisons_per_block(cache, 20_000)
    # A push and a pop of a heap of `chains` leaves: at most 3 log2(n) comparisons of entries, each at most two of keys.
    assert cost <= 6 * math.log2(chains), cost
    cache.check()
    small, order = filled(busy_scan(kind), 400, depth)
    lock_oldest(small, order, depth, 100)
    assert comparisons_per_block(small, 50) > 6 * math.log2(400), "a scan is seen"


@both_kinds
def test_finding_what_may_leave_does_not_look_at_blocks(kind):
    cache, order = filled(kind, 50, 4, {"ann": 100, "bob": 3})
    lock_oldest(cache, order, 4, 10)

    class Unseen(dict):
        def __iter__(self):
            raise AssertionError("evictable looked at the blocks")

        items = keys = values = __iter__

    cache._blocks = Unseen(cache._blocks)
    assert cache.evictable() == 100
    assert cache.evictable("ann") == 160


@both_kinds
def test_a_lock_costs_its_blocks_and_not_the_cache(kind, monkeypatch):
    steps = 0

    class Watched(CachedBlock):
        def __setattr__(self, name, value):
            nonlocal steps
            steps += name == "pins"
            object.__setattr__(self, name, value)

    monkeypatch.setattr(prefix_base, "CachedBlock", Watched)
    cache, _ = filled(kind, 5, 200)
    for ids in (range(1, 201), range(200, 0, -1)):
        steps = 0
        cache.lock(ids)
        cache.unlock(ids)
        assert 2 * 200 <= steps <= 4 * 200, "two steps a block and call: itself, and the one above"


def test_a_block_more_of_a_long_request_is_hashed_once():
    hashed = 0

    def counting(before, reader, tokens):
        nonlocal hashed
        hashed += 1
        return hash((before, reader, tokens))

    cache = HashPrefixCache(2, hash_function=counting)
    cache.insert(range(2000), A, range(1, 1001))
    hashed = 0
    assert cache.insert(range(2002), A, range(1, 1002), known=1000) == [1001]
    assert hashed == 2, "looked up, and put in"
    assert cache.match(range(2002), A)[1] == 2002


def test_a_block_more_of_a_long_request_is_compared_once():
    class Watched(list):
        sliced = 0

        def __getitem__(self, key):
            Watched.sliced += 1
            return super().__getitem__(key)

    cache = RadixPrefixCache(2)
    cache.insert(range(2000), A, range(1, 1001))
    assert cache.insert(Watched(range(2002)), A, range(1, 1002), known=1000) == [1001]
    assert Watched.sliced <= 4
    cache.check()


@both_kinds
def test_known_blocks_that_were_twins_are_looked_for(kind):
    cache = kind(2)
    cache.insert([1, 1, 2, 2], A, [1, 2])
    assert cache.insert([1, 1, 2, 2], A, [5, 6]) == []
    assert cache.insert([1, 1, 2, 2, 3, 3], A, [5, 6, 7], known=2) == [7]
    assert cache.insert([1, 1, 2, 2, 3, 3, 4, 4], A, [5, 6, 7, 8], known=3) == [8]
    cache.evict(2)
    assert cache.insert([1, 1, 2, 2, 3, 3], A, [5, 6, 7], known=2) == [7], "the cache has forgotten since"
    cache.check()


@both_kinds
def test_a_wrong_known_is_refused_where_it_can_be_seen(kind):
    cache = kind(2)
    cache.insert([1, 1, 2, 2], A, [1, 2])
    for tokens, namespace, ids in (
        ([1, 1, 3, 3, 4, 4], A, [1, 2, 3]),
        ([1, 1, 2, 2, 4, 4], B, [1, 2, 3]),
        ([1, 1, 2, 2, 4, 4], Namespace("other", "ann"), [1, 2, 3]),
        ([1, 1, 2, 2, 4, 4], Namespace("engine", "ann", "", 4), [1, 2, 3]),
        ([2, 2, 4, 4], A, [2, 3]),
        ([2, 2], A, [2]),
    ):
        with pytest.raises(MinillmError, match="nothing was inserted"):
            cache.insert(tokens, namespace, ids, known=max(1, len(ids) - 1))
    assert len(cache) == 2
    with pytest.raises(MinillmError, match="known is how many of the 1 ids"):
        cache.insert([1, 1], A, [1], known=2)


# The queue


def block(id, last_used):
    return CachedBlock(id, (id,), ("", ""), "", None, 1, id, last_used)


def test_stale_entries_are_thrown_out_before_they_pile_up():
    queue = EvictionQueue(LRU())
    blocks = [block(i, i) for i in range(10)]
    for time in range(10_000):
        b = blocks[time % 10]
        b.last_used = 100 + time
        queue.put(b)
        assert len(queue._heap) <= 2 * 10 + 64 + 1
    assert sorted(b.id for b in queue.blocks()) == list(range(10))
    assert len(queue) == 10
    order = []
    while (head := queue.head()) is not None:
        order.append(head[3].id)
        queue.drop(head[3])
    assert order == list(range(10))


def test_keys_that_cannot_be_compared_are_the_policys_fault():
    class Mixed:
        def key(self, block):
            return block.id if block.id % 2 else str(block.id)

    cache = RadixPrefixCache(1, policy=Mixed())
    cache.insert([1], A, [1])
    with pytest.raises(MinillmError, match="parts: the keys of Mixed cannot be compared"):
        cache.insert([2], A, [2])


@both_kinds
def test_policies_differ(kind):
    orders = {}
    for policy in (LRU, LFU, FIFO):
        cache = kind(1, policy=policy())
        for i in (1, 2, 3):
            cache.insert([i], A, [i])
        for i in (1, 1, 3, 1, 2):
            cache.match([i], A)
        cache.match([3], A)
        orders[policy] = cache.evict(3)
    assert orders == {LRU: [1, 2, 3], LFU: [2, 3, 1], FIFO: [1, 2, 3]}


@both_kinds
def test_a_block_was_used_as_often_as_all_that_follow_it(kind):
    cache = kind(1, policy=LFU())
    cache.insert([1, 2], A, [1, 2])
    cache.insert([1, 3], A, [1, 3])
    cache.insert([9], A, [9])
    for tokens in ([1, 2], [1, 3], [9], [9], [9]):
        cache.match(tokens, A)
    cache.match([1, 2, 4], A)
    assert cache.evict(4) == [3, 2, 9, 1], "block 1 was hit three times, and after 9"


# Who is told


@both_kinds
def test_who_leaves_is_told_while_it_can_still_be_found(kind):
    told = []
    tokens, ann = [1, 1, 2, 2, 3, 3], Namespace("engine", "ann", "x", 3)
    cache = kind(2, on_evict=lambda id: told.append((id, cache.peek(tokens, ann)[0])))
    cache.insert(tokens, ann, [1, 2, 3])
    assert cache.evict(2) == [3, 2]
    assert told == [(3, [1, 2, 3]), (2, [1, 2])]
    cache.clear()
    assert len(told) == 2, "what is cleared is worth nothing to a tier"


@both_kinds
def test_a_listener_that_fails_loses_nothing(kind):
    def listen(id):
        if id == 1:
            raise OSError("the disk is full")

    cache = kind(2, on_evict=listen)
    cache.insert([1, 1, 2, 2], A, [1, 2])
    assert cache.evict(2) == [2], "its block has left: the caller must free it"
    with pytest.raises(OSError, match="disk"):
        cache.evict(2)
    cache.check()
    assert cache.match([1, 1], A) == ([1], 2)
    cache.on_evict = None
    assert cache.evict(2) == [1]


@both_kinds
def test_block_hits_are_not_request_hits(kind):
    """Nine prompts of ten share a first block of ten."""
    cache = kind(4)
    system = [0] * 4
    free = iter(range(1, 1000))
    for request in range(10):
        tokens = system + [request + 1] * 37
        ids, _ = cache.match(tokens, A)
        cache.insert(tokens[:40], A, ids + [next(free) for _ in range(10 - len(ids))])
    s = cache.stats
    assert (s.queries, s.request_hits, s.request_hit_rate) == (10, 9, 0.9)
    assert (s.queried_blocks, s.block_hits, s.block_hit_rate) == (100, 9, 0.09)
    assert (s.queried_tokens, s.hit_tokens) == (410, 36)
    assert s.inserted == 100 - 9
    cache.evict(1000)
    assert s.evicted == 91
    assert kind(4).stats.request_hit_rate == kind(4).stats.block_hit_rate == 0.0, "nothing was asked"


def test_a_snapshot_is_plain_and_whole():
    cache = RadixPrefixCache(2)
    ann = Namespace("engine", "ann", "", 2)
    cache.insert([1, 1, 2, 2, 3, 3], ann, [1, 2, 3])
    cache.insert([1, 1, 2, 2, 4, 4], ann, [1, 2, 4])
    cache.match([1, 1, 2, 2, 3, 3], ann)
    cache.lock([3, 99])
    leaf = {"public": False, "tenant": "ann", "engine": "engine", "adapter": "", "children": []}
    third = leaf | {"tokens": [3, 3], "ids": [3], "last_used": 3, "uses": 1, "locked": [3]}
    fourth = leaf | {"tokens": [4, 4], "ids": [4], "last_used": 2, "uses": 0, "locked": []}
    second = leaf | {"tokens": [2, 2], "ids": [2], "last_used": 3, "uses": 1, "locked": [], "children": [third, fourth]}
    first = second | {"tokens": [1, 1], "ids": [1], "public": True, "tenant": None, "children": [second]}
    snapshot = cache.snapshot()
    assert snapshot == {"block_size": 2, "time": 3, "roots": [first]}
    assert json.loads(json.dumps(snapshot)) == snapshot
    hashed = HashPrefixCache(2)
    hashed.insert([1, 1, 2, 2, 3, 3], ann, [1, 2, 3])
    hashed.insert([1, 1, 2, 2, 4, 4], ann, [1, 2, 4])
    hashed.match([1, 1, 2, 2, 3, 3], ann)
    hashed.lock([3])
    assert hashed.snapshot() == snapshot


def test_a_deep_chain_is_no_recursion():
    cache = RadixPrefixCache(1)
    for n in range(1, 1501):  # a run of its own for each block
        cache.insert(range(n), A, range(1, n + 1), known=n - 1)
        cache.insert([*range(n - 1), -1], A, [*range(1, n), 10_000 + n], known=n - 1)
    cache.snapshot()
    cache.check()
    assert len(cache.evict(3001)) == 3000


# Misuse, and what check sees


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0,), "block_size is a whole number, at least 1, got 0"),
        ((2, {"ann": -1}), "floors: a tenant's name and a number of blocks"),
        ((2, {3: 1}), "floors: a tenant's name"),
        ((2, {"ann": True}), "floors: a tenant's name"),
    ],
)
@both_kinds
def test_a_cache_is_made_of_sense(kind, arguments, words):
    with pytest.raises(MinillmError, match=words):
        kind(*arguments)


@both_kinds
def test_errors_say_what_was_wrong(kind):
    cache = kind(2)
    cache.insert([1, 1], A, [1])
    cache.lock([1])
    for call, words in (
        (lambda: cache.insert([1, 1, 2], A, [1]), "1 ids of 2 tokens each stand for 2 tokens, got 3"),
        (lambda: cache.insert([2, 2, 3, 3], A, [2, 2]), r"different block ids, 1 or more, got \[2, 2\]"),
        (lambda: cache.insert([2, 2], A, [0]), "1 or more"),
        (lambda: cache.insert([2, 2], A, [1]), "block 1 is in the cache already, for other tokens"),
        (lambda: cache.unlock([1, 1]), "block 1 is unlocked more often than it was locked"),
        (lambda: cache.evict(-1), "a number of blocks, 0 or more, got -1"),
        (lambda: cache.evict(True), "a number of blocks"),
    ):
        with pytest.raises(MinillmError, match=words):
            call()
        cache.check()
        assert cache.evictable() == 0
        assert cache.insert([], A, []) == []


def test_counters_do_not_grow_with_the_tenants_ever_seen():
    for kind in (RadixPrefixCache, HashPrefixCache):
        cache = kind(1)
        for i in range(100):
            namespace = Namespace(f"engine {i}", f"tenant {i}")
            cache.insert([1], namespace, [1])
            cache.lock([1])
            cache.unlock([1])
            cache.evict(1)
        kept = [len(value) for value in vars(cache).values() if isinstance(value, dict | Counter)]
        assert sum(kept) == 0


BREAKAGES = {
    "pins": lambda c: setattr(c._blocks[2], "pins", 1),
    "shields": lambda c: setattr(c._blocks[1], "shields", 3),
    "children": lambda c: setattr(c._blocks[2], "children", 1),
    "depth": lambda c: setattr(c._blocks[2], "depth", 5),
    "a foreign parent": lambda c: setattr(c._blocks[1], "scope", "bob"),
    "a lost parent": lambda c: c._blocks.pop(1),
    "a lost leaf": lambda c: c._blocks.pop(3),
    "an id": lambda c: setattr(c._blocks[3], "id", 7),
    "sizes": lambda c: c._size.update(["ann"]),
    "loose": lambda c: c._loose.subtract(["ann"]),
    "a lock": lambda c: c._locks.update({9: 0}),
    "the queue": lambda c: c._common.drop(c._blocks[3]),
    "the queue's length": lambda c: setattr(c._common, "_live", 9),
    "tokens": lambda c: setattr(c._blocks[2], "tokens", (7, 7)),
    "twins": lambda c: setattr(c._blocks[3], "tokens", (2, 2)),
    "the index": lambda c: c._forget(c._blocks[3]),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
@both_kinds
def test_check_sees_what_is_broken(kind, breakage):
    cache = kind(2)
    cache.insert([1, 1, 2, 2], A, [1, 2])
    cache.insert([1, 1, 3, 3], A, [1, 3])
    cache.check()
    BREAKAGES[breakage](cache)
    with pytest.raises(MinillmError, match="the prefix cache is broken"):
        cache.check()
