"""Wrong prefix caches, the smallest slip of each kind; and the right ones with a bad hash.

MUTANTS: slip -> the check of the conformance suite that must notice it. INSIDE: slips for the state machine, which sees
counts, names and the laws of the tree as well.
"""

from __future__ import annotations

from minillm.cache.namespace import Namespace
from minillm.cache.prefix import RadixPrefixCache
from minillm.cache.prefix_hash import HashPrefixCache


class Colliding(HashPrefixCache):
    """Every block has the same hash."""

    def __init__(self, block_size, floors=None, policy=None, on_evict=None):
        super().__init__(block_size, floors, policy, on_evict, hash_function=lambda before, reader, tokens: 0)


class HalfColliding(HashPrefixCache):
    """The hash knows the block's first token, but neither who may read it nor what came before."""

    def __init__(self, block_size, floors=None, policy=None, on_evict=None):
        super().__init__(block_size, floors, policy, on_evict, hash_function=lambda before, reader, tokens: tokens[0])


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


class TellsAfterwards(RadixPrefixCache):
    """And only of the last one."""

    def evict(self, n, tenant=None):
        listener, self.on_evict = self.on_evict, None
        gone = super().evict(n, tenant)
        self.on_evict = listener
        for id in gone[-1:]:
            listener(id)
        return gone


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


class CountsTheKnownTwice(RadixPrefixCache):
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
    ExtendsAcrossReaders, CountsAllBlocks, CountsNoPins, ShieldsNothing, TellsAfterwards, ForgetsLocksOnClear,
    PeeksWithATouch, UnlocksHalf, CountsTheKnownTwice, LeavesTheRoot,
]  # fmt: skip
