"""When requests arrive and how long they are: seeded draws, the same on every machine. Lesson 13 sends them.

Times are seconds after the start, rising; rates are requests a second. The next request does not wait for the last
answer: an open loop, as with users who do not know of each other.

constant  gaps of 1 / rate: the kindest traffic there is
poisson   exponential gaps: many independent users. Their coefficient of variation (deviation / mean) is 1
bursty    gamma gaps with a coefficient of variation of one's choice; above 1 requests come in bunches
ramp      a Poisson process whose rate moves evenly from first to last, by inversion (Cinlar, 1975)
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from minillm.errors import MinillmError

PROCESSES = ("constant", "poisson", "bursty", "ramp")


def _count(n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise MinillmError(f"n is a whole number of requests, at least 1, got {n!r:.80}")


def _positive(**values: float) -> None:
    for name, v in values.items():
        if isinstance(v, bool) or not isinstance(v, int | float) or not 0 < v < math.inf:
            raise MinillmError(f"{name} is a finite number above 0, got {v!r:.80}")


def _summed(gaps: list[float]) -> list[float]:
    now, times = 0.0, []
    for gap in gaps:
        now += gap
        times.append(now)
    return times


def constant(n: int, rate: float) -> list[float]:
    _count(n)
    _positive(rate=rate)
    return [(i + 1) / rate for i in range(n)]


def poisson(n: int, rate: float, seed: int = 0) -> list[float]:
    _count(n)
    _positive(rate=rate)
    rng = random.Random(seed)
    return _summed([rng.expovariate(1.0) / rate for _ in range(n)])


def bursty(n: int, rate: float, cv: float, seed: int = 0) -> list[float]:
    """cv: deviation of the gaps over their mean. A gamma of shape 1 / cv^2 has it; vLLM calls that shape burstiness."""
    _count(n)
    _positive(rate=rate, cv=cv)
    rng = random.Random(seed)
    return _summed([rng.gammavariate(1 / cv**2, cv**2 / rate) for _ in range(n)])


def ramp(n: int, first: float, last: float, seed: int = 0) -> list[float]:
    """From `first` to `last` requests a second over the time in which n are expected."""
    _count(n)
    _positive(first=first, last=last)
    rng = random.Random(seed)
    slope = (last - first) * (first + last) / (2 * n)  # of the rate; the whole takes 2 n / (first + last) seconds
    times, expected = [], 0.0
    for _ in range(n):
        expected += rng.expovariate(1.0)
        # first t + slope t^2 / 2 = expected, solved without losing digits when the slope is small. Past the end of a
        # falling ramp the rate stays at `last`.
        if expected <= n:
            times.append(2 * expected / (first + math.sqrt(max(0.0, first**2 + 2 * slope * expected))))
        else:
            times.append(2 * n / (first + last) + (expected - n) / last)
    return times


def make(
    process: str, n: int, rate: float, *, cv: float = 2.0, last: float | None = None, seed: int = 0
) -> list[float]:  # fmt: skip
    """A process by its name. cv belongs to bursty; last, twice the rate unless given, to ramp."""
    if process == "constant":
        return constant(n, rate)
    if process == "poisson":
        return poisson(n, rate, seed)
    if process == "bursty":
        return bursty(n, rate, cv, seed)
    if process == "ramp":
        return ramp(n, rate, 2 * rate if last is None else last, seed)
    raise MinillmError(f"arrivals are one of {', '.join(PROCESSES)}, got {process!r:.80}")


def lengths(n: int, spec: str, seed: int = 0) -> list[int]:
    """n lengths in tokens, each at least 1.

    "64" or "fixed:64"; "uniform:16:128"; "lognormal:MEDIAN:SIGMA[:MOST]", whose long tail real traffic has (sigma of
    the logarithm); "0.9*fixed:64+0.1*fixed:2000" mixes by weight.
    """
    _count(n)
    rng = random.Random(seed)
    parts = []
    for text in spec.split("+"):
        weight, star, rest = text.rpartition("*")
        parts.append((_number(weight, spec) if star else 1.0, _draw(rest, spec)))
    _positive(**{"a weight": min(w for w, _ in parts)})
    draws, weights = [d for _, d in parts], [w for w, _ in parts]
    return [max(1, round(rng.choices(draws, weights)[0](rng))) for _ in range(n)]


def _number(text: str, spec: str) -> float:
    try:
        if math.isfinite(value := float(text)):
            return value
    except ValueError:
        pass
    raise MinillmError(f"{text!r:.40} of the lengths {spec!r:.80} is no finite number")


def _draw(text: str, spec: str) -> Callable[[random.Random], float]:
    name, *words = text.strip().split(":")
    if not words:
        name, words = "fixed", [name]
    values = [_number(w, spec) for w in words]
    if name == "fixed" and len(values) == 1 and values[0] >= 1:
        return lambda rng: values[0]
    if name == "uniform" and len(values) == 2 and 1 <= values[0] <= values[1]:
        return lambda rng: rng.randint(int(values[0]), int(values[1]))
    if name == "lognormal" and len(values) in (2, 3) and values[0] >= 1 and 0 <= values[1] <= 5:
        most = values[2] if len(values) == 3 else math.inf
        return lambda rng: min(most, values[0] * math.exp(rng.gauss(0.0, values[1])))
    raise MinillmError(
        f"lengths are N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:MOST], or a mix as 0.9*64+0.1*2000; got {spec!r:.80}"
    )
