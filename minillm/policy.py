"""In which order requests are served, who loses its blocks, and who is refused. Lessons 09 and 12.

A policy gives each request a key; the smaller is served first. The key never changes, so waiting requests sit in a
heap, and a step costs the same with ten of them or a hundred thousand. Ageing looks as if it broke this and does not:
priority - waited / ageing orders two requests the same way at any time, and so does arrival + priority * ageing.

No starvation. Keys grow with the arrival, so only finitely many requests ever come before a given one: with
`Priority`, none that arrives more than (its priority - theirs) * ageing seconds later.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from minillm.errors import MinillmError
from minillm.request import Request


@dataclass(frozen=True)
class Load:
    """A snapshot of the engine, for `admit`. The door takes it while a step may run: `Engine.load`."""

    waiting: int
    running: int
    free_blocks: int  # cached ones that may be evicted included
    total_blocks: int


class SchedulerPolicy(Protocol):
    def key(self, request: Request) -> float:
        """Smaller is served first. Depends on the request alone, and never changes."""

    def victim(self, running: Sequence[Request]) -> Request:
        """One of these loses its blocks; they are in the order of their keys, and none has begun this step."""

    def admit(self, request: Request, load: Load) -> str | None:
        """None, or why the request is refused at the door. Called in the caller's thread, not in the step loop's."""


class FirstCome:
    """First come, first served: the key is the arrival."""

    def key(self, request: Request) -> float:
        return request.arrival

    def victim(self, running: Sequence[Request]) -> Request:
        """Whoever would be served last: what it loses was the last to be given."""
        return running[-1]

    def admit(self, request: Request, load: Load) -> str | None:
        return None


class Priority(FirstCome):
    """Smaller priority first, but `ageing_s` seconds of waiting make up for one step of it."""

    def __init__(self, ageing_s: float = 10.0):
        if not ageing_s > 0:
            raise MinillmError(f"ageing must be a number of seconds above 0, got {ageing_s!r}")
        self.ageing_s = ageing_s

    def key(self, request: Request) -> float:
        return request.arrival + request.priority * self.ageing_s


class Deadline(FirstCome):
    """Earliest deadline first (Liu and Layland, 1973). A request without one is due `default_s` after arrival."""

    def __init__(self, default_s: float = 60.0):
        self.default_s = default_s

    def key(self, request: Request) -> float:
        return request.deadline if request.deadline is not None else request.arrival + self.default_s


def judged_key(policy: SchedulerPolicy, request: Request) -> float:
    """The policy's key, which may be a learner's: a NaN or a text in a heap tears everybody's order."""
    key: object = policy.key(request)
    try:
        if isinstance(key, numbers.Real) and not isinstance(key, bool) and math.isfinite(key):
            return key  # type: ignore[return-value]
    except OverflowError:  # a whole number that no float can hold
        pass
    raise MinillmError(f"parts: the policy's key must be a finite number, got {key!r:.80}")


def judged_victim(policy: SchedulerPolicy, candidates: Sequence[Request]) -> Request:
    victim = policy.victim(candidates)
    if not any(victim is r for r in candidates):
        names = ", ".join(r.request_id for r in candidates)
        raise MinillmError(
            f"parts: the policy's victim must be one of the requests given ({names:.80}), got {victim!r:.80}"
        )
    return victim


def make_policy(name: str, ageing_s: float = 10.0) -> SchedulerPolicy:
    """`EngineConfig.scheduling_policy` by name."""
    made = {"fcfs": FirstCome, "priority": lambda: Priority(ageing_s), "deadline": Deadline}
    return made[name]()
