"""A conformance suite for prefix caches: the reference's, the hash table's, a learner's. Lesson 11.

`faults(make)` plays CHECKS over caches made by `make(block_size, floors)` and says in words what is wrong. A check
needs match, insert, lock, unlock and evict with the signatures of `minillm.cache.prefix.PrefixCache`, no more.
PrefixModel is the slow and obvious cache that random games are compared with.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minillm.cache.namespace import PUBLIC, Namespace
from minillm.errors import MinillmError

Make = Callable[[int, Mapping[str, int]], Any]
Path = tuple[tuple[str, str], tuple[tuple[str | None, tuple[int, ...]], ...]]  # model, (scope, tokens) of each block


class PrefixFault(AssertionError):
    """What a prefix cache did wrong, for its author."""


@dataclass
class Kept:
    id: int
    born: int
    last_used: int
    uses: int = 0


class PrefixModel:
    """A dictionary from whole prefixes to ids, searched from end to end for every question."""

    def __init__(
        self,
        block_size: int,
        floors: Mapping[str, int] | None = None,
        key: Callable[[Kept], Any] = lambda kept: kept.last_used,
    ):
        self.block_size, self.floors, self.key = block_size, dict(floors or {}), key
        self.kept: dict[Path, Kept] = {}
        self.locks: Counter[int] = Counter()
        self.time = 0

    def paths(self, tokens: Sequence[int], namespace: Namespace) -> list[Path]:
        bs = self.block_size
        blocks: list[tuple[str | None, tuple[int, ...]]] = []
        for end in range(bs, len(tokens) + 1, bs):
            scope = PUBLIC if end <= namespace.public_tokens else namespace.tenant
            blocks.append((scope, tuple(tokens[end - bs : end])))
        return [((namespace.engine, namespace.adapter), tuple(blocks[: i + 1])) for i in range(len(blocks))]

    def known(self, tokens: Sequence[int], namespace: Namespace) -> list[Path]:
        paths = self.paths(tokens, namespace)
        return paths[: next((i for i, path in enumerate(paths) if path not in self.kept), len(paths))]

    def match(self, tokens: Sequence[int], namespace: Namespace) -> tuple[list[int], int]:
        self.time += 1
        known = self.known(tokens, namespace)
        for path in known:
            self.kept[path].last_used = self.time
            self.kept[path].uses += 1
        return [self.kept[path].id for path in known], len(known) * self.block_size

    def insert(self, tokens: Sequence[int], namespace: Namespace, ids: Sequence[int]) -> list[int]:
        self.time += 1
        new = []
        for path, id in zip(self.paths(tokens, namespace), ids):
            if path not in self.kept:
                self.kept[path] = Kept(id, self.time, self.time)
                new.append(id)
            self.kept[path].last_used = self.time
        return new

    def lock(self, ids: Iterable[int]) -> None:
        self.locks.update(ids)

    def unlock(self, ids: Iterable[int]) -> None:
        self.locks.subtract(ids)

    def below(self, path: Path) -> list[Path]:
        """The path and those that go on from it."""
        model, blocks = path
        return [p for p in self.kept if p[0] == model and p[1][: len(blocks)] == blocks]

    def pinned(self, path: Path) -> bool:
        return any(self.locks[self.kept[p].id] > 0 for p in self.below(path))

    def size(self, tenant: str | None) -> int:
        return sum(blocks[-1][0] == tenant for _, blocks in self.kept)

    def may_leave(self, path: Path, tenant: str | None) -> bool:
        owner = path[1][-1][0]
        if len(self.below(path)) > 1 or self.pinned(path):
            return False
        return owner is PUBLIC or owner == tenant or self.size(owner) > self.floors.get(owner, 0)

    def evict(self, n: int, tenant: str | None = None) -> list[int]:
        gone: list[int] = []
        while len(gone) < n and (leaves := [p for p in self.kept if self.may_leave(p, tenant)]):
            first = min(leaves, key=lambda p: (self.key(self.kept[p]), self.kept[p].last_used))
            gone.append(self.kept.pop(first).id)
        return gone

    def evictable(self, tenant: str | None = None) -> int:
        """As `BlockTree.evictable` says: without the public blocks above blocks of a tenant with a floor."""
        number = 0
        loose: Counter[str | None] = Counter()
        for path in self.kept:
            owner = path[1][-1][0]
            if self.pinned(path):
                continue
            if owner is PUBLIC:
                number += not any(
                    self.floors.get(p[1][-1][0] or "", 0) for p in self.below(path) if p[1][-1][0] is not PUBLIC
                )
            else:
                loose[owner] += 1
        for owner, blocks in loose.items():
            floor = 0 if owner == tenant else self.floors.get(owner or "", 0)
            number += min(blocks, max(0, self.size(owner) - floor))
        return number


A = Namespace("engine", "ann")
B = Namespace("engine", "bob")


def expect(got: Any, wanted: Any, why: str) -> None:
    if _plain(got) != _plain(wanted):
        raise PrefixFault(f"{why}: expected {wanted!r}, got {got!r:.200}")


def _plain(x: Any) -> Any:
    """Tuples as lists: the difference is nobody's fault."""
    return [_plain(y) for y in x] if isinstance(x, list | tuple) else x


