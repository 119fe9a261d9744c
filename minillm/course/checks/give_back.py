"""References and mistakes of exercise 12 for blocks: an allocator that can be audited, and what a swap costs.

Counts in a dict, apart from solutions/ and the engine.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from minillm.cache.prefix import RadixPrefixCache
from minillm.cache.prefix_hash import HashPrefixCache
from minillm.course.candidate import CandidateError, NotAttempted, OverTimeError
from minillm.course.checks.shadows import Game, first_fault
from minillm.course.tasks import Wrong

# 12.2 an allocator


class BlockAllocator:
    """How often each block is held; one that is not in the dict is free."""

    def __init__(self, num_blocks: int):
        self.ids = range(1, num_blocks + 1)
        self.held: Counter[int] = Counter()
        self.lost: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self.ids) - len(self.held) - len(self.lost)

    def allocate(self, n: int) -> list[int]:
        if n > self.num_free:
            raise ValueError("too many")
        return self.take(n)

    def take(self, n: int) -> list[int]:
        got = [i for i in self.ids if i not in self.held and i not in self.lost][:n]
        self.held.update(got)
        return got

    def share(self, ids: Sequence[int]) -> None:
        for i in ids:
            if i not in self.held:
                raise ValueError(f"block {i} is free")
        self.held.update(ids)

    def free(self, ids: Sequence[int]) -> None:
        for i, n in Counter(ids).items():
            if n > self.held[i]:
                raise ValueError(f"block {i} is held {self.held[i]} times and freed {n} times")
        self.drop(ids)

    def drop(self, ids: Sequence[int]) -> None:
        self.held = +(self.held - Counter(ids))

    def check(self, tables: Sequence[Sequence[int]] | None = None) -> None:
        if tables is not None:
            seen = Counter(i for table in tables for i in table)
            for i in self.ids:
                if seen[i] != self.held[i]:
                    raise ValueError(f"block {i} is held {self.held[i]} times and stands in {seen[i]} tables")


class TakesThenRaises(BlockAllocator):
    def allocate(self, n: int) -> list[int]:
        short = n > self.num_free
        got = self.take(n)
        if short:
            raise ValueError("too many")
        return got


class TakesWhatThereIs(BlockAllocator):
    def allocate(self, n: int) -> list[int]:
        return self.take(n)


class FreesUnseen(BlockAllocator):
    def free(self, ids: Sequence[int]) -> None:
        self.drop(ids)


class FreesHalf(BlockAllocator):
    def free(self, ids: Sequence[int]) -> None:
        for i in ids:
            if not self.held[i]:
                raise ValueError(f"block {i} is freed more often than it is held")
            self.drop([i])


class Nameless(BlockAllocator):
    def free(self, ids: Sequence[int]) -> None:
        try:
            super().free(ids)
        except ValueError:
            raise ValueError("a block is freed more often than it is held") from None


class NoReferences(BlockAllocator):
    def share(self, ids: Sequence[int]) -> None:
        pass


class SharesFree(BlockAllocator):
    def share(self, ids: Sequence[int]) -> None:
        self.held.update(i for i in ids if i in self.held)


class OnlyLeaks(BlockAllocator):
    """The audit finds what is held too often, and not what is held too rarely."""

    def check(self, tables: Sequence[Sequence[int]] | None = None) -> None:
        if tables is not None:
            seen = Counter(i for table in tables for i in table)
            for i in self.held:
                if seen[i] < self.held[i]:
                    raise ValueError(f"block {i} leaks")


class SeesSets(BlockAllocator):
    """The audit asks whether a block is in a table, and not in how many."""

    def check(self, tables: Sequence[Sequence[int]] | None = None) -> None:
        if tables is not None:
            seen = {i for table in tables for i in table}
            for i in self.ids:
                if (i in seen) != (i in self.held):
                    raise ValueError(f"block {i}")


class ChecksNothing(BlockAllocator):
    def check(self, tables: Sequence[Sequence[int]] | None = None) -> None:
        pass


class _Player:
    """Plays a script and says what came of each step, in words that do not depend on which free blocks are taken."""

    def __init__(self, allocator: Any, num_blocks: int):
        self.allocator, self.num_blocks = allocator, num_blocks
        self.owned: dict[str, list[int]] = {}  # a name that was freed keeps its blocks
        self.tables: dict[str, list[list[int]]] = {}  # name -> one table a holder
        self.holders: Counter[int] = Counter()

    def play(self, what: str, args: Sequence[Any]) -> str:
        guilty: set[int] = set()
        try:
            if what == "allocate":
                name, n = args
                got = list(self.allocator.allocate(n))
                said = self._given(got, n)
                self.owned[name], self.tables[name] = got, [got]
                self.holders.update(got)
            elif what == "share":
                guilty = {i for i in self.owned[args[0]] if not self.holders[i]}
                self.allocator.share(list(self.owned[args[0]]))
                self.tables[args[0]].append(self.owned[args[0]])
                self.holders.update(self.owned[args[0]])
                said = "shared"
            elif what == "free":
                ids = [i for name in args for i in self.owned.get(name, [])]
                guilty = {i for i, n in Counter(ids).items() if n > self.holders[i]}
                self.allocator.free(ids)
                for name in args:
                    self.tables[name] = self.tables[name][1:]
                self.holders = +(self.holders - Counter(ids))
                said = "freed"
            else:
                tables, guilty = self._audit(what, args)
                if tables is None:
                    self.allocator.check()
                else:
                    self.allocator.check(tables)
                said = "in order"
        except (NotAttempted, OverTimeError):
            raise
        except (ValueError, CandidateError) as error:
            said = self._error(error, guilty)
        return f"{what}: {said}, {int(self.allocator.num_free)} free"

    def _audit(self, what: str, args: Sequence[Any]) -> tuple[list[list[int]] | None, set[int]]:
        tables = [list(t) for holders in self.tables.values() for t in holders]
        if what == "check":
            return None, set()
        if what == "audit":
            return tables, set()
        if what == "audit, a table forgotten":  # its blocks are held, and nobody has them: a leak
            tables.remove(self.owned[args[0]])
            return tables, set(self.owned[args[0]])
        if what == "audit, a table too many":  # somebody reads blocks that were given back
            return [*tables, list(self.owned[args[0]])], set(self.owned[args[0]])
        raise ValueError(what)

    def _error(self, error: Exception, guilty: set[int]) -> str:
        text = str(error)
        if not (isinstance(error, ValueError) or text.startswith("it raised ValueError")):
            return text
        message = re.sub(r" at <?cell.*|\(.*line.*", "", text)
        named = {int(n) for n in re.findall(r"\d+", message)} & guilty
        return "ValueError" + (" that names the block" if named else " that names no such block" if guilty else "")

    def _given(self, got: list[Any], n: int) -> str:
        if len(got) != n:
            return f"{len(got)} blocks for {n}"
        if len(set(got)) != n:
            return "a block twice"
        if any(isinstance(i, bool) or not isinstance(i, int) or not 1 <= i <= self.num_blocks for i in got):
            return f"a block outside 1 to {self.num_blocks}"
        return "a block that is held" if any(self.holders[i] for i in got) else f"{n} free blocks"


def play(kind: Any, num_blocks: int, script: Sequence[tuple[Any, ...]]) -> list[str]:
    player = _Player(kind(num_blocks), num_blocks)
    return [player.play(what, args) for what, *args in script]


def play_args(num_blocks: int, *script: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: (num_blocks, list(script))


def mounted(kind: Any, seeds: int) -> str:
    """The engine's own cache and scheduler over this allocator, with a prefix cache that shares blocks."""
    for make in (RadixPrefixCache, HashPrefixCache):
        if fault := first_fault(range(seeds), Game(steps=40), allocator=kind, prefix=make):
            raise Wrong(fault)
    return "every block is given back, and no request reads another's"


