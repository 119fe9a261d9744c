"""The buckets of /metrics, and a histogram that is cheap enough for every token of every stream. Lesson 13.

A quantile read from buckets is within one bucket of the truth; the mean is exact. So the buckets are dense where a user
feels a difference, and coarse where a label multiplies them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

# Finer than vLLM's at the low end: a small model on two cores has tokens of milliseconds.
SECONDS = tuple(round(m * 10.0**e, 6) for e in (-3, -2, -1, 0, 1, 2) for m in (1, 1.5, 2, 3, 5, 7.5))
COARSE = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # where a label multiplies the series
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
STEP_TOKENS = tuple(float(2**e) for e in range(15))


class Gaps:
    """A histogram of SECONDS for what comes with every token of every stream, in the engine's thread: an observation
    costs a search and two additions. The library's takes a lock or two and walks through the buckets."""

    def __init__(self, name: str, text: str, model_name: str):
        self.name, self.text, self.model_name = name, text, model_name
        self.counts, self.sum = [0] * (len(SECONDS) + 1), 0.0

    def observe(self, seconds: float) -> None:
        """One thread at a time."""
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    def collect(self) -> Iterator[Metric]:
        ends = [*map(floatToGoString, SECONDS), "+Inf"]
        family = HistogramMetricFamily(self.name, self.text, labels=["model_name"])
        family.add_metric([self.model_name], [*zip(ends, accumulate(self.counts), strict=True)], self.sum)
        yield family