def refuses(call: Callable[[], Any], why: str) -> None:
    try:
        call()
    except ValueError:  # MinillmError is one
        return
    raise PrefixFault(f"{why}: expected a ValueError")


def whole_blocks(make: Make) -> None:
    cache = make(4, {})
    expect(cache.match(range(1, 13), A), ([], 0), "an empty cache knows nothing")
    expect(cache.insert(range(1, 13), A, [5, 3, 9]), [5, 3, 9], "insert returns the ids that are new")
    expect(cache.match(range(1, 13), A), ([5, 3, 9], 12), "the same tokens")
    expect(cache.match(range(1, 12), A), ([5, 3], 8), "11 tokens are two whole blocks and a tail")
    expect(cache.match(range(1, 4), A), ([], 0), "3 tokens are no block")
    expect(cache.match([*range(1, 8), 99, *range(9, 13)], A), ([5], 4), "nothing matches behind a difference")
    expect(cache.match(range(5, 13), A), ([], 0), "the same blocks at another place hold other keys and values")
    expect(cache.match([*range(1, 13), 1, 2, 3, 4], A), ([5, 3, 9], 12), "a longer prompt")


def branches(make: Make) -> None:
    cache = make(2, {})
    cache.insert([1, 1, 2, 2, 3, 3, 4, 4], A, [1, 2, 3, 4])
    expect(cache.insert([1, 1, 2, 2, 5, 5], A, [1, 2, 6]), [6], "two blocks are in already")
    expect(cache.insert([1, 1, 7, 7], A, [1, 8]), [8], "one block is in already")
    expect(cache.match([1, 1, 2, 2, 3, 3, 4, 4], A), ([1, 2, 3, 4], 8), "the first prompt after two forks")
    expect(cache.match([1, 1, 2, 2, 5, 5, 4, 4], A), ([1, 2, 6], 6), "the second prompt")
    expect(cache.match([1, 1, 7, 7, 3, 3], A), ([1, 8], 4), "the third prompt")


def twins(make: Make) -> None:
    cache = make(2, {})
    cache.insert([1, 1, 2, 2], A, [1, 2])
    expect(cache.insert([1, 1, 2, 2, 3, 3], A, [7, 8, 9]), [9], "known tokens under another id are not taken")
    expect(cache.match([1, 1, 2, 2, 3, 3], A), ([1, 2, 9], 6), "the new block hangs under the blocks that are known")
    expect(cache.insert([4, 4, 2, 2], A, [7, 8]), [7, 8], "ids that were not taken are still the caller's")


def namespaces(make: Make) -> None:
    tokens = [1, 1, 2, 2]
    for other in (Namespace("other engine", "ann"), Namespace("engine", "bob"), Namespace("engine", "ann", "adapter")):
        cache = make(2, {})
        cache.insert(tokens, A, [1, 2])
        expect(cache.match(tokens, other), ([], 0), f"{other} must not see the blocks of {A}")
        expect(cache.match(tokens, A), ([1, 2], 4), f"{A} sees its own")
        expect(cache.insert(tokens, other, [3, 4]), [3, 4], "each namespace keeps its own blocks of equal tokens")
        expect(cache.match(tokens, other), ([3, 4], 4), f"{other} sees its own")
        expect(cache.match(tokens, A), ([1, 2], 4), f"{A} sees its own still")


