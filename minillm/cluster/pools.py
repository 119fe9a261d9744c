"""Pools of n engines: each does both, or p prefill and d decode; each pool at its best chunk. Lesson 15 builds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minillm.cluster.goodput import Forecast, colocated, goodput, split
from minillm.cluster.migration import Wire
from minillm.cluster.step_times import Steps
from minillm.trace.latency import SLO

MARGIN = 0.10  # a split must give a tenth more, for the engines of each kind that must be run, watched and balanced
CLEAR = 0.15  # how far a predicted gain is from 1 + MARGIN before its yes or no is a clear one


@dataclass(frozen=True)
class Pool:
    """Engines of one kind, or of two. prefill = decode = 0: co-located.

    budget      tokens a step of the engines that compute prompts
    forecast    at its goodput (`forecast.rate`, requests/s of the whole pool)
    bottleneck  what fails first above it: "prefill" (prompts queue), "steps" (tokens are late), "link", "kv" (no memory
                where it is decoded), "seats" (max_num_seqs requests run), or, when even a request alone misses a bound,
                "ttft alone" or "tpot alone"
    """

    engines: int
    prefill: int
    decode: int
    budget: int
    forecast: Forecast
    bottleneck: str

    @property
    def goodput(self) -> float:
        return self.forecast.rate

    @property
    def name(self) -> str:
        return f"{self.prefill}P{self.decode}D" if self.prefill else f"{self.engines} co-located"


def colocated_pool(steps: Steps, engines: int, slo: SLO) -> Pool:
    """n engines that each do both, at the chunk that serves best."""
    found = [
        (goodput(lambda rate, b=b: colocated(steps, engines, slo, rate, b)), b)  # type: ignore[misc]
        for b in sorted(steps.engine.budgets)
    ]  # fmt: skip
    best, budget = max(found, key=lambda f: (f[0].rate, f[0].attained))
    more = colocated(steps, engines, slo, 1.02 * best.rate or 1e-9, budget)
    return Pool(engines, 0, 0, budget, best, _bottleneck(steps, best, more))


def split_pool(steps: Steps, prefill: int, decode: int, slo: SLO, wire: Wire) -> Pool:
    """p + d engines; those that compute prompts take the number of tokens a step that serves best."""
    at = lambda rate, b: split(steps, prefill, decode, wire, slo, rate, b)
    found = [(goodput(lambda rate, b=b: at(rate, b)), b) for b in sorted(steps.engine.budgets)]  # type: ignore[misc]
    best, budget = max(found, key=lambda f: (f[0].rate, f[0].attained))
    return Pool(
        prefill + decode, prefill, decode, budget, best, _bottleneck(steps, best, at(1.02 * best.rate or 1e-9, budget))
    )


def split_pools(steps: Steps, engines: int, slo: SLO, wire: Wire) -> tuple[Pool, ...]:
    """Every split of so many engines, best first."""
    pools = [split_pool(steps, p, engines - p, slo, wire) for p in range(1, engines)]
    return tuple(sorted(pools, key=lambda pool: -pool.goodput))


def _bottleneck(steps: Steps, best: Forecast, more: Forecast) -> str:
    if not best.rate:
        return "ttft alone" if best.ttft_ok <= best.tpot_ok else "tpot alone"
    if more.tpot_ok < more.ttft_ok:
        return "steps"
    name = min(more.limits, key=lambda name: more.limits[name])
    if name in ("kv", "decode"):  # as many run as may: by max_num_seqs, or by memory
        return "seats" if steps.seats < steps.by_room else "kv"
    return name


def gain_of(together: Pool, splits: Sequence[Pool], rate: float | None) -> float:
    if not splits:
        return 0.0
    most = math.inf if rate is None else rate
    here, there = min(most, together.goodput), min(most, splits[0].goodput)
    return there / here if here else math.inf if there else 0.0


def clear(together: Pool, gain: float, rate: float | None) -> bool:
    """Whether yes or no is beyond the prediction's own error (docs/pd_split.md has it beside a fleet's).

    At a rate that co-located engines hold with so much to spare it is no, whatever a split could do.
    """
    if rate is not None and rate <= together.goodput * (1 - CLEAR):
        return True
    return abs(gain - 1 - MARGIN) > CLEAR


def pays(steps: Steps, engines: int, slo: SLO, wire: Wire, together: Pool | None = None) -> bool:
    """Whether any split serves MARGIN more than co-located engines do, whatever comes."""
    here = (together or colocated_pool(steps, engines, slo)).goodput
    middle_first = sorted(range(1, engines), key=lambda p: abs(2 * p - engines))
    found = (split_pool(steps, p, engines - p, slo, wire).goodput for p in middle_first)
    return any(there > 0 and there >= (1 + MARGIN) * here for there in found)
