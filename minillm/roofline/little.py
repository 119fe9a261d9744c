"""Little's law, L = lambda W: requests in a system, how fast they come, how long each stays. Lesson 13."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minillm.errors import MinillmError

if TYPE_CHECKING:
    from minillm.trace.latency import Stamps


@dataclass(frozen=True)
class Little:
    """in_system: requests, mean over time, counted. rate: requests a second. time: seconds, mean over requests."""

    in_system: float
    rate: float
    time: float

    @property
    def error(self) -> float:
        """How far L is from lambda W, relative to L."""
        return abs(self.in_system - self.rate * self.time) / self.in_system if self.in_system else 0.0


def little(stamps: Sequence[Stamps], window: tuple[float, float] | None = None) -> Little:
    """L = lambda W (Little, 1961), each of the three measured by itself: L by counting who is there, moment by moment.

    A request is there from `sent` to its last token (or its end). Over a whole run the law is exact. In a window (times
    of the stamps) it holds as far as traffic is steady: where a queue grows, those who arrive now will stay longer than
    those who are counted now.
    """
    stays = [(s.sent, s.end if s.last is None else s.last) for s in stamps]
    if not stays:
        raise MinillmError("Little's law needs at least one request")
    start, end = window or (min(a for a, _ in stays), max(b for _, b in stays))
    if not start < end:
        raise MinillmError(f"a window needs an end after its start, got {window}")
    marks = sorted([(max(a, start), 1) for a, b in stays if b > start and a < end]
                   + [(min(b, end), -1) for a, b in stays if b > start and a < end])  # fmt: skip
    area, there, before = 0.0, 0, start
    for at, change in marks:
        area += there * (at - before)
        there, before = there + change, at
    arrived = [(a, b) for a, b in stays if start <= a < end]
    time = statistics.fmean(b - a for a, b in arrived) if arrived else 0.0
    return Little(area / (end - start), len(arrived) / (end - start), time)