def public(make: Make) -> None:
    cache = make(2, {})
    ann, bob = (Namespace("engine", name, "", 5) for name in ("ann", "bob"))  # two whole public blocks and a token
    cache.insert([1, 1, 2, 2, 3, 3], ann, [1, 2, 3])
    expect(cache.match([1, 1, 2, 2, 3, 3], bob), ([1, 2], 4), "blocks wholly inside the public prefix, and no more")
    expect(cache.insert([1, 1, 2, 2, 3, 3], bob, [4, 5, 6]), [6], "only the block behind the public ones is bob's")
    expect(cache.match([1, 1, 2, 2, 3, 3], ann), ([1, 2, 3], 6), "ann's block behind the public ones")
    expect(cache.match([1, 1, 2, 2, 3, 3], bob), ([1, 2, 6], 6), "bob's block behind the public ones")
    expect(cache.match([1, 1, 2, 2], B), ([], 0), "a request that was not allowed the public prefix does not see it")
    expect(cache.match([1, 1], Namespace("other", "ann", "", 5)), ([], 0), "public to tenants, not to other engines")


def leaves_first(make: Make) -> None:
    cache = make(2, {})
    cache.insert([1, 1, 2, 2, 3, 3], A, [1, 2, 3])
    expect(cache.evict(1), [3], "the last block first: the others are found without it, not the other way round")
    expect(cache.match([1, 1, 2, 2, 3, 3], A), ([1, 2], 4), "what is left is found")
    cache.insert([1, 1, 4, 4], A, [1, 4])
    expect(cache.evict(9), [2, 4, 1], "a block leaves when all that follow it are gone")
    expect(cache.match([1, 1], A), ([], 0), "everything is gone")
    expect(cache.evict(3), [], "nothing is left to give")


def least_recent(make: Make) -> None:
    cache = make(2, {})
    for i in (1, 2, 3, 4):
        cache.insert([i, i], A, [i])
    cache.match([1, 1], A)
    cache.insert([2, 2], A, [9])
    expect(cache.evict(3), [3, 4, 1], "what was matched or inserted again counts as used now")
    cache = make(2, {})
    cache.insert([1, 1, 2, 2], A, [1, 2])
    cache.insert([1, 1, 3, 3], A, [1, 3])
    cache.insert([4, 4], A, [4])
    cache.match([1, 1, 2, 2], A)
    expect(cache.evict(4), [3, 4, 2, 1], "who uses a block uses all before it")
    cache.insert([1, 1, 2, 2], A, [1, 2])
    cache.insert([3, 3], A, [3])
    cache.match([1, 1, 2, 2], A)
    cache.lock([3])
    expect(cache.evict(1), [2], "block 3 is older, but a request holds it")
    cache.unlock([3])
    expect(cache.evict(2), [3, 1], "block 1 was used with block 2, after block 3")


def locks(make: Make) -> None:
    cache = make(2, {})
    cache.insert([1, 1, 2, 2], A, [1, 2])
    cache.insert([3, 3], A, [3])
    cache.lock([1, 2])
    cache.lock([1, 2])
    expect(cache.evict(5), [3], "a block that a request holds stays")
    cache.unlock([1, 2])
    expect(cache.evict(5), [], "two requests held it, one let go")
    cache.unlock([2])
    expect(cache.evict(5), [2], "the first block is still held, the second is not")
    cache.unlock([1])
    expect(cache.evict(5), [1], "nobody holds it any more")
    refuses(lambda: cache.unlock([1]), "unlocking what is not locked")
    cache.lock([5, 6])
    cache.insert([5, 5, 6, 6], A, [5, 6])
    expect(cache.evict(5), [], "they were locked before they were inserted: a request holds them")
    cache.unlock([5, 6])
    expect(cache.evict(5), [6, 5], "the request is gone")
    cache.insert([1, 1], A, [1])
    cache.insert([1, 1, 2, 2], A, [7, 2])
    cache.lock([7, 2])
    expect(cache.evict(5), [], "block 2 is held and hangs under block 1, which nobody holds: 1 must stay")


def floors(make: Make) -> None:
    cache = make(2, {"ann": 2})
    for i in (1, 2, 3):
        cache.insert([i, i], A, [i])
    for i in (4, 5):
        cache.insert([i, i], B, [i])
    expect(cache.evict(9, "bob"), [1, 4, 5], "bob may bring ann down to her floor of 2 blocks, not below")
    expect(cache.evict(9), [], "on nobody's behalf every floor holds")
    expect(cache.evict(1, "ann"), [2], "a floor is no protection from oneself")
    cache.insert([6, 6, 7, 7], Namespace("engine", "ann", "", 2), [6, 7])
    expect(cache.evict(9, "bob"), [], "ann's block hangs under a public one: it stays too")
    expect(cache.evict(9, "ann"), [3, 7, 6], "her own")


