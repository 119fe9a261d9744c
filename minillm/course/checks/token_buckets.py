"""References and mistakes of exercise 13 for a token bucket.

Rates are powers of two and amounts are whole, so that waits are exact in whatever order they are computed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from minillm.course.tasks import Wrong


class TokenBucket:
    """The flags make the wrong ones."""

    empty = uncapped = owes = whole = forgets = endless = rounds = False

    def __init__(self, rate: float, burst: float):
        self.rate, self.burst = rate, burst
        self.level, self.at = (0.0 if self.empty else burst), 0.0

    def take(self, amount: float, now: float) -> float:
        if amount > self.burst and not self.endless:
            return math.inf
        self._fill(now)
        if amount <= self.level:
            self.level -= amount
            return 0.0
        wait = (amount if self.whole else amount - self.level) / self.rate
        if self.owes:
            self.level -= amount
        return math.ceil(wait) if self.rounds else wait

    def give(self, amount: float, now: float) -> None:
        if not self.forgets:
            self._fill(now)
            self.level = min(self.burst, self.level + amount)

    def _fill(self, now: float) -> None:
        filled = self.level + (now - self.at) * self.rate
        self.level, self.at = (filled if self.uncapped else min(self.burst, filled)), now


class Window(TokenBucket):
    """A counter that starts anew with each window of burst / rate seconds: no bucket."""

    def take(self, amount: float, now: float) -> float:
        if amount > self.burst:
            return math.inf
        width = self.burst / self.rate
        if now // width > self.at // width:
            self.level, self.at = self.burst, now
        if amount <= self.level:
            self.level -= amount
            return 0.0
        return (now // width + 1) * width - now

    def give(self, amount: float, now: float) -> None:
        self.level = min(self.burst, self.level + amount)


class OnlyWhenTaken(TokenBucket):
    """What has flowed in since is forgotten when a request is refused."""

    def take(self, amount: float, now: float) -> float:
        level, wait = self.level, super().take(amount, now)
        if 0 < wait < math.inf:
            self.level = level
        return wait


def bucket(**flags: Any) -> Any:
    return type("TokenBucket", (TokenBucket,), flags)


def poured(function: Any, rate: float, burst: float, calls: Sequence[tuple[str, float, float]]) -> Any:
    """calls: ("take" or "give", amount, now). What each `take` returned."""
    one, said = function(rate, burst), {}
    for i, (what, amount, now) in enumerate(calls, 1):
        got = getattr(one, what)(amount, now)
        if what == "take":
            said[f"call {i}, take {amount:g} at {now:g} s"] = _seconds(got, "take")
    return said


def come_back(function: Any, rate: float, burst: float, seed: int) -> Any:
    """Whoever is refused asks half way, where half of the wait must be left, and then when told, which must do."""
    rng, one, now, said = random.Random(seed), function(rate, burst), 0.0, {}
    for i in range(1, 41):
        now += rng.randint(0, 16) / 8
        amount = rng.randint(1, int(burst))
        wait, half_way, then = _seconds(one.take(amount, now), "take"), 0.0, 0.0
        if 0 < wait < math.inf:
            half_way = _seconds(one.take(amount, now + wait / 2), "take")
            now += wait
            then = _seconds(one.take(amount, now), "take")
        said[f"visitor {i}, takes {amount}"] = {"told": wait, "told half way": half_way, "told then": then}
    return said


def _seconds(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Wrong(f"{what} must return seconds, got {value!r:.60}")
    return value
