"""A pipeline: layers in stages, a step in micro-batches, and the bubble that filling and draining cost. Lesson 14.

`timetable` says when each stage computes each micro-batch: as soon as it is free and has the input. With S stages and M
micro-batches of one length the last stage waits S - 1 of them for its first, so (S - 1) / (M + S - 1) of all the time
is idle: `bubble`. (Huang et al., GPipe, 2019; here forward only, as in serving.)

`paced` runs the timetable through real ranks that send real tensors, with work of given lengths: on a `VirtualClock`,
where each message carries the time at which it was sent and the answer is exact, or on a `SleepingClock`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from minillm.errors import MinillmError

if TYPE_CHECKING:  # the planner, which needs no torch, cuts steps and times them too
    from minillm.parallel.group import Group

T = TypeVar("T")


def micro_batches(rows: Sequence[T], most: int, tokens: Callable[[T], int]) -> list[list[T]]:
    """A step's rows (sequences) in at most `most` runs of about equal tokens, in order; never an empty one.

    tokens: of a row, so many are new in the step. Tokens and not rows are balanced, as a row may be a prompt. A row is
    not cut: its parts would leave the pipeline one after the other, which chunked prefill does anyway. So a single
    stream is one micro-batch, and for it a pipeline is all bubble.
    """
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise MinillmError(f"a step has at least 1 micro-batch, got {most!r:.80}")
    most = min(most, len(rows))
    whole, taken = sum(map(tokens, rows)), 0
    parts: list[list[T]] = []
    for i, row in enumerate(rows):
        # The next run begins where this one has its share, and where a row is left for each run to come and no more.
        full = taken * most >= whole * len(parts)
        if not parts or (len(parts) < most and (full or len(rows) - i == most - len(parts))):
            parts.append([])
        parts[-1].append(row)
        taken += tokens(row)
    return parts


def bubble(stages: int, micro_batches: int) -> float:
    """The idle share of a pipeline that is filled and drained: (S - 1) / (M + S - 1), for equal stages."""
    if stages < 1 or micro_batches < 1:
        raise MinillmError(f"a pipeline has at least 1 stage and 1 micro-batch, got {stages} and {micro_batches}")
    return (stages - 1) / (micro_batches + stages - 1)


class Slot(NamedTuple):
    """A stage computes a micro-batch of a step from `start` to `end`, in seconds."""

    stage: int
    micro_batch: int
    start: float
    end: float
    step: int = 0


def timetable(
    seconds: Sequence[Sequence[float]], *, link_s: float | Sequence[float] = 0.0, steps: int = 1, flush: bool = True
) -> list[Slot]:
    """When everything happens, by step, micro-batch and stage.

    seconds[s][m]: what stage s takes for micro-batch m. link_s: seconds from the end on one stage until the next has
    the input, of all micro-batches or of each. Each step needs the tokens of the step before: flush waits for all of
    them, as an engine that schedules once a step does; without, a micro-batch waits for its own tokens only, and the
    pipeline stays full over the steps.
    """
    _table(seconds)
    wires = [link_s] * len(seconds[0]) if isinstance(link_s, int | float) else list(link_s)
    if len(wires) != len(seconds[0]) or not all(math.isfinite(x) and x >= 0 for x in wires) or steps < 1:
        raise MinillmError(
            f"a timetable needs a link of at least 0 s, or such a time for each micro-batch, and at least 1 step, got "
            f"{link_s!r:.80} and {steps}"
        )
    free = [0.0] * len(seconds)  # when each stage has ended its last
    slots: list[Slot] = []
    known = [0.0] * len(seconds[0])  # when the tokens that each micro-batch needs are there
    for step in range(steps):
        for m in range(len(seconds[0])):
            there = known[m]
            for s, row in enumerate(seconds):
                start = max(free[s], there)
                free[s] = start + row[m]
                there = free[s] + wires[m]
                slots.append(Slot(s, m, start, free[s], step))
            known[m] = free[-1]
        if flush:
            known = [free[-1]] * len(known)
    return slots


def _table(seconds: Sequence[Sequence[float]]) -> None:
    times = [x for row in seconds for x in row]
    if len({len(row) for row in seconds}) != 1 or not times or not all(math.isfinite(x) and x > 0 for x in times):
        raise MinillmError("seconds must be a table: a row for each stage, in it a time above 0 for each micro-batch")


def makespan(slots: Sequence[Slot]) -> float:
    """Seconds from the first start to the last end."""
    return max(slot.end for slot in slots) - min(slot.start for slot in slots)


def idle_share(slots: Sequence[Slot]) -> float:
    """The bubble of a timetable, or of a run: 1 - busy / (stages * makespan)."""
    stages = len({slot.stage for slot in slots})
    return 1 - sum(slot.end - slot.start for slot in slots) / (stages * makespan(slots))


class Clock(Protocol):
    """What a rank's time is, in seconds since the start."""

    def now(self) -> float: ...

    def work(self, seconds: float) -> None:
        """Be busy for so long."""

    def received(self, stamp: float) -> None:
        """A message has come that its sender stamped with this time of its own."""