# 12.5 swap or recompute


def swap_or_recompute(
    full: int, stored: int, tail: int, block_size: int, block_bytes: int, token_s: float, write_rate: float,
    read_rate: float, latency: float,
) -> tuple[str, float, float]:  # fmt: skip
    return choice_with(full, stored, tail, block_size, block_bytes, token_s, write_rate, read_rate, latency)


def choice_with(
    full: int, stored: int, tail: int, block_size: int, block_bytes: int, token_s: float, write_rate: float,
    read_rate: float, latency: float, *, ways: int = 2, use_stored: bool = True, tail_on_swap: bool = True,
    tail_on_recompute: bool = True, tie: str = "recompute", once: bool = False, turned: bool = False,
    stored_read: bool = True,
) -> tuple[str, float, float]:  # fmt: skip
    """The switches are the mistakes by name."""
    if turned:
        write_rate, read_rate = read_rate, write_rate
    out = full - (stored if use_stored else 0)
    back = full if stored_read else full - stored
    wait = (2 * latency if out else latency) if once else latency * (out + (back if ways == 2 else 0))
    swap = out * block_bytes / write_rate + (back * block_bytes / read_rate if ways == 2 else 0) + wait
    swap += tail * token_s if tail_on_swap else 0.0
    again = (full * block_size + (tail if tail_on_recompute else 0)) * token_s
    how = tie if swap == again else "swap" if swap < again else "recompute"
    return how, again, swap


def choices(function: Any, inputs: Sequence[Sequence[Any]]) -> list[tuple[str, float, float]]:
    """Several in one case: a constant must not earn points."""
    return [tuple(function(*given)) for given in inputs]


def choice_args(seed: int, count: int = 6, *, stored: bool = False, tail: bool = False, slow: bool = False) -> Any:
    """Random machines and requests, about as many of which swap as compute."""
    rng = random.Random(seed)

    def make() -> tuple[float, ...]:
        full = rng.randint(3, 60)
        token_s, each = rng.choice([1e-4, 2.5e-5]), rng.choice([65536, 2097152])
        even = 2 * each / (16 * token_s)
        write, read = (even * rng.choice([0.4, 0.7, 1.5, 3.0]) for _ in range(2))
        kept = rng.randint(1, full) if stored else 0
        return full, kept, rng.randint(5, 15) if tail else 0, 16, each, token_s, write, read, 3e-4 if slow else 0.0

    inputs = [make() for _ in range(count)]
    return lambda: (inputs,)