def misuse(make: Make) -> None:
    cache = make(2, {})
    cache.insert([1, 1, 2, 2], A, [1, 2])
    refuses(lambda: cache.insert([3, 3, 4, 4], A, [3]), "an id for each whole block")
    refuses(lambda: cache.insert([3, 3, 4], A, [3]), "insert takes whole blocks")
    refuses(lambda: cache.insert([3, 3, 4, 4], A, [3, 2]), "block 2 holds other tokens")
    refuses(lambda: cache.insert([1, 1, 2, 2], B, [3, 2]), "block 2 is another tenant's")
    refuses(lambda: cache.evict(-1), "a negative number")
    expect(cache.match([3, 3], A), ([], 0), "an insert that is refused leaves no trace")
    expect(cache.match([1, 1, 2, 2], A), ([1, 2], 4), "an insert that is refused changes nothing")


def play(make: Make, seed: int, steps: int = 120) -> None:
    """A random game against the model: few tokens, so that prefixes meet; few blocks, so that something must leave."""
    rng = random.Random(seed)
    limits = rng.choice(({}, {"ann": 2}, {"ann": 1, "bob": 3}))
    cache, model = make(2, limits), PrefixModel(2, limits)
    free = list(range(1, 25))
    held: list[list[int]] = []  # the block table of each request under way
    for step in range(steps):
        namespace = Namespace("engine", rng.choice(("ann", "bob")), rng.choice(("", "", "x")), rng.choice((0, 0, 3, 4)))
        tokens = [rng.randrange(2) for _ in range(rng.randrange(11))]
        where = f"random game {seed}, step {step}"
        what = rng.choice(("request", "request", "match", "evict", "finish"))
        if what == "match":
            expect(cache.match(tokens, namespace), model.match(tokens, namespace), f"{where}, match{tokens, namespace}")
        elif what == "finish" and held:
            ids = held.pop(rng.randrange(len(held)))
            cache.unlock(ids)
            model.unlock(ids)
            free += sorted(
                i for i in set(ids) if not model.locks[i] > 0 and all(k.id != i for k in model.kept.values())
            )
        elif what == "evict":
            n, tenant = rng.randrange(5), rng.choice((None, "ann", "bob"))
            gone = model.evict(n, tenant)
            expect(cache.evict(n, tenant), gone, f"{where}, evict{n, tenant}")
            free += [i for i in gone if not model.locks[i] > 0]
        elif what == "request":
            tokens = tokens[: len(tokens) // 2 * 2]
            ids, _ = model.match(tokens, namespace)
            expect(cache.match(tokens, namespace), (ids, 2 * len(ids)), f"{where}, match{tokens, namespace}")
            ids = ids[: rng.randrange(len(ids) + 1)]  # it may have begun before the others were inserted
            missing = len(tokens) // 2 - len(ids)
            if missing > len(free):
                continue
            ids, free = ids + free[:missing], free[missing:]
            cache.lock(ids)
            model.lock(ids)
            held.append(ids)
            wanted = model.insert(tokens, namespace, ids)
            expect(cache.insert(tokens, namespace, ids), wanted, f"{where}, insert{tokens, namespace, ids}")


def games(make: Make) -> None:
    for seed in range(40):
        play(make, seed)


CHECKS: dict[str, Callable[[Make], None]] = {
    "whole blocks": whole_blocks,
    "branches": branches,
    "twins": twins,
    "namespaces": namespaces,
    "public prefixes": public,
    "leaves first": leaves_first,
    "least recently used": least_recent,
    "locks": locks,
    "floors": floors,
    "misuse": misuse,
    "random games": games,
}


def faults(make: Make, checks: Iterable[str] = tuple(CHECKS)) -> dict[str, str]:
    """Check -> what went wrong. Empty if the cache is one."""
    found = {}
    for name in checks:
        try:
            CHECKS[name](make)
        except PrefixFault as fault:
            found[name] = str(fault)
        except MinillmError as error:
            found[name] = f"refused what is allowed: {error}"
        except Exception as error:
            found[name] = f"raised {type(error).__name__}: {error}"
    return found