class VirtualClock:
    """Time that only work and messages move. Nothing can begin before its input was sent: Lamport's rule (1978)."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def work(self, seconds: float) -> None:
        self._now += seconds

    def received(self, stamp: float) -> None:
        self._now = max(self._now, stamp)


class SleepingClock:
    """Real time, with sleep as work: the processor stays free, so there may be more stages than cores."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._begun

    def work(self, seconds: float) -> None:
        time.sleep(seconds)

    def received(self, stamp: float) -> None:
        pass  # it is as late as it is


CLOCKS: dict[str, type[Clock]] = {"virtual": VirtualClock, "sleeping": SleepingClock}


@dataclass(frozen=True)
class Paced:
    """A run as it was: its slots by stage and micro-batch, and what came out at the end of the last stage."""

    slots: list[Slot]
    outputs: list[float]

    @property
    def idle(self) -> float:
        return idle_share(self.slots)


def through(x: float, stages: int) -> float:
    """What `paced` must give for the input x: stage s makes 2 x + s of it, so a stage left out or swapped is seen."""
    for s in range(stages):
        x = 2 * x + s
    return x


def paced(group: Group, seconds: Sequence[Sequence[float]], clock: str = "virtual") -> dict[str, Any]:
    """One step, on this rank as one stage of group.size: what it did, as plain data. See `gathered`.

    seconds[s][m]: what stage s takes for micro-batch m. The input of micro-batch m is m + 1. A message is two float64:
    when its sender had ended, and the value. All ranks call this together.
    """
    import torch

    _table(seconds)
    if len(seconds) != group.size:
        raise MinillmError(f"{len(seconds)} stages need as many ranks, and this world has {group.size}")
    if clock not in CLOCKS:
        raise MinillmError(f"clock {clock!r} is not known; use {' or '.join(CLOCKS)}")
    first, last = group.rank == 0, group.rank == group.size - 1
    group.all_reduce(torch.zeros(1))  # all are here: the clocks start together
    time_here: Clock = CLOCKS[clock]()
    spans, outputs = [], []
    for m, length in enumerate(seconds[group.rank]):
        message = torch.tensor([0.0, m + 1.0], dtype=torch.float64)
        if not first:
            group.recv(message, group.rank - 1)
        time_here.received(message[0].item())
        start = time_here.now()
        time_here.work(length)
        value = 2 * message[1].item() + group.rank
        spans.append((start, time_here.now()))
        if last:
            outputs.append(value)
        else:
            group.send(torch.tensor([time_here.now(), value], dtype=torch.float64), group.rank + 1)
    group.all_reduce(torch.zeros(1))  # what was sent has arrived before anybody leaves
    return {"stage": group.rank, "spans": spans, "outputs": outputs}


def gathered(ranks: Sequence[dict[str, Any]]) -> Paced:
    """The run, from what each rank returned. Raises MinillmError where the last stage gave wrong numbers."""
    slots = [Slot(r["stage"], m, a, b) for r in ranks for m, (a, b) in enumerate(r["spans"])]
    outputs = ranks[-1]["outputs"]
    expected = [through(m + 1.0, len(ranks)) for m in range(len(ranks[-1]["spans"]))]
    if outputs != expected:
        raise MinillmError(f"the pipeline gave {outputs}, expected {expected}: a stage was left out or out of order")
    return Paced(slots, outputs)


def even(stages: int, count: int, seconds: float) -> list[list[float]]:
    """A table for `timetable` and `paced`: every stage takes `seconds` for each of `count` micro-batches."""
    return [[seconds] * count for _ in range(stages)]


def paced_many(group: Group, tables: Sequence[Sequence[Sequence[float]]], clock: str) -> list[dict[str, Any]]:
    """`paced` for one table after the other, in one world: what `run_processes` calls."""
    return [paced(group, table, clock) for table in tables]
