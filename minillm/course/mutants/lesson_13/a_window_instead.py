"""A counter that starts anew with each window."""

import math

TASK = "13.4"
POINTS = 0.5
HINT = "not once a window"


class TokenBucket:
    def __init__(self, rate: float, burst: float):
        self.rate, self.burst = rate, burst
        self.level, self.at = burst, 0.0

    def fill(self, now: float) -> None:
        width = self.burst / self.rate
        if now // width > self.at // width:
            self.level, self.at = self.burst, now

    def take(self, amount: float, now: float) -> float:
        if amount > self.burst:
            return math.inf
        self.fill(now)
        if amount > self.level:
            width = self.burst / self.rate
            return (now // width + 1) * width - now
        self.level -= amount
        return 0.0

    def give(self, amount: float, now: float) -> None:
        self.fill(now)
        self.level = min(self.burst, self.level + amount)
