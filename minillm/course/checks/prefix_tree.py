"""References and typical mistakes of exercise 11: keys of blocks, a tree that matches, inserts and evicts, a policy.

Flat dictionaries from whole paths in place of nodes, apart from solutions/ and the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minillm.cache.prefix import Namespace, RadixPrefixCache
from minillm.course.candidate import CandidateError, NotAttempted, OverTimeError
from minillm.course.checks.prefix_part import prefix_part
from minillm.course.checks.prefix_suite import CHECKS, PrefixFault, play
from minillm.course.checks.shadows import first_fault
from minillm.errors import MinillmError
from minillm.trace.prefixes import Arrival, retrieval, system_prompt

MODEL = ("weights", "tokenizer", "template", "attention", "adapter")

# 11.2 keys


def block_keys(tokens: Sequence[int], block_size: int, namespace: dict[str, Any], leave: int) -> list[Any]:
    return keys_with(tokens, block_size, namespace, leave)


def keys_with(
    tokens: Sequence[int], block_size: int, namespace: dict[str, Any], leave: int, *, without: str = "",
    everybody: str = "public", tail: bool = False, cap: bool = True, all_but_one: bool = False,
    content: Callable[[tuple[int, ...]], Any] = lambda block: block, public_up: bool = False,
) -> list[Any]:  # fmt: skip
    """without: a part of the model that is left out; everybody: "public" blocks, "all", or "nobody's"."""
    end = len(tokens) - (leave if cap else 0)
    if all_but_one and leave:
        end = len(tokens) // block_size * block_size - block_size  # drops a block of every request
    model = tuple(namespace[part] for part in MODEL if part != without)
    keys: list[Any] = []
    for start in range(0, end, block_size):
        block = tuple(tokens[start : min(start + block_size, end)])
        if len(block) < block_size and not tail:
            break
        inside = start < namespace["public_tokens"] if public_up else start + block_size <= namespace["public_tokens"]
        shared = everybody == "all" or (everybody == "public" and inside)
        keys.append((model, None if shared else ("of", namespace["tenant"]), content(block)))
    return keys


PLAIN = {
    "weights": "w1", "tokenizer": "t1", "template": "c1", "attention": "a1", "adapter": "", "tenant": "ann",
    "public_tokens": 0,
}  # fmt: skip


def counted(answer: Any, requests: Sequence[tuple[list[int], int, dict[str, Any], int]]) -> list[int]:
    """How many keys each request gets. They must be usable in a dict."""
    out = []
    for tokens, block_size, change, leave in requests:
        keys = answer(list(tokens), block_size, PLAIN | change, leave)
        hash(tuple(keys))
        out.append(len(keys))
    return out


def shared(answer: Any, tokens: list[int], block_size: int, pairs: Sequence[tuple[Any, Any]]) -> list[int]:
    """How many leading blocks the two requests of each pair could share. A change: of the namespace, or the tokens."""
    out = []
    for one, other in pairs:
        a, b = (
            answer(list(change), block_size, dict(PLAIN), 0) if isinstance(change, list)
            else answer(list(tokens), block_size, PLAIN | change, 0)
            for change in (one, other)
        )  # fmt: skip
        out.append(next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b))))
    return out


# 11.3 and 11.4 the tree


class PrefixTree:
    """path (all keys up to the block) -> [id, last use]."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], list[int]] = {}
        self.now = 0

    def walk(self, keys: Sequence[Any]) -> list[tuple[Any, ...]]:
        paths = [tuple(keys[: i + 1]) for i in range(len(keys))]
        return paths[: next((i for i, p in enumerate(paths) if p not in self.known), len(paths))]

    def mark(self, paths: Sequence[tuple[Any, ...]]) -> None:
        self.now += 1
        for p in paths:
            self.known[p][1] = self.now

    def match(self, keys: Sequence[Any]) -> list[int]:
        paths = self.walk(keys)
        self.mark(paths)
        return [self.known[p][0] for p in paths]

    def insert(self, keys: Sequence[Any], ids: Sequence[int]) -> list[int]:
        new = []
        for i, id in enumerate(ids):
            if tuple(keys[: i + 1]) not in self.known:
                self.known[tuple(keys[: i + 1])] = [id, 0]
                new.append(id)
        self.mark(self.walk(keys))
        return new

    def leaf(self, path: tuple[Any, ...]) -> bool:
        return not any(len(p) > len(path) and p[: len(path)] == path for p in self.known)

    def order(self, path: tuple[Any, ...]) -> Any:
        return self.known[path][1]

    def evict(self, n: int, held: Sequence[int]) -> list[int]:
        gone: list[int] = []
        while len(gone) < n:
            free = [p for p in self.known if self.known[p][0] not in held and self.leaf(p)]
            if not free:
                break
            gone.append(self.known.pop(min(free, key=self.order))[0])
        return gone


