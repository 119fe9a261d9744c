"""A prefix cache as a radix tree over blocks: what one request computed serves all that begin alike. Lesson 11.

As in SGLang's RadixAttention (Zheng et al., 2024), edges are runs of tokens, here of whole blocks, and a run is split
where two prefixes part. Finding a prefix compares its tokens, so nothing can collide. A hash table of chained block
hashes finds the same (prefix_hash.py); both share their tree of blocks, locks and eviction (block_tree.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from minillm.cache.block_tree import OnEvict
from minillm.cache.eviction import FIFO, LFU, LRU, CachedBlock, EvictionPolicy
from minillm.cache.namespace import PUBLIC, Namespace, PublicPrefixes, engine_namespace
from minillm.cache.prefix_base import PrefixBase, PrefixStats
from minillm.errors import MinillmError

__all__ = [
    "FIFO", "LFU", "LRU", "PUBLIC", "CachedBlock", "EvictionPolicy", "Namespace", "PrefixCache", "PrefixStats",
    "PublicPrefixes", "RadixPrefixCache", "engine_namespace",
]  # fmt: skip


class PrefixCache(Protocol):
    """Whole blocks by the tokens that lead up to them. Made with (block_size, floors, policy, on_evict).

    The life of a request: `match`, or `peek` and, if the request fits, `use` of what it found. Of that it may use at
    most num_tokens - 1 tokens, in whole blocks; `lock` of those at once, before anything is evicted; `evict` for the
    blocks that are missing, `lock` of them; `insert` after each
    step that fills a block; `unlock` of its whole block table at the end. The cache counts no references: who calls
    adds one for each id that `insert` returns, and drops it for each that `evict` returns.
    """

    block_size: int
    floors: dict[str, int]
    on_evict: OnEvict | None  # called with its id before a block leaves; who inserted it knows what it holds

    def match(self, tokens: Sequence[int], namespace: Namespace) -> tuple[list[int], int]: ...

    def peek(self, tokens: Sequence[int], namespace: Namespace) -> tuple[list[int], int]: ...

    def use(self, ids: Sequence[int], num_tokens: int, counted: bool = True) -> None: ...

    def insert(self, tokens: Sequence[int], namespace: Namespace, ids: Sequence[int], known: int = 0) -> list[int]: ...

    def lock(self, ids: Iterable[int]) -> None: ...

    def unlock(self, ids: Iterable[int]) -> None: ...

    def evict(self, n: int, tenant: str | None = None) -> list[int]: ...

    def evictable(self, tenant: str | None = None) -> int: ...

    def __len__(self) -> int: ...

    def __contains__(self, id: object) -> bool: ...

    def clear(self) -> list[int]: ...

    def check(self) -> None: ...

    def snapshot(self) -> dict[str, Any]: ...


@dataclass(slots=True, eq=False)
class Run:
    """An edge: blocks of one scope that follow each other. Forks are at its end only."""

    parent: Run | None  # None: the root of a model's tree, which has no blocks
    blocks: list[CachedBlock] = field(default_factory=list)
    children: dict[tuple[str | None, tuple[int, ...]], Run] = field(default_factory=dict)  # by their first block


class RadixPrefixCache(PrefixBase):
    """Costs: `match` one comparison a block and one look-up a run; `insert` the same, and at most one split, of the
    length of the run. A run that lost its siblings is not joined to the run above: its next split would be the same.
    """

    def _reset(self) -> None:
        super()._reset()
        self._roots: dict[tuple[str, str], Run] = {}

    def _walk(self, tokens: Sequence[int], namespace: Namespace, at: CachedBlock | None) -> list[CachedBlock]:
        run = self._roots.get(namespace.model) if at is None else at.place
        if run is None:
            return []
        size, public = self.block_size, namespace.public_tokens // self.block_size
        index = 0 if at is None else at.depth - run.blocks[0].depth + 1
        path: list[CachedBlock] = []
        for i in range(0 if at is None else at.depth, len(tokens) // size):
            content = tuple(tokens[i * size : (i + 1) * size])
            scope = PUBLIC if i < public else namespace.tenant
            if index == len(run.blocks):
                run, index = run.children.get((scope, content)), 0
                if run is None:
                    break
            block = run.blocks[index]
            if block.tokens != content or block.scope != scope:
                break
            path.append(block)
            index += 1
        return path

    def _add(self, block: CachedBlock) -> None:
        parent = block.parent
        if parent is None:
            above = self._roots.setdefault(block.model, Run(None))
        else:
            above = parent.place
            if above.blocks[-1] is not parent:
                self._split(above, parent)
            elif not above.children and above.blocks[0].scope == block.scope:
                block.place = above
                above.blocks.append(block)
                return
        block.place = above.children[block.scope, block.tokens] = Run(above, [block])

    def _split(self, run: Run, last: CachedBlock) -> None:
        """End the run with `last`; the rest becomes its child."""
        at = last.depth - run.blocks[0].depth + 1
        rest = Run(run, run.blocks[at:], run.children)
        for block in rest.blocks:
            block.place = rest
        for child in rest.children.values():
            child.parent = rest
        del run.blocks[at:]
        run.children = {(rest.blocks[0].scope, rest.blocks[0].tokens): rest}

    def _forget(self, block: CachedBlock) -> None:
        run = block.place
        run.blocks.pop()  # a leaf ends its run
        if run.blocks:
            return
        del run.parent.children[block.scope, block.tokens]
        if run.parent.parent is None and not run.parent.children:
            del self._roots[block.model]

    def _opens(self, block: CachedBlock) -> bool:
        return block.place.blocks[0] is block

    def _check_index(self) -> None:
        seen: list[int] = []
        stack = list(self._roots.values())
        if any(root.parent or root.blocks or not root.children for root in stack):
            raise MinillmError("the prefix cache is broken: a root has blocks, or nothing below it")
        while stack:
            run = stack.pop()
            above = run.blocks[-1] if run.blocks else None
            for (scope, content), child in run.children.items():
                first = child.blocks[0] if child.blocks else None
                if first is None or child.parent is not run or (first.scope, first.tokens) != (scope, content):
                    raise MinillmError("the prefix cache is broken: a run is not where its first block says")
                for before, block in zip([above, *child.blocks], child.blocks):
                    if block.place is not child or block.parent is not before or block.scope != scope:
                        raise MinillmError(f"the prefix cache is broken: block {block.id} is in the wrong run")
                    seen.append(block.id)
                stack.append(child)
        if sorted(seen) != sorted(self._blocks):
            raise MinillmError("the prefix cache is broken: its runs do not hold each of its blocks once")
