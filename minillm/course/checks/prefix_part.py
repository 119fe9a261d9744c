"""A learner's prefix cache as a part of the engine. Exercise and lesson 11 mount theirs with it.

The learner writes what is the idea: keys of blocks, a tree that matches and inserts, and `evict`. The engine wants more
of a prefix cache (`minillm.cache.prefix.PrefixCache`): locks, floors, counts. `prefix_part(block_keys, PrefixCache)` is
a class that adds these, plainly: it searches where the engine's own cache keeps counts.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minillm.cache.namespace import PUBLIC, Namespace
from minillm.errors import MinillmError

BlockKeys = Callable[[list[int], int, dict[str, Any], int], list[Any]]


@dataclass(frozen=True)
class Kept:
    """What is remembered of a block that the learner's cache took."""

    parent: int | None  # id of the block before it
    tokens: tuple[int, ...]
    namespace: Namespace
    scope: str | None


def prefix_part(block_keys: BlockKeys, make_cache: Callable[[], Any]) -> type[PrefixPart]:
    """What `LLM(parts={"prefix_cache": ...})` takes.

    block_keys(tokens, block_size, namespace, leave) gives a key for each whole block of tokens[: len(tokens) - leave];
    namespace is a dict (see `as_dict`). make_cache() has match(keys) -> ids, insert(keys, ids) -> ids it took, and
    evict(n, held) -> ids that left.
    """
    return type("PrefixPart", (PrefixPart,), {"keys_of": staticmethod(block_keys), "make": staticmethod(make_cache)})


def as_dict(namespace: Namespace) -> dict[str, Any]:
    """The engine has made one name of weights, tokenizer, template and attention: it stands for each of them."""
    engine = namespace.engine
    return {
        "weights": engine, "tokenizer": engine, "template": engine, "attention": engine, "adapter": namespace.adapter,
        "tenant": namespace.tenant, "public_tokens": namespace.public_tokens,
    }  # fmt: skip


class PrefixPart:
    keys_of: BlockKeys
    make: Callable[[], Any]

    def __init__(self, block_size: int, floors: Mapping[str, int] | None = None, policy: Any = None):
        """policy: not used, for the learner's `evict` has its own order."""
        self.block_size, self.floors = block_size, dict(floors or {})
        self.on_evict: Callable[..., Any] | None = None
        self.cache = self.make()
        self.kept: dict[int, Kept] = {}
        self.locks: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self.kept)

    def __contains__(self, id: object) -> bool:
        return id in self.kept

    def match(self, tokens: Sequence[int], namespace: Namespace) -> tuple[list[int], int]:
        ids = _ids("match", self.cache.match(self._keys(tokens, namespace)))
        return ids, len(ids) * self.block_size

    peek = match

    def use(self, ids: Sequence[int], num_tokens: int, counted: bool = True) -> None:
        """The learner's cache was asked by `peek`, and that was a use to it."""

    def insert(self, tokens: Sequence[int], namespace: Namespace, ids: Sequence[int], known: int = 0) -> list[int]:
        size, keys = self.block_size, self._keys(tokens, namespace)
        path = _ids("match", self.cache.match(keys))
        path += list(ids)[len(path) :]
        new = _ids("insert", self.cache.insert(keys, list(ids)))
        for i, id in enumerate(path):
            if id in new:
                before = path[i - 1] if i else None
                text, scope = tuple(tokens[i * size : (i + 1) * size]), namespace.scope(i, size)
                self.kept[id] = Kept(before, text, namespace, scope)
        if strange := [i for i in new if i not in self.kept]:
            raise MinillmError(f"parts: insert says that it took {strange}; it was given {list(ids)!r:.80}")
        return new

    def _keys(self, tokens: Sequence[int], namespace: Namespace) -> list[Any]:
        keys = list(type(self).keys_of(list(tokens), self.block_size, as_dict(namespace), 0))
        if len(keys) != len(tokens) // self.block_size:
            raise MinillmError(f"parts: block_keys gave {len(keys)} keys for {len(tokens)} tokens in blocks of "
                               f"{self.block_size}")  # fmt: skip
        return keys

    def lock(self, ids: Iterable[int]) -> None:
        self.locks.update(ids)

    def unlock(self, ids: Iterable[int]) -> None:
        gone = Counter(ids)
        if any(n > self.locks[i] for i, n in gone.items()):
            raise MinillmError(f"blocks {sorted(gone)} are unlocked more often than they were locked")
        self.locks -= gone

    def evict(self, n: int, tenant: str | None = None) -> list[int]:
        gone: list[int] = []
        while len(gone) < n:
            held = {i for i in self.locks if self.locks[i]} | self._protected(tenant)
            step = 1 if self.floors else n - len(gone)  # a floor may be reached with each block that leaves
            if not (left := _ids("evict", self.cache.evict(step, sorted(held)))):
                break
            for id in left:
                if id not in self.kept:
                    raise MinillmError(f"parts: evict gave block {id}, which is not in the cache")
                if self.on_evict is not None:
                    self.on_evict(id)
                del self.kept[id]
            gone += left
        return gone

    def evictable(self, tenant: str | None = None) -> int:
        """Exact without floors; with them, public blocks above a tenant's with a floor are left out."""
        stay: set[int] = set()
        for id in list(self.locks):
            if self.locks[id]:
                stay.update(self._chain(id))
        for id, kept in self.kept.items():
            if kept.scope in self.floors:
                stay.update(i for i in self._chain(id) if i in self.kept and self.kept[i].scope is PUBLIC)
        loose = Counter(kept.scope for id, kept in self.kept.items() if id not in stay)
        size = Counter(kept.scope for kept in self.kept.values())
        kept_back = sum(
            max(0, loose[name] - max(0, size[name] - floor)) for name, floor in self.floors.items() if name != tenant
        )
        return loose.total() - kept_back

    def _protected(self, tenant: str | None) -> set[int]:
        """Blocks of other tenants that are at their floor."""
        size = Counter(kept.scope for kept in self.kept.values())
        full = {name for name, floor in self.floors.items() if name != tenant and size[name] <= floor}
        return {id for id, kept in self.kept.items() if kept.scope in full}

    def _chain(self, id: int) -> Iterator[int]:
        at: int | None = id
        while at is not None and at in self.kept:
            yield at
            at = self.kept[at].parent

    def clear(self) -> list[int]:
        ids = list(self.kept)
        self.cache = self.make()
        self.kept.clear()
        return ids

    def check(self) -> None:
        """A block whose parent has left can never be found again, and nobody frees it."""
        for id, kept in self.kept.items():
            if kept.parent is not None and kept.parent not in self.kept:
                raise MinillmError(f"block {id} is an orphan: block {kept.parent} before it has left the cache")

    def snapshot(self) -> dict[str, Any]:
        raise MinillmError("a learner's prefix cache has no snapshot")


def _ids(what: str, given: Any) -> list[int]:
    try:
        ids = [operator.index(i) for i in given]
    except TypeError:
        raise MinillmError(f"parts: {what} of the prefix cache must return a list of ids, got {given!r:.80}") from None
    if len(set(ids)) != len(ids):
        raise MinillmError(f"parts: {what} of the prefix cache names a block twice: {ids!r:.80}")
    return ids