class AnyPlace(PrefixTree):
    """A block is looked up by its own key alone."""

    def walk(self, keys: Sequence[Any]) -> list[tuple[Any, ...]]:
        by_last = {p[-1]: p for p in self.known}
        found: list[tuple[Any, ...]] = []
        for key in keys:
            if key not in by_last:
                break
            found.append(by_last[key])
        return found


class AllOrNothing(PrefixTree):
    def match(self, keys: Sequence[Any]) -> list[int]:
        ids = super().match(keys)
        return ids if len(ids) == len(keys) else []


class OverTheGap(PrefixTree):
    """Goes on behind a block that is missing."""

    def match(self, keys: Sequence[Any]) -> list[int]:
        super().match(keys)
        by_place = {(len(p), p[-1]): self.known[p][0] for p in self.known}
        return [by_place[i + 1, k] for i, k in enumerate(keys) if (i + 1, k) in by_place]


class TwinsReplace(PrefixTree):
    def insert(self, keys: Sequence[Any], ids: Sequence[int]) -> list[int]:
        super().insert(keys, ids)
        for i, id in enumerate(ids):
            self.known[tuple(keys[: i + 1])][0] = id
        return list(ids)


class TakesAll(PrefixTree):
    """The tree is right; the answer names all ids."""

    def insert(self, keys: Sequence[Any], ids: Sequence[int]) -> list[int]:
        super().insert(keys, ids)
        return list(ids)


class TwinEnds(PrefixTree):
    """Nothing is taken behind a block that is known under another id."""

    def insert(self, keys: Sequence[Any], ids: Sequence[int]) -> list[int]:
        for i, id in enumerate(ids):
            at = self.known.get(tuple(keys[: i + 1]))
            if at is not None and at[0] != id:
                self.mark(self.walk(keys))
                return []
        return super().insert(keys, ids)


class FirstOnly(PrefixTree):
    """A prompt that begins like another one is not inserted."""

    def insert(self, keys: Sequence[Any], ids: Sequence[int]) -> list[int]:
        if keys and tuple(keys[:1]) in self.known:
            self.mark(self.walk(keys))
            return []
        return super().insert(keys, ids)


class OldestFirst(PrefixTree):
    """Roots leave before their subtrees: what hangs below can never be found, and never leaves."""

    def evict(self, n: int, held: Sequence[int]) -> list[int]:
        gone: list[int] = []
        while len(gone) < n:
            reach = [p for p in self.known if all(p[:i] in self.known for i in range(1, len(p)))]
            free = [p for p in reach if self.known[p][0] not in held]
            if not free:
                break
            gone.append(self.known.pop(min(free, key=lambda p: (self.known[p][1], len(p))))[0])
        return gone


class MostRecent(PrefixTree):
    def order(self, path: tuple[Any, ...]) -> Any:
        return -self.known[path][1]


class Unmarked(PrefixTree):
    """`match` is no use: first in, first out."""

    def match(self, keys: Sequence[Any]) -> list[int]:
        return [self.known[p][0] for p in self.walk(keys)]


class LastMarked(PrefixTree):
    """Only the last block of a hit counts as used."""

    def match(self, keys: Sequence[Any]) -> list[int]:
        paths = self.walk(keys)
        self.mark(paths[-1:])
        return [self.known[p][0] for p in paths]


class HeldLeaves(PrefixTree):
    def evict(self, n: int, held: Sequence[int]) -> list[int]:
        return super().evict(n, [])


class OneRound(PrefixTree):
    """A block whose last child has left is not seen."""

    def evict(self, n: int, held: Sequence[int]) -> list[int]:
        free = sorted((p for p in self.known if self.known[p][0] not in held and self.leaf(p)), key=self.order)
        return [self.known.pop(p)[0] for p in free[:n]]


class StopsAtHeld(PrefixTree):
    """Gives up at the first leaf that is held."""

    def evict(self, n: int, held: Sequence[int]) -> list[int]:
        gone: list[int] = []
        while len(gone) < n and self.known:
            first = min((p for p in self.known if self.leaf(p)), key=self.order)
            if self.known[first][0] in held:
                break
            gone.append(self.known.pop(first)[0])
        return gone


class AllOrNone(PrefixTree):
    """Evicts nothing when it cannot evict n."""

    def evict(self, n: int, held: Sequence[int]) -> list[int]:
        before = {p: list(v) for p, v in self.known.items()}
        gone = super().evict(n, held)
        if len(gone) < n:
            self.known = before
            return []
        return gone


