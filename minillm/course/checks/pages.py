"""References and typical mistakes of exercise 06 for bookkeeping: an allocator of blocks, and slots through a table.

Sets and dicts in place of lists of counts, apart from solutions/ and the engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from minillm.course.candidate import CandidateError, NotAttempted, OverTimeError

# 06.2 an allocator


class BlockAllocator:
    """Who holds each block, as a dict; a block that is not in it is free."""

    first = 1  # id of the first block

    def __init__(self, num_blocks: int):
        self.ids = range(self.first, self.first + num_blocks)
        self.held: dict[int, int] = {}
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
        self.held.update(dict.fromkeys(got, 1))
        return got

    def share(self, ids: Sequence[int]) -> None:
        for i in ids:
            if i not in self.held:
                raise ValueError("not held")
            self.held[i] += 1

    def free(self, ids: Sequence[int]) -> None:
        if any(i not in self.held or ids.count(i) > self.held[i] for i in ids):
            raise ValueError("not held")
        for i in ids:
            self.drop(i)

    def drop(self, i: int) -> None:
        self.held[i] -= 1
        if self.held[i] == 0:
            del self.held[i]


class TakesWhatThereIs(BlockAllocator):
    def allocate(self, n: int) -> list[int]:
        return self.take(n)


class TakesThenRaises(BlockAllocator):
    def allocate(self, n: int) -> list[int]:
        short = n > self.num_free
        got = self.take(n)
        if short:
            raise ValueError("too many")
        return got


class NeverFrees(BlockAllocator):
    def free(self, ids: Sequence[int]) -> None:
        pass


class FirstBlockLeaks(BlockAllocator):
    def free(self, ids: Sequence[int]) -> None:
        super().free(ids[1:])


class NoReferences(BlockAllocator):
    def share(self, ids: Sequence[int]) -> None:
        pass


class SharedNeverFree(BlockAllocator):
    """The last reference is not noticed."""

    def __init__(self, num_blocks: int):
        super().__init__(num_blocks)
        self.shared: set[int] = set()

    def share(self, ids: Sequence[int]) -> None:
        self.shared.update(ids)
        super().share(ids)

    def drop(self, i: int) -> None:
        super().drop(i)
        if i in self.shared and i not in self.held:
            self.lost.add(i)


class FreesTwice(BlockAllocator):
    """A list of free ids with no look at what is in it."""

    def __init__(self, num_blocks: int):
        super().__init__(num_blocks)
        self.stack = list(self.ids)

    @property
    def num_free(self) -> int:
        return len(self.stack)

    def take(self, n: int) -> list[int]:
        got, self.stack = self.stack[:n], self.stack[n:]
        self.held.update({i: self.held.get(i, 0) + 1 for i in got})
        return got

    def free(self, ids: Sequence[int]) -> None:
        for i in ids:
            self.held[i] = self.held.get(i, 1) - 1
            if self.held[i] <= 0:
                self.stack.append(i)


class FreesHalf(BlockAllocator):
    """The error comes after some blocks of the call have been freed."""

    def free(self, ids: Sequence[int]) -> None:
        for i in ids:
            if i not in self.held:
                raise ValueError("not held")
            self.drop(i)


class CountsFromZero(BlockAllocator):
    first = 0


Script = Sequence[tuple[Any, ...]]


def play(kind: Any, num_blocks: int, script: Script) -> list[str]:
    """What comes of each operation, in words that do not depend on which free blocks are taken.

    ("allocate", name, n), ("share", name), ("free", name, ...): the blocks of `name`, or of several, in one call;
    ("free ids", id, ...): these ids.
    """
    allocator = kind(num_blocks)
    owned: dict[str, list[int]] = {}  # what each name was given; a name that was freed keeps it
    holders: dict[int, int] = {}
    said = []
    for what, *args in script:
        try:
            if what == "allocate":
                name, n = args
                got = list(allocator.allocate(n))
                said.append(_given(got, n, num_blocks, holders))
                owned[name] = got
                holders.update(dict.fromkeys(got, 1))
            elif what == "share":
                allocator.share(list(owned.get(args[0], [])))
                for i in owned.get(args[0], []):
                    holders[i] += 1
                said.append("shared")
            else:
                ids = list(args) if what == "free ids" else [i for name in args for i in owned.get(name, [])]
                allocator.free(ids)
                for i in ids:
                    holders[i] = holders.get(i, 0) - 1
                    if holders[i] <= 0:
                        del holders[i]
                said.append("freed")
        except (NotAttempted, OverTimeError):
            raise
        except (ValueError, CandidateError) as error:
            text = str(error)
            plain = isinstance(error, ValueError) or text.startswith("it raised ValueError")
            said.append("ValueError" if plain else text)
        said[-1] += f", {int(allocator.num_free)} free"
    return said


def _given(got: list[Any], n: int, num_blocks: int, holders: dict[int, int]) -> str:
    if len(got) != n:
        return f"{len(got)} blocks for {n}"
    if len(set(got)) != n:
        return "a block twice"
    if any(not isinstance(i, int) or not 1 <= i <= num_blocks for i in got):
        return f"a block outside 1 to {num_blocks}"
    return "a block that is held" if any(i in holders for i in got) else f"{n} free blocks"


def play_args(num_blocks: int, *script: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: (num_blocks, list(script))


def churn_args(seed: int, num_blocks: int = 20, steps: int = 120) -> Callable[[], Any]:
    """Requests of all sizes, some shared, all gone at the end."""
    rng, free = random.Random(seed), num_blocks
    script: list[tuple[Any, ...]] = []
    alive: dict[str, tuple[int, int]] = {}  # name: (holders, blocks)
    for step in range(steps):
        n = rng.randint(0, 6)
        while alive and n > free:
            name = rng.choice(list(alive))
            script.append(("free", name))
            holders, size = alive.pop(name)
            if holders > 1:
                alive[name] = (holders - 1, size)
            else:
                free += size
        script.append(("allocate", f"r{step}", n))
        alive[f"r{step}"], free = (1, n), free - n
        if n and rng.random() < 0.3:
            script.append(("share", f"r{step}"))
            alive[f"r{step}"] = (2, n)
    script += [("free", name) for name, (holders, _) in alive.items() for _ in range(holders)]
    script.append(("allocate", "all", num_blocks))
    return lambda: (num_blocks, list(script))


# 06.3 slots of a step


def slot_mapping(rows: Sequence[Any], block_size: int, size: int) -> list[int]:
    return slot_mapping_with(rows, block_size, size)


def slot_mapping_with(
    rows: Sequence[Any], block_size: int, size: int, *, shift: int = 0, reset: bool = False, logical: bool = False,
    offset: bool = True, table_of: Callable[[int], int] = lambda i: i, pad: int = -1, last: bool = False,
    beside: int = 0, ids_from: int = 0,
) -> list[int]:  # fmt: skip
    """beside: so many entries away in the table, -1 from the first is the last, and behind the end stands the last;
    ids_from: the id of the block that lies first in the pool; the other switches are the mistakes by name."""
    out: list[int] = []
    for i, (_, start, num_new) in enumerate(rows):
        table = rows[table_of(i)][0]
        for j in range(num_new):
            position = (0 if reset else start) + j
            entry, place = divmod(position, block_size)
            if shift:  # one past: the page changes a token too early or too late
                entry = (position + shift) // block_size
            found = -1 if last else min(entry + beside, len(table) - 1)
            block = entry if logical else table[found] - ids_from
            out.append(block * block_size + (place if offset else 0))
    return out + [pad] * (size - len(out))


def steps(function: Any, inputs: Sequence[Any]) -> list[list[int]]:
    """Several steps in one case: a constant must not earn points."""
    return [function([(list(t), s, n) for t, s, n in rows], block_size, size) for rows, block_size, size in inputs]
