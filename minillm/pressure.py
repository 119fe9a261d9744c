"""Why an engine is slow though nothing has failed: the causes that its event log tells apart. Lesson 12 builds it.

Memory is full, the device is busy, no error anywhere, and tokens come out at a fraction of the rate. The causes look
alike on a dashboard. They differ in what the steps were spent on, and each is measured as a share that was lost:

preemption storm   tokens computed again after their KV was taken away, of all tokens computed
fragmentation      memory that holds no token while requests wait for memory, of all memory: inside what is reserved or
                   held (internal), or free and promised to somebody (reserved)
copies             time in which a step moved blocks between pool and tiers, of all time
jitter             time of steps beyond what steps of the same size usually take, of all time

The largest share names the log, if it is large enough to matter. Communication leaves no trace in the log of one
device; lesson 17 adds it where there are several.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from minillm.errors import MinillmError
from minillm.events import Event
from minillm.scheduler import Limits

HEALTHY, STORM, FRAGMENTATION, COPIES, JITTER = "healthy", "preemption storm", "fragmentation", "copies", "jitter"
LEAST = 0.15  # a share below this is the ordinary price of running full
ALIKE = 5  # steps of one size that are needed before one of them can be called slow


class Memory(NamedTuple):
    """Blocks of a pool after one step, and the tokens that stand in them."""

    step: int
    live: int
    cached: int
    free: int
    tokens: int
    waiting: int

    @property
    def total(self) -> int:
        return self.live + self.cached + self.free


@dataclass(frozen=True)
class Signature:
    """What a log looks like. lost: for each cause a share from 0 to 1; evidence: what it was made of, by name."""

    kind: str
    lost: dict[str, float]
    evidence: dict[str, float]


def memory(events: Iterable[Event]) -> Iterator[Memory]:
    """The pool after each step. A request's tokens are those computed and not taken away since."""
    held: dict[str, int] = {}
    over: set[str] = set()
    for e in events:
        if e.kind == "queued":  # an id may be used again, for another request
            over.discard(e.request_id)
        elif e.kind in ("finished", "aborted"):
            over.add(e.request_id)
            held.pop(e.request_id, None)
        elif e.kind == "preempted":
            held.pop(e.request_id, None)
        elif e.kind == "step":
            held.update({name: before + new for name, new, before in e.data["rows"] if name not in over})
            live, cached, free = (e.data.get(kind, 0) for kind in ("live", "cached", "free"))
            yield Memory(e.step, live, cached, free, sum(held.values()), e.data["waiting"])


def recomputed(events: Iterable[Event]) -> tuple[int, int]:
    """(tokens computed again, tokens computed): a token counts as again from its second time on."""
    known: Counter[str] = Counter()  # request -> tokens that were computed at least once
    again = total = 0
    for e in events:
        if e.kind == "queued":
            known.pop(e.request_id, None)
        elif e.kind == "step":
            for name, new, before in e.data["rows"]:
                total += new
                again += max(0, min(known[name], before + new) - before)
                known[name] = max(known[name], before + new)
    return again, total


def signature(
    events: Iterable[Event], block_size: int, limits: Limits | None = None, timed: bool = True
) -> Signature:  # fmt: skip
    """Name what a log of one engine shows. limits: a step that is at one of them does not wait for memory.

    timed: whether its seconds mean something; a shadow's do not, and then copies and jitter are not looked for.
    Raises MinillmError for a log without steps.
    """
    events = list(events)
    steps = [e for e in events if e.kind == "step"]
    if not steps:
        raise MinillmError("this log has no steps; an EventLog with maxlen=0 keeps none")
    again, total = recomputed(events)
    wasted, memory_evidence = _fragmentation(events, steps, block_size, limits or Limits(1 << 30, 1 << 30))
    copying, moved = _copies(events, steps)
    lost = {
        STORM: again / total if total else 0.0, FRAGMENTATION: wasted,
    } | ({COPIES: copying, JITTER: _jitter(steps, moved)} if timed else {})  # fmt: skip
    ended = sum(e.kind == "finished" for e in events)
    evidence = {
        "tokens computed again": again, "tokens computed": total,
        "preemptions per finished request": sum(e.kind == "preempted" for e in events) / max(1, ended),
        "steps that moved blocks": len(moved), "steps": len(steps), **memory_evidence,
    }  # fmt: skip
    worst = max(lost, key=lambda name: lost[name])
    return Signature(worst if lost[worst] >= LEAST else HEALTHY, lost, evidence)


def _fragmentation(
    events: list[Event], steps: list[Event], block_size: int, limits: Limits
) -> tuple[float, dict[str, float]]:
    """Share of memory without a token, over the steps in which somebody waited for memory, times their share."""
    short = [
        m
        for m, e in zip(memory(events), steps, strict=True)
        if m.waiting and m.total and e.data["running"] < limits.max_num_seqs
        and sum(new for _, new, _ in e.data["rows"]) < limits.max_num_batched_tokens
    ]  # fmt: skip
    if not short:
        return 0.0, {"steps that waited for memory": 0.0, "memory with tokens": 0.0, "memory free": 0.0}
    slots = block_size * sum(m.total for m in short)
    useful = min(1.0, sum(m.tokens for m in short) / slots)  # shared blocks are counted for each of their readers
    idle = block_size * sum(m.free + m.cached for m in short) / slots
    waited = len(short) / len(steps)
    found = {"steps that waited for memory": waited, "memory with tokens": useful, "memory free": idle}
    return waited * (1 - useful), found


def _copies(events: list[Event], steps: list[Event]) -> tuple[float, set[int]]:
    """Time that scheduling took in steps that moved blocks, beyond what it usually takes; and those steps."""
    moved = {
        e.step
        for e in events
        if (e.kind == "preempted" and e.data.get("copied", e.data.get("how") == "swap"))
        or (e.kind == "hit" and e.data.get("source") in ("host", "disk"))
    }
    usual = median([e.data["schedule_seconds"] for e in steps if e.step not in moved] or [0.0])
    extra = sum(max(0.0, e.data["schedule_seconds"] - usual) for e in steps if e.step in moved)
    return extra / max(1e-12, sum(e.data["seconds"] for e in steps)), moved


def _jitter(steps: list[Event], moved: set[int]) -> float:
    """Time beyond the median of steps with as many requests and about as many tokens and as much context."""
    alike: dict[Any, list[float]] = defaultdict(list)
    for e in steps:
        tokens, context = (sum(row[i] for row in e.data["rows"]) for i in (1, 2))
        own = e.data["seconds"] - (e.data["schedule_seconds"] if e.step in moved else 0.0)
        alike[len(e.data["rows"]), tokens.bit_length(), context.bit_length()].append(own)
    beyond = sum(
        max(0.0, s - median(group)) for group in alike.values() if len(group) >= ALIKE for s in group
    )  # fmt: skip
    return beyond / max(1e-12, sum(e.data["seconds"] for e in steps))
