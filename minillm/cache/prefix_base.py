"""Finding and keeping prefixes, whatever the index. Lesson 11 builds it; prefix.py describes the protocol.

Two metrics that are easily mixed up: a request hits if its first block is known; how much work that saves is a matter
of how many of its blocks are. And neither has to do with the KV cache within a request, which is always there.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minillm.cache.block_tree import BlockTree, OnEvict
from minillm.cache.eviction import CachedBlock, EvictionPolicy
from minillm.cache.namespace import PUBLIC, Namespace, positive
from minillm.errors import MinillmError


@dataclass
class PrefixStats:
    """Counted by `match`, or `use`, as found. A caller that computes the last token anyway uses less of a full hit."""

    queries: int = 0
    request_hits: int = 0  # queries of which at least one block was known
    queried_tokens: int = 0
    hit_tokens: int = 0
    queried_blocks: int = 0  # whole ones: a tail shorter than a block cannot hit
    block_hits: int = 0
    inserted: int = 0
    evicted: int = 0

    @property
    def request_hit_rate(self) -> float:
        return self.request_hits / self.queries if self.queries else 0.0

    @property
    def block_hit_rate(self) -> float:
        return self.block_hits / self.queried_blocks if self.queried_blocks else 0.0


class PrefixBase(BlockTree):
    """match, insert and what is seen from outside. An index adds `_walk`, `_add`, `_forget` and `_check_index`."""

    def __init__(
        self,
        block_size: int,
        floors: Mapping[str, int] | None = None,
        policy: EvictionPolicy | None = None,
        on_evict: OnEvict | None = None,
    ):
        self.block_size = positive("block_size", block_size)
        self.stats = PrefixStats()
        super().__init__(floors, policy, on_evict)

    def match(self, tokens: Sequence[int], namespace: Namespace) -> tuple[list[int], int]:
        """Ids of the longest known run of whole blocks, and its tokens. It counts as used now."""
        ids, hit = self.peek(tokens, namespace)
        self.use(ids, len(tokens))
        return ids, hit

    def peek(self, tokens: Sequence[int], namespace: Namespace) -> tuple[list[int], int]:
        """What `match` would give, without using it: neither recency nor statistics change."""
        path = self._walk(tokens, namespace, None)
        return [block.id for block in path], len(path) * self.block_size

    def use(self, ids: Sequence[int], num_tokens: int, counted: bool = True) -> None:
        """What `peek` found of a request of so many tokens is taken: `match` in two parts, without a second walk.

        Blocks that have left since are the last ones. counted: whether it is a query of the statistics; one that comes
        back after a preemption was counted when it came.
        """
        if counted:
            self.stats.queries += 1
            self.stats.request_hits += bool(ids)
            self.stats.queried_tokens += num_tokens
            self.stats.hit_tokens += len(ids) * self.block_size
            self.stats.queried_blocks += num_tokens // self.block_size
            self.stats.block_hits += len(ids)
        last = next((block for i in reversed(ids) if (block := self._blocks.get(i)) is not None), None)
        if last is not None:
            self._time += 1
            last.uses += 1
            self._touch(last)

    def insert(self, tokens: Sequence[int], namespace: Namespace, ids: Sequence[int], known: int = 0) -> list[int]:
        """Block ids[i] holds tokens[i * block_size : (i + 1) * block_size]. Returns the ids that the cache took.

        A block whose tokens are known under another id, its twin, is not taken; those after it go under the twin.
        known: so many leading ids the caller has inserted or matched before and holds since. They are not compared
        again, so that a block more costs O(1) and not O(context).
        """
        self._judge(tokens, ids, known)
        at, start = next(
            ((i, b) for i in range(known - 1, -1, -1) if (b := self._known(ids[i])) is not None), (-1, None)
        )
        if start is not None:
            self._judge_start(start, tokens, namespace, at)
        first = start.depth if start else 0
        rest = [operator.index(i) for i in ids[first:]]
        if len(set(rest)) != len(rest) or min(rest, default=1) < 1:
            raise MinillmError(f"insert takes different block ids, 1 or more, got {rest!r:.80}")
        path = self._walk(tokens, namespace, start)
        for i, id in enumerate(rest):
            if id in self._blocks and (i >= len(path) or path[i].id != id):
                raise MinillmError(f"block {id} is in the cache already, for other tokens; nothing was inserted")
        self._time += 1
        block = path[-1] if path else start
        new = rest[len(path) :]
        for id, twin in zip(rest, path):
            if id != twin.id:
                self._twins[id] = twin
        for i, id in enumerate(new, first + len(path)):
            content = tuple(tokens[i * self.block_size : (i + 1) * self.block_size])
            scope = namespace.scope(i, self.block_size)
            block = CachedBlock(id, content, namespace.model, scope, block, i + 1, self._time, self._time)
            self._add(block)
            self._take(block)
        if block is not None:
            self._touch(block)
        self.stats.inserted += len(new)
        return new

    def _reset(self) -> None:
        super()._reset()
        self._twins: dict[int, CachedBlock] = {}  # id of a block that was not taken -> the one that has its tokens

    def _judge(self, tokens: Sequence[int], ids: Sequence[int], known: int) -> None:
        if len(tokens) != len(ids) * self.block_size:
            raise MinillmError(
                f"insert takes whole blocks: {len(ids)} ids of {self.block_size} tokens each stand for "
                f"{len(ids) * self.block_size} tokens, got {len(tokens)}"
            )
        if not 0 <= known <= len(ids):
            raise MinillmError(f"known is how many of the {len(ids)} ids are known already, got {known!r}")

    def _known(self, id: int) -> CachedBlock | None:
        """The block that stands for an id that was inserted before: its own, or its twin if that is still here."""
        block = self._blocks.get(id)
        if block is None and (twin := self._twins.get(id)) is not None and self._blocks.get(twin.id) is twin:
            return twin
        return block

    def _judge_start(self, start: CachedBlock, tokens: Sequence[int], namespace: Namespace, at: int) -> None:
        """As much of a wrong `known` as can be seen without comparing the whole prefix."""
        end = start.depth * self.block_size
        there = start.depth == at + 1
        same = tuple(tokens[end - self.block_size : end]) == start.tokens and start.model == namespace.model
        if not there or not same or start.scope != namespace.scope(start.depth - 1, self.block_size):
            raise MinillmError(
                f"block {start.id} is in the cache already, for other tokens or another namespace; nothing was inserted"
            )

    def unlock(self, ids: Iterable[int]) -> None:
        ids = list(ids)
        super().unlock(ids)
        for id in ids:
            if id not in self._locks:
                self._twins.pop(id, None)

    unlock.__doc__ = BlockTree.unlock.__doc__

    def evict(self, n: int, tenant: str | None = None) -> list[int]:
        gone = super().evict(n, tenant)
        self.stats.evicted += len(gone)
        return gone

    evict.__doc__ = BlockTree.evict.__doc__

    def clear(self) -> list[int]:
        """Forget every block, locked ones too, as after a change of weights. Returns the ids; the caller frees them.

        Locks stay, for the requests still hold their blocks. `on_evict` is not called.
        """
        ids = list(self._blocks)
        self._reset()
        return ids

    def check(self) -> None:
        """Raise MinillmError unless every count equals a recount, the queues hold exactly what may leave, and the index
        finds each block, once.
        """
        super().check()
        twins = Counter((id(b.parent), b.model, b.scope, b.tokens) for b in self._blocks.values())
        if any(n > 1 for n in twins.values()):
            raise MinillmError("the prefix cache is broken: two blocks hold the same tokens after the same prefix")
        self._check_index()

    def snapshot(self) -> dict[str, Any]:
        """The tree as plain dicts and lists, for pictures and JSON.

        {block_size, time, roots: [node]}; node: {tokens, ids, public, tenant (None if public), engine, adapter,
        last_used, uses (of the node's first block: the most), locked (the ids that requests hold), children: [node]}.
        """
        roots: list[dict[str, Any]] = []
        nodes: dict[int, dict[str, Any]] = {}  # by identity of the blocks in it
        latest = {id(b): [b.last_used, b.uses] for b in self._blocks.values()}
        order = sorted(self._blocks.values(), key=lambda b: (b.depth, b.born, b.id))  # parents before children
        for b in reversed(order):
            if b.parent is not None:
                above = latest[id(b.parent)]
                above[0], above[1] = max(above[0], latest[id(b)][0]), above[1] + latest[id(b)][1]
        for b in order:
            if self._opens(b):
                last_used, uses = latest[id(b)]
                node: dict[str, Any] = {
                    "tokens": [], "ids": [], "public": b.scope is PUBLIC, "tenant": b.scope, "engine": b.model[0],
                    "adapter": b.model[1], "last_used": last_used, "uses": uses, "locked": [], "children": [],
                }  # fmt: skip
                (roots if b.parent is None else nodes[id(b.parent)]["children"]).append(node)
            else:
                node = nodes[id(b.parent)]
            nodes[id(b)] = node
            node["tokens"].extend(b.tokens)
            node["ids"].append(b.id)
            node["locked"].extend([b.id] * (b.id in self._locks))
        return {"block_size": self.block_size, "time": self._time, "roots": roots}

    def _opens(self, block: CachedBlock) -> bool:
        """Whether a node of the snapshot begins with the block: where the tree forks, or the reader changes."""
        return block.parent is None or block.parent.children > 1 or block.parent.scope != block.scope

    def _walk(self, tokens: Sequence[int], namespace: Namespace, at: CachedBlock | None) -> list[CachedBlock]:
        """The cached blocks that follow `at` (None: from the start) along the tokens, in whole blocks."""
        raise NotImplementedError

    def _add(self, block: CachedBlock) -> None:
        """Put a new block into the index. Its parent is in it."""
        raise NotImplementedError

    def _check_index(self) -> None:
        raise NotImplementedError
