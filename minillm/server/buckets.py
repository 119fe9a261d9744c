"""Token buckets: what a tenant may ask for in a minute, and exactly when it may ask again. Lesson 13.

A bucket of `capacity` fills at `rate` a second. Instead of a level it keeps one number, the time at which it will be
full (the virtual schedule of the generic cell rate algorithm, ATM Forum, 1996). Taking moves that time into the
future, giving back moves it to the past, and nothing runs in between. The wait it tells is exact: whoever waits that
long and asks again alone is let in.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

MINUTE_S = 60.0
SLACK_S = 1e-6  # a clock is a float: without it, whoever waits exactly may come one bit too early


class TokenBucket:
    """per_minute: the rate. burst: the most that can be taken at once; by default one minute's worth.

    `now` is in seconds of a clock that does not go back. Not thread-safe: `Quota` holds the lock.
    """

    def __init__(self, per_minute: float, burst: float | None = None):
        self.rate = per_minute / MINUTE_S
        self.capacity = float(per_minute if burst is None else burst)
        self._full_at = -math.inf

    def level(self, now: float) -> float:
        """What could be taken now; between 0 and capacity."""
        missing = max(0.0, self._full_at - now) * self.rate
        return min(self.capacity, max(0.0, self.capacity - missing))

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` can be taken, 0 if it can be now, infinity if never."""
        if amount > self.capacity:
            return math.inf
        wait = self._full_at + (amount - self.capacity) / self.rate - now
        return wait if amount > 0 and wait > SLACK_S else 0.0

    def take(self, amount: float, now: float) -> bool:
        """Take it all, or nothing."""
        if self.wait(amount, now) > 0:
            return False
        self._full_at = max(self._full_at, now) + max(amount, 0.0) / self.rate
        return True

    def give(self, amount: float) -> None:
        """Give back what was taken and not used. The bucket never holds more than its capacity."""
        self._full_at -= max(amount, 0.0) / self.rate


@dataclass(frozen=True)
class Short:
    """What a quota lacks. which: "requests" or "tokens". level: what is there, with what the request holds.

    retry_after_s: infinity if it can never be met.
    """

    which: str
    per_minute: float
    asked: float
    level: float
    retry_after_s: float


class Quota:
    """A tenant's requests and tokens a minute; None is no bound. Thread-safe, O(1).

    Both are taken, or none is: a request that lacks tokens does not cost the tenant a request.
    """

    def __init__(
        self, requests_per_minute: float | None = None, tokens_per_minute: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):  # fmt: skip
        self.clock = clock
        self._limits = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._buckets = {name: TokenBucket(rate) for name, rate in self._limits.items() if rate is not None}
        self._lock = threading.Lock()

    def take(self, requests: int, tokens: int, held: int = 0) -> Short | None:
        """Take both, or say what is short: what can never be met first, then what takes longest.

        held: of the tokens, those that the request has taken before; what is too much of them is given back.
        """
        asked, more = {"requests": requests, "tokens": tokens}, {"requests": requests, "tokens": tokens - held}
        with self._lock:
            now = self.clock()
            waits = {
                name: math.inf if asked[name] > bucket.capacity else bucket.wait(more[name], now)
                for name, bucket in self._buckets.items()
            }
            worst = max(waits, key=lambda name: waits[name], default=None)
            if worst is not None and waits[worst] > 0:
                bucket, rate = self._buckets[worst], self._limits[worst]
                assert rate is not None
                return Short(worst, rate, asked[worst], bucket.level(now) + asked[worst] - more[worst], waits[worst])
            for name, bucket in self._buckets.items():
                bucket.take(more[name], now)
                bucket.give(-more[name])
        return None

    def give(self, requests: int = 0, tokens: int = 0) -> None:
        asked = {"requests": requests, "tokens": tokens}
        with self._lock:
            for name, bucket in self._buckets.items():
                bucket.give(asked[name])

    def level(self, which: str) -> float | None:
        """What is left of "requests" or "tokens"; None without a bound."""
        bucket = self._buckets.get(which)
        if bucket is None:
            return None
        with self._lock:
            return bucket.level(self.clock())