class StillFound(PrefixTree):
    """What has left is matched for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.everything: dict[tuple[Any, ...], int] = {}

    def insert(self, keys: Sequence[Any], ids: Sequence[int]) -> list[int]:
        new = super().insert(keys, ids)
        self.everything.update({p: self.known[p][0] for p in self.walk(keys)})
        return new

    def match(self, keys: Sequence[Any]) -> list[int]:
        super().match(keys)
        out: list[int] = []
        for i in range(len(keys)):
            if (id := self.everything.get(tuple(keys[: i + 1]))) is None:
                break
            out.append(id)
        return out


def key(letter: str) -> Any:
    """The key of a block in a script: "A" is ann's block of tokens 1, 1; "a" is the same text of bob's."""
    return ("engine", "ann" if letter.isupper() else "bob", (ord(letter.upper()) - 64,) * 2)


def script(kind: Any, steps: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What each call returns. ("match", "ABC"), ("insert", "ABC", ids), ("evict", n, held ids)."""
    cache, said = kind(), []
    for what, *args in steps:
        if what == "evict":
            said.append(list(cache.evict(args[0], list(args[1]))))
        elif what == "match":
            said.append(list(cache.match([key(c) for c in args[0]])))
        else:
            said.append(list(cache.insert([key(c) for c in args[0]], list(args[1]))))
    return said


def steps(*script: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: ([*script],)


def _part(kind: Any) -> Any:
    return prefix_part(block_keys, kind)


def laws(kind: Any, names: Sequence[str], games: Sequence[int]) -> str:
    """The conformance suite of the engine's own prefix caches (prefix_suite.py), over the answer."""
    make = _part(kind)
    try:
        for name in names:
            CHECKS[name](make)
        for seed in games:
            play(make, seed, 60)
    except (NotAttempted, OverTimeError):
        raise
    except (PrefixFault, CandidateError, MinillmError) as fault:
        return str(fault)
    return "every law holds"


def schedules(kind: Any, seeds: Sequence[int]) -> str:
    """Random schedules of a whole engine whose slots know what they hold."""
    return first_fault(seeds, prefix=_part(kind)) or "every request read its own tokens, and no block is lost"


# 11.5 the policy


def eviction_key(last_used: int, uses: int, credit: int, most: int) -> Any:
    return key_with(last_used, uses, credit, most)


def key_with(last_used: int, uses: int, credit: int, most: int, *, kind: str = "right") -> Any:
    return {
        "right": last_used + credit * min(uses, most), "lru": last_used, "lfu": uses, "pair": (uses, last_used),
        "unbounded": last_used + credit * uses, "negative": -(last_used + credit * min(uses, most)),
        "minus": last_used - credit * min(uses, most), "at least": last_used + credit * max(uses, most),
        "bounded product": last_used + min(credit * uses, most), "any use": last_used + credit * (uses > 0),
    }[kind]  # fmt: skip


def ranked(answer: Any, blocks: dict[str, tuple[int, int]], credit: int, most: int) -> list[str]:
    """The names of the blocks (last use, uses) in the order in which they leave."""
    return sorted(blocks, key=lambda name: (answer(*blocks[name], credit, most), name))


class _Policy:
    def __init__(self, answer: Any, credit: int, most: int):
        self.answer, self.credit, self.most = answer, credit, most

    def key(self, block: Any) -> Any:
        return self.answer(block.last_used, block.uses, self.credit, self.most)


def replay(answer: Any, workload: Sequence[Arrival], room: int, credit: int, most: int) -> int:
    """Blocks hit by a workload, in a cache with room for so many."""
    size, hits = 16, 0
    cache = RadixPrefixCache(size, {}, _Policy(answer, credit, most))
    free = list(range(1, room + 1))
    for a in workload:
        who, whole = Namespace("engine", a.tenant), len(a.tokens) // size
        ids, _ = cache.match(a.tokens, who)
        hits += len(ids)
        cache.lock(ids)
        free += cache.evict(max(0, whole - len(ids) - len(free)))
        new = [free.pop() for _ in range(min(whole - len(ids), len(free)))]
        path = [*ids, *new]
        cache.insert(a.tokens[: len(path) * size], who, path)
        cache.unlock(ids)
    return hits


def replays(answer: Any, names: Sequence[str], room: int, credit: int, most: int) -> list[int]:
    return [replay(answer, WORKLOADS[name](), room, credit, most) for name in names]


def _scan() -> list[Arrival]:
    """A product's prompt in bursts, and between them documents that nobody asks for again."""
    own, scan = system_prompt(24, shared=64, own=16, seed=1), system_prompt(48, shared=16, own=64, products=48, seed=2)
    return [a for i in range(12) for a in (*own[2 * i : 2 * i + 2], *scan[4 * i : 4 * i + 4])]


def _yesterday() -> list[Arrival]:
    """A prompt that was very popular and is so no longer, then two new ones."""
    return system_prompt(20, shared=96, own=16, seed=3) + system_prompt(60, shared=64, own=16, products=2, seed=4)


WORKLOADS: dict[str, Callable[[], list[Arrival]]] = {
    "a scan": _scan,
    "yesterday's favourite": _yesterday,
    "documents": lambda: retrieval(40, document=48, documents=2, order="library", seed=5),
}
