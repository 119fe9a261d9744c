"""Seconds of an engine's steps under one workload, by the roofline. Lesson 15.

A step computes a chunk of one prompt beside so many decodes. A prompt of m tokens that finds room for c tokens a step
takes ceil(m / c) steps. Alone, its last step is a short one; where others wait, the rest of that step is theirs.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from minillm.cluster.migration import Engine, Migration, Wire
from minillm.errors import MinillmError


@dataclass(frozen=True)
class Workload:
    """Requests of one shape. rate: requests a second that come; None asks how many could."""

    prompt_tokens: int
    output_tokens: int
    rate: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", 1), ("output_tokens", 2)):
            v = getattr(self, name)
            if isinstance(v, bool) or not isinstance(v, int) or v < least:
                raise MinillmError(f"workload: {name} is a whole number of at least {least}, got {v!r:.80}")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise MinillmError(f"workload: rate is a number of requests a second above 0, got {self.rate!r:.80}")


class Steps:
    """Seconds of an engine's steps for one workload, by the roofline; between computed batch sizes a straight line.

    Raises MinillmError for requests that are too long for the model, or for the engine's KV cache.
    """

    def __init__(self, engine: Engine, workload: Workload):
        self.engine, self.workload = engine, workload
        tokens = workload.prompt_tokens + workload.output_tokens
        for most, what in (
            (engine.config.max_position_embeddings, "the model's limit of {} tokens"),
            (engine.capacity, "an engine's KV cache of {} tokens"),
        ):
            if tokens > most:
                raise MinillmError(
                    f"a request of {workload.prompt_tokens} + {workload.output_tokens} tokens is longer than "
                    f"{what.format(most)}; plan for shorter ones"
                )
        self.context = workload.prompt_tokens + workload.output_tokens // 2  # of a decode, on average
        self.moves: dict[tuple[Wire, int], Migration] = {}  # handoffs by wire and budget (goodput.py): asked once
        self._known: dict[tuple[int, int, int, int], float] = {}
        self._asked: dict[tuple[str, int, int], float] = {}

    def seconds(self, chunk: int, before: int, decodes: int, prompts: int = 1) -> float:
        """A step of `prompts` chunks after `before` tokens each, and so many decodes."""
        key = (chunk, before, decodes, prompts)
        if key not in self._known:
            rows = [(chunk, before)] * (prompts if chunk else 0) + [(1, self.context)] * decodes
            self._known[key] = self.engine.seconds(rows)
        return self._known[key]

    @cached_property
    def seats(self) -> int:
        """Requests that an engine can decode at a time: by max_num_seqs, and by room for their KV."""
        return min(self.engine.max_num_seqs, self.by_room)

    @cached_property
    def by_room(self) -> int:
        bs = self.engine.block_size
        return self.engine.capacity // (-(-self.context // bs) * bs)

    @cached_property
    def _grid(self) -> list[int]:
        most = max(1, self.seats)
        return sorted({min(most, round(2 ** (i / 2))) for i in range(2 * most.bit_length() + 2)})

    @cached_property
    def _points(self) -> list[int]:
        return [0, *self._grid]

    @cached_property
    def _decode(self) -> list[float]:
        return [self.seconds(0, 0, r) for r in self._grid]

    def decode(self, r: float) -> float:
        return float(np.interp(r, self._grid, self._decode))

    def slope(self, r: float) -> float:
        """Seconds that one more decode adds to a step."""
        lo, hi = max(1.0, r - 1), min(float(self._grid[-1]), max(2.0, r + 1))
        return (self.decode(hi) - self.decode(lo)) / (hi - lo) if hi > lo else 0.0

    def prompt(self, budget: int, r: float) -> tuple[float, int]:
        """(seconds, steps) of a whole prompt beside r decodes, alone in the queue."""
        return self._between("prompt", budget, r, lambda n: self._prompt(budget, n)), self._chunks(budget, round(r))

    def _chunks(self, budget: int, r: int) -> int:
        return -(-self.workload.prompt_tokens // max(1, budget - r))

    def _prompt(self, budget: int, r: int) -> float:
        room, m = max(1, budget - r), self.workload.prompt_tokens
        if m > 64 * room:  # many chunks: the cost is smooth in the context, so a few of them give the mean
            at = [round((i + 0.5) * (m - room) / 16) for i in range(16)]
            return m / room * sum(self.seconds(room, a, r) for a in at) / 16
        return sum(self.seconds(min(room, m - a), a, r) for a in range(0, m, room))

    def full(self, budget: int, r: float) -> float:
        """The longest step there is: a full chunk at the end of a prompt, beside r decodes."""
        m = self.workload.prompt_tokens
        return self._between(
            "full", budget, r, lambda n: self.seconds(max(1, budget - n), max(0, m - max(1, budget - n)), n)
        )

    def prompts_within(self, budget: int, r: float, bound: float) -> int:
        """How many whole prompts a step may compute beside r decodes and still take at most `bound` seconds."""
        n, m = round(r), self.workload.prompt_tokens
        counts = range(1, max(1, budget - n) // m + 1)
        return bisect_right(counts, bound, key=lambda k: self.seconds(m, 0, n, k))  # each more takes longer

    def decodes_within(self, bound: float, seconds: Callable[[int], float], most: int | None = None) -> int:
        """Beside how many decodes (`most`, or the seats) a step takes at most `bound` seconds; -1: it never does."""
        top = self.seats if most is None else min(self.seats, most)
        return bisect_right(range(top + 1), bound, key=seconds) - 1  # each more takes longer

    def last(self, budget: int, r: float) -> float:
        """The step of a prompt's last chunk, alone beside r decodes."""
        m = self.workload.prompt_tokens

        def of(n: int) -> float:
            room = max(1, budget - n)
            return self.seconds(m - (m - 1) // room * room, (m - 1) // room * room, n)

        return self._between("last", budget, r, of)

    def until(self, budget: int, tokens: int) -> float:
        """Seconds until so many tokens of a prompt are computed, alone: what comes after them nobody waits for."""
        whole, m = self.prompt(budget, 0)[0], self.workload.prompt_tokens
        return whole - self.last(budget, 0) if tokens <= (m - 1) // budget * budget else whole

    def shared(self, budget: int, r: float) -> float:
        """Seconds of a prompt where others wait: every step is full, and the rest of a budget is the next one's."""
        return min(self.prompt(budget, r)[0], self._between("shared", budget, r, lambda n: self._shared(budget, n)))

    def _shared(self, budget: int, n: int) -> float:
        m, room = self.workload.prompt_tokens, max(1, budget - n)
        if m >= room:
            full = m // room * room
            whole = sum(self.seconds(room, a, n) for a in range(0, full, room)) if m <= 64 * room else None
            if whole is None:
                return self._prompt(budget, n)
            return whole + (m - full) / room * self.seconds(room, full, n)
        return self.seconds(m, 0, n, room // m) / (room // m)

    def _between(self, of: str, budget: int, r: float, f: Callable[[int], float]) -> float:
        """f(r), a straight line between computed batch sizes. of, budget: what f depends on; it is asked once."""
        grid = self._points
        i = min(bisect_left(grid, r), len(grid) - 1)
        values = []
        for n in (grid[i - 1], grid[i]) if i and grid[i] > r else (grid[i],):
            key = (of, budget, n)
            if key not in self._asked:
                self._asked[key] = f(n)
            values.append(self._asked[key])
        if len(values) == 1:
            return values[0]
        lo, hi = grid[i - 1], grid[i]
        return values[0] + (values[1] - values[0]) * (r - lo) / (hi - lo)

    def first(self, left: int, r: float) -> float:
        """A step in which a request that was handed over computes the tokens that its blocks left, beside r decodes."""
        return self._between("first", left, r, lambda n: self.seconds(left, self.workload.prompt_tokens - left, n))
