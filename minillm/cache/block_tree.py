"""The tree of cached blocks: which are held, which may leave, and in what order. Lesson 11 builds it.

A block's parent is the block before it. How a block is found by its tokens is left to an index: a radix tree
(prefix.py) or a hash table (prefix_hash.py).

Locks. A request locks the ids in its block table, `lock` when an id enters and `unlock` when it leaves, whether the
cache has the block or not. A cached block is pinned while it or any block below it is locked. Whoever holds a block
need not hold its parents: where a twin of the parent came first, the cache kept the twin.

Floors. A tenant with a floor of n keeps n blocks whatever the others do. Public blocks belong to nobody.

Counting, not searching. Pins are counted on the way up, and stop at the first block that was pinned already. A block
with neither pins nor children is in a queue: one for each tenant with a floor, one for all the others. So, of n blocks,
lock and unlock of a request's b blocks cost O(b + log n), an evicted block O(log n + floors), amortised, and
`evictable` O(floors).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any

from minillm.cache.eviction import LRU, CachedBlock, EvictionPolicy, EvictionQueue
from minillm.cache.namespace import PUBLIC
from minillm.errors import MinillmError

OnEvict = Callable[[int], Any]


class BlockTree:
    """Blocks by id, without an index. Subclasses add one."""

    def __init__(
        self, floors: Mapping[str, int] | None, policy: EvictionPolicy | None, on_evict: OnEvict | None
    ) -> None:
        self.floors = {tenant: floor for tenant, floor in (floors or {}).items() if _floor(tenant, floor)}
        self.policy = policy or LRU()
        self.on_evict = on_evict
        self._locks: dict[int, int] = {}
        self._time = 0
        self._reset()

    def _reset(self) -> None:
        tickets = count(1)  # one series, so that entries of two queues can be compared
        self._blocks: dict[int, CachedBlock] = {}
        self._size: Counter[str | None] = Counter()  # scope -> its blocks
        self._loose: Counter[str | None] = Counter()  # scope -> its blocks without pins and shields
        self._num_loose = 0
        self._common = EvictionQueue(self.policy, tickets)
        self._queues = {tenant: EvictionQueue(self.policy, tickets) for tenant in self.floors}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, id: object) -> bool:
        return id in self._blocks

    # holding

    def lock(self, ids: Iterable[int]) -> None:
        """A request holds these blocks: neither they nor any above them may leave. Counted, for ids cached or not."""
        for id in ids:
            times = self._locks.get(id, 0)
            self._locks[id] = times + 1
            if not times and id in self._blocks:
                self._pin(self._blocks[id])

    def unlock(self, ids: Iterable[int]) -> None:
        """A request lets go of these blocks. One that is not locked is an error, and nothing is unlocked."""
        ids = list(ids)
        for id, times in Counter(ids).items():
            if times > self._locks.get(id, 0):
                raise MinillmError(f"block {id} is unlocked more often than it was locked; nothing was unlocked")
        for id in ids:
            self._locks[id] -= 1
            if self._locks[id] == 0:
                del self._locks[id]
                if id in self._blocks:
                    self._unpin(self._blocks[id])

    def _pin(self, block: CachedBlock | None) -> None:
        while block is not None:
            block.pins += 1
            if block.pins > 1:  # the blocks above are pinned for it already
                return
            self._count_loose(block, -(not block.shields))
            self._queue(block).drop(block)
            block = block.parent

    def _unpin(self, block: CachedBlock | None) -> None:
        while block is not None:
            block.pins -= 1
            if block.pins:
                return
            self._count_loose(block, not block.shields)
            if not block.children:
                self._queue(block).put(block)
            block = block.parent

    def _shield(self, block: CachedBlock | None) -> None:
        """A public block has a child that may have to stay."""
        while block is not None:
            block.shields += 1
            if block.shields > 1:
                return
            self._count_loose(block, -(not block.pins))
            block = block.parent

    def _unshield(self, block: CachedBlock | None) -> None:
        while block is not None:
            block.shields -= 1
            if block.shields:
                return
            self._count_loose(block, not block.pins)
            block = block.parent

    def _count_loose(self, block: CachedBlock, by: int) -> None:
        self._loose[block.scope] += by
        self._num_loose += by

    # coming and being used

    def _take(self, block: CachedBlock) -> None:
        """A new block, without children."""
        parent = block.parent
        self._blocks[block.id] = block
        self._size[block.scope] += 1
        self._count_loose(block, 1)
        if parent is not None:
            parent.children += 1
            self._queue(parent).drop(parent)
            if parent.scope is PUBLIC and block.scope in self.floors:
                self._shield(parent)
        if block.id in self._locks:
            self._pin(block)

    def _touch(self, block: CachedBlock) -> None:
        """The block, and so all above it, is used now. Those above learn it when they become leaves."""
        block.last_used = self._time
        if not block.children and not block.pins:
            self._queue(block).put(block)

    def _queue(self, block: CachedBlock) -> EvictionQueue:
        return self._common if block.scope is None else self._queues.get(block.scope, self._common)

    # leaving

    def evict(self, n: int, tenant: str | None = None) -> list[int]:
        """Up to n blocks leave, in the order of the policy, leaves first. Returns their ids; the caller frees them.

        Never one that is pinned. Never one of another tenant than `tenant` that is at its floor; None: all floors hold.
        An exception of `on_evict` keeps its block in the cache. It is raised, or, if blocks have left by then, their
        ids are returned and it comes again with the next call.
        """
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise MinillmError(f"evict takes a number of blocks, 0 or more, got {n!r:.80}")
        gone: list[int] = []
        while len(gone) < n and (block := self._next(tenant)) is not None:
            if self.on_evict is not None:
                try:
                    self.on_evict(block.id)
                except Exception:
                    if gone:
                        break
                    raise
            self._drop(block)
            gone.append(block.id)
        return gone

    def evictable(self, tenant: str | None = None) -> int:
        """A number of blocks that `evict` can give now for this tenant. 0 exactly if it can give none.

        Exact without floors. With floors it leaves out public blocks above blocks of a tenant with a floor: whether
        they can leave depends on which of those stay.
        """
        kept = 0
        for name, floor in self.floors.items():
            if name != tenant:
                kept += max(0, self._loose[name] - max(0, self._size[name] - floor))
        return self._num_loose - kept

    def _next(self, tenant: str | None) -> CachedBlock | None:
        """The block that leaves first."""
        first = self._common.head()
        for name, queue in self._queues.items():
            if name != tenant and self._size[name] <= self.floors[name]:
                continue
            head = queue.head()
            if head is not None and (first is None or head < first):
                first = head
        return first[3] if first else None

    def _drop(self, block: CachedBlock) -> None:
        """Of a leaf without pins."""
        self._forget(block)
        self._queue(block).drop(block)
        del self._blocks[block.id]
        self._count_loose(block, -1)
        self._size[block.scope] -= 1
        if not self._size[block.scope]:  # or the counters would grow with every tenant ever seen
            del self._size[block.scope], self._loose[block.scope]
        parent = block.parent
        if parent is None:
            return
        parent.last_used = max(parent.last_used, block.last_used)
        parent.uses += block.uses
        parent.children -= 1
        if parent.scope is PUBLIC and block.scope in self.floors:
            self._unshield(parent)
        if not parent.children and not parent.pins:
            self._queue(parent).put(parent)

    def _forget(self, block: CachedBlock) -> None:
        """Take a leaf out of the index."""
        raise NotImplementedError

    # the law

    def check(self) -> None:
        """Raise MinillmError unless every count equals a recount and the queues hold exactly what may leave."""
        blocks = list(self._blocks.values())
        children: Counter[int] = Counter()
        pins: Counter[int] = Counter({id(b): 1 for b in blocks if self._locks.get(b.id, 0) > 0})
        shields: Counter[int] = Counter()
        for b in sorted(blocks, key=lambda b: -b.depth):  # children before parents
            if (parent := b.parent) is None:
                _law(b.depth == 1, b, "has no parent and is not the first of its prefix")
                continue
            _law(self._blocks.get(parent.id) is parent, b, "has lost its parent")
            _law(b.depth == parent.depth + 1 and b.model == parent.model, b, "does not follow its parent")
            _law(parent.scope in (b.scope, PUBLIC), b, "follows a block of another tenant")
            children[id(parent)] += 1
            pins[id(parent)] += pins[id(b)] > 0
            shields[id(parent)] += parent.scope is PUBLIC and (b.scope in self.floors or shields[id(b)] > 0)
        for key, b in self._blocks.items():
            _law(key == b.id, b, f"is kept as {key}")
            found = (b.children, b.pins, b.shields)
            _law(found == (children[id(b)], pins[id(b)], shields[id(b)]), b, "has a wrong count")
        size = Counter(b.scope for b in blocks)
        loose = Counter(b.scope for b in blocks if not b.pins and not b.shields)
        same = self._size == size and self._loose == loose and self._num_loose == loose.total()
        _law(same, self, "does not have the blocks that it counts")
        _law(all(times > 0 for times in self._locks.values()), self, "has a lock of nobody")
        for queue in (self._common, *self._queues.values()):
            leaves = {id(b) for b in blocks if self._queue(b) is queue and not b.pins and not b.children}
            queued = [id(b) for b in queue.blocks()]
            right = len(queued) == len(queue) == len(leaves) and set(queued) == leaves
            _law(right, self, "has a queue with other blocks than those that may leave")


def _law(holds: bool, who: Any, broken: str) -> None:
    if not holds:
        name = f"block {who.id}" if isinstance(who, CachedBlock) else type(who).__name__
        raise MinillmError(f"the prefix cache is broken: {name} {broken}")


def _floor(tenant: Any, floor: Any) -> bool:
    if not isinstance(tenant, str) or not isinstance(floor, int) or isinstance(floor, bool) or floor < 0:
        raise MinillmError(f"floors: a tenant's name and a number of blocks, 0 or more, got {tenant!r}: {floor!r:.80}")
    return floor > 0
