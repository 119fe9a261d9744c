"""The wait for the whole amount."""

import math

TASK = "13.4"
POINTS = 1.5
HINT = "not amount / rate"


class TokenBucket:
    def __init__(self, rate: float, burst: float):
        self.rate, self.burst = rate, burst
        self.level, self.at = burst, 0.0

    def fill(self, now: float) -> None:
        self.level = min(self.burst, self.level + (now - self.at) * self.rate)
        self.at = now

    def take(self, amount: float, now: float) -> float:
        if amount > self.burst:
            return math.inf
        self.fill(now)
        if amount > self.level:
            return amount / self.rate
        self.level -= amount
        return 0.0

    def give(self, amount: float, now: float) -> None:
        self.fill(now)
        self.level = min(self.burst, self.level + amount)
