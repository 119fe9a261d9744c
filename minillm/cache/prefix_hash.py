"""A prefix cache as a hash table of chained block hashes, the way vLLM finds prefixes. Lesson 11 compares it.

The hash of a block covers its tokens and the hash of the block before it, so one look-up a block finds a prefix. Equal
hashes do not mean equal prefixes. So each candidate is verified: the tokens of the block, who may read it, and that the
block before it is the very block found before. By induction the whole prefix is equal, and a collision costs time only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from minillm.cache.block_tree import OnEvict
from minillm.cache.eviction import CachedBlock, EvictionPolicy
from minillm.cache.namespace import PUBLIC, Namespace
from minillm.cache.prefix_base import PrefixBase
from minillm.errors import MinillmError

# (hash of the block before or None, (engine, adapter, scope), the block's tokens) -> its hash
HashFunction = Callable[[Any, tuple[str, str, str | None], tuple[int, ...]], Hashable]


def chain_hash(before: Any, reader: tuple[str, str, str | None], tokens: tuple[int, ...]) -> int:
    """Python's own: 64 bits, fast, and collisions can be made on purpose. Safe here only because hits are verified."""
    return hash((before, reader, tokens))


class HashPrefixCache(PrefixBase):
    """Costs: `match` and `insert` one hash and one look-up a block, whatever else is in the cache."""

    def __init__(
        self,
        block_size: int,
        floors: Mapping[str, int] | None = None,
        policy: EvictionPolicy | None = None,
        on_evict: OnEvict | None = None,
        hash_function: HashFunction = chain_hash,
    ):
        self.hash_function = hash_function
        super().__init__(block_size, floors, policy, on_evict)

    def _reset(self) -> None:
        super()._reset()
        self._table: dict[Hashable, list[CachedBlock]] = {}  # hash -> the blocks that have it

    def _walk(self, tokens: Sequence[int], namespace: Namespace, at: CachedBlock | None) -> list[CachedBlock]:
        size, public = self.block_size, namespace.public_tokens // self.block_size
        path: list[CachedBlock] = []
        before, key = at, at.place if at else None
        for i in range(at.depth if at else 0, len(tokens) // size):
            content = tuple(tokens[i * size : (i + 1) * size])
            scope = PUBLIC if i < public else namespace.tenant
            key = self.hash_function(key, (*namespace.model, scope), content)
            for block in self._table.get(key, ()):
                if self._verified(block, before, namespace.model, scope, content):
                    break
            else:
                break
            path.append(block)
            before = block
        return path

    def _verified(
        self,
        block: CachedBlock,
        before: CachedBlock | None,
        model: tuple[str, str],
        scope: str | None,
        tokens: tuple[int, ...],
    ) -> bool:
        """Whether a block with the right hash is the right block."""
        return block.parent is before and block.tokens == tokens and block.scope == scope and block.model == model

    def _hash(self, block: CachedBlock) -> Hashable:
        before = block.parent.place if block.parent else None
        return self.hash_function(before, (*block.model, block.scope), block.tokens)

    def _add(self, block: CachedBlock) -> None:
        block.place = self._hash(block)
        self._table.setdefault(block.place, []).append(block)

    def _forget(self, block: CachedBlock) -> None:
        same = self._table[block.place]
        same.remove(block)
        if not same:
            del self._table[block.place]

    def _check_index(self) -> None:
        for key, same in self._table.items():
            if not same or any(block.place != key or self._hash(block) != key for block in same):
                raise MinillmError(f"the prefix cache is broken: a block is not under its hash {key!r:.80}")
        if sorted(b.id for same in self._table.values() for b in same) != sorted(self._blocks):
            raise MinillmError("the prefix cache is broken: its table does not hold each of its blocks once")
