"""Predicted goodput beside a paced fleet's, shape by shape. Lesson 15.

The planner says a rate, and whether a split pays. A fleet on a virtual clock serves Poisson arrivals at rates around it
until the highest is found at which ATTAINMENT of the requests are in time. Both know the same seconds of a step: what
is judged are queues, batches, memory, and the handoff.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from minillm.cluster.goodput import ATTAINMENT
from minillm.cluster.migration import Engine, Wire
from minillm.cluster.paced import Colocated, FleetRun, Sample
from minillm.cluster.paced_split import Split
from minillm.cluster.pools import CLEAR, MARGIN, Pool
from minillm.cluster.split_planner import SplitPlan, plan_split
from minillm.cluster.step_times import Workload
from minillm.errors import MinillmError
from minillm.trace.arrivals import poisson
from minillm.trace.latency import SLO

REQUESTS, LASTS = 400, 20
STEP, CLOSE = 1.15, 1.03  # of a rate: how far to look at once, and when two are the same


def fleet(engine: Engine, pool: Pool, wire: Wire) -> Colocated:
    """The arrangement, with nothing in it."""
    if pool.prefill:
        return Split(engine, pool.prefill, pool.decode, wire, pool.budget)
    return Colocated(engine, pool.engines, pool.budget)


def paced_run(
    engine: Engine, pool: Pool, wire: Wire, workload: Workload, rate: float, requests: int = REQUESTS, seed: int = 0
) -> FleetRun:
    """So many Poisson arrivals at a rate, served to the end."""
    times = poisson(requests, rate, seed)
    return fleet(engine, pool, wire).run(times, workload.prompt_tokens, workload.output_tokens)


def paced_goodput(
    engine: Engine, pool: Pool, wire: Wire, workload: Workload, slo: SLO, requests: int = REQUESTS, seed: int = 0
) -> float:
    """The highest rate, to a few percent, at which a paced fleet serves ATTAINMENT in time; 0.0 where even a hundredth
    of the predicted one is too much. The same arrivals at every rate, only closer together.

    A fleet that is overloaded by a little needs long to be late: 5 % of LASTS bounds are one bound. So a run lasts at
    least LASTS times the bound of the TTFT.
    """
    near = pool.goodput or 1e-3
    requests = max(requests, math.ceil(LASTS * near * (slo.ttft_s or 0.0)))

    def good(rate: float) -> bool:
        return paced_run(engine, pool, wire, workload, rate, requests, seed).attained(slo) >= ATTAINMENT

    return highest(good, near)


def highest(good: Callable[[float], bool], near: float) -> float:
    """The highest good rate around `near`, by steps and then by halving, to a factor of CLOSE."""
    low, high = 0.0, near
    if good(near):
        low = near
        while good(high := low * STEP):
            low = high
    else:
        while not low and high > near / 100:
            if good(at := high / STEP):
                low = at
            else:
                high = at
    while low and high / low > CLOSE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Confirmation:
    """Goodput in requests/s, predicted and paced, of the co-located engines and of the best split."""

    workload: Workload
    slo: SLO
    wire: Wire
    colocated: str
    split: str
    predicted: tuple[float, float]
    paced: tuple[float, float]

    @property
    def errors(self) -> tuple[float, float]:
        """(predicted - paced) / paced."""
        a, b = ((p - q) / q if q else float(p > 0) for p, q in zip(self.predicted, self.paced, strict=True))
        return a, b

    @property
    def gains(self) -> tuple[float, float]:
        """Split over co-located, predicted and paced."""
        a, b = (s / c if c else float("inf") if s else 0.0 for c, s in (self.predicted, self.paced))
        return a, b

    @property
    def agrees(self) -> bool:
        """Whether both say the same of whether the split pays."""
        said, seen = (g >= 1 + MARGIN for g in self.gains)
        return said == seen

    @property
    def clear(self) -> bool:
        """Whether the prediction is far from the line between yes and no."""
        return abs(self.gains[0] - 1 - MARGIN) > CLEAR

    def to_dict(self) -> dict[str, Any]:
        more = {name: getattr(self, name) for name in ("errors", "gains", "agrees", "clear")}
        return asdict(self) | more


def confirm(
    engine: Engine, engines: int, workload: Workload, slo: SLO, wire: Wire, requests: int = REQUESTS, seed: int = 0
) -> Confirmation:
    """Plan, then run the co-located engines and the best split of that plan. Needs at least two engines."""
    if engines < 2:
        raise MinillmError(f"a split needs at least two engines, got {engines}")
    return confirm_plan(engine, plan_split(engine, engines, workload, slo, wire, explain=False), requests, seed)


def confirm_plan(engine: Engine, plan: SplitPlan, requests: int = REQUESTS, seed: int = 0) -> Confirmation:
    pools = (plan.colocated, plan.splits[0])
    a, b = (paced_goodput(engine, p, plan.wire, plan.workload, plan.slo, requests, seed) for p in pools)
    return Confirmation(
        plan.workload, plan.slo, plan.wire, pools[0].name, pools[1].name, (pools[0].goodput, pools[1].goodput), (a, b)
    )


def growth(samples: Sequence[Sample], of: str) -> float:
    """How fast a queue grows after the first fifth of the samples: requests/s. of: a field of `Sample`."""
    kept = samples[len(samples) // 5 :]
    if len(kept) < 2:
        raise MinillmError(f"growth needs at least 3 samples, got {len(samples)}")
    times, values = [s.time for s in kept], [float(getattr(s, of)) for s in kept]
    t, v = sum(times) / len(times), sum(values) / len(values)
    return sum((a - t) * (b - v) for a, b in zip(times, values, strict=True)) / sum((a - t) ** 2 for a in times)
