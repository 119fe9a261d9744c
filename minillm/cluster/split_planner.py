"""Does a prefill/decode split pay, with how many engines on each side, and if not, why not? Lesson 15 builds it.

A pure prediction: goodput of n engines that each do both, against every p prefill + d decode engines, p + d = n. The
baseline is an honest one: chunked prefill at its best chunk, which bounds what a prompt does to other people's tokens,
and often wins. A split moves KV, cuts the pool in two, and rounds to whole engines: it must give MARGIN more.

Goodput is goodput.py's, the terms of a handoff are migration.py's, why not is said by split_reasons.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from minillm.cluster.goodput import Forecast, colocated, moving, split
from minillm.cluster.migration import Engine, Migration, Wire
from minillm.cluster.pools import CLEAR, MARGIN, Pool, clear, colocated_pool, gain_of, split_pools
from minillm.cluster.split_reasons import Reason, why_not
from minillm.cluster.step_times import Steps, Workload
from minillm.errors import MinillmError
from minillm.trace.latency import SLO


@dataclass(frozen=True)
class SplitPlan:
    """splits: best first. gain: best split over co-located, of what is served well at the workload's rate.

    pays: whether the gain is above 1 + MARGIN; clear: whether by more than the prediction's own error, to either side.
    """

    workload: Workload
    slo: SLO
    wire: Wire
    colocated: Pool
    splits: tuple[Pool, ...]
    gain: float
    pays: bool
    clear: bool
    reasons: tuple[Reason, ...] = ()
    words: str = ""
    migration: Migration | None = field(default=None, compare=False)

    @property
    def best(self) -> Pool | None:
        """The best split, whether it pays or not; None for one engine."""
        return self.splits[0] if self.splits else None

    def to_dict(self) -> dict[str, Any]:
        def pool(p: Pool) -> dict[str, Any]:
            return {"name": p.name, "goodput": p.goodput} | asdict(p)

        data = {k: getattr(self, k) for k in ("gain", "pays", "clear", "words")}
        data["gain"] = None if math.isinf(self.gain) else self.gain
        return data | {
            "workload": asdict(self.workload), "slo": asdict(self.slo), "wire": asdict(self.wire),
            "colocated": pool(self.colocated), "splits": [pool(p) for p in self.splits],
            "reasons": [asdict(r) for r in self.reasons],
            "migration": None if self.migration is None else self.migration.to_dict(),
        }  # fmt: skip


def plan_split(
    engine: Engine, engines: int, workload: Workload, slo: SLO, wire: Wire, *, explain: bool = True
) -> SplitPlan:
    """Co-located against every split of `engines` engines. explain=False leaves the reasons out (they cost more plans).

    Raises MinillmError for an SLO without a bound on TTFT or TPOT: without bounds there is no goodput.
    """
    _asked(engines, slo)
    steps = Steps(engine, workload)
    together, splits = colocated_pool(steps, engines, slo), split_pools(steps, engines, slo, wire)
    gain = gain_of(together, splits, workload.rate)
    plan = SplitPlan(
        workload, slo, wire, together, splits, gain, gain >= 1 + MARGIN, clear(together, gain, workload.rate),
        migration=moving(steps, wire, splits[0].budget) if splits else None,
    )  # fmt: skip
    reasons = () if plan.pays or not explain else tuple(why_not(steps, slo, wire, together, splits, plan.migration))
    return replace(plan, reasons=reasons, words=_words(plan, reasons))


def _asked(engines: int, slo: SLO) -> None:
    if isinstance(engines, bool) or not isinstance(engines, int) or not 1 <= engines <= 64:
        raise MinillmError(f"a pool has from 1 to 64 engines, got {engines!r:.80}")
    if slo.ttft_s is None or slo.tpot_s is None:
        raise MinillmError(
            "goodput counts requests within bounds: give the SLO a bound on TTFT and one on TPOT, as ttft=0.5,tpot=0.05"
        )


def _words(plan: SplitPlan, reasons: Sequence[Reason]) -> str:
    here, best, rate = plan.colocated, plan.best, plan.workload.rate
    come = "" if rate is None else f" of the {rate:.3g} that come"
    many, most = "", max(here.goodput, best.goodput if best else 0.0)
    if rate is not None and most and most < rate:
        many = f". {rate:.3g} come: that takes about {math.ceil(here.engines * rate / most)} such engines"
    if not plan.clear and best is not None:
        return (
            f"too close to call: {here.goodput:.3g} requests/s within the bounds by {here.name} and {best.goodput:.3g} "
            f"by {best.name}, {plan.gain:.2f} times as many{come}. A split has to give {1 + MARGIN:g} times, and a "
            f"predicted gain is true to about {CLEAR:g}: measure both{many}"
        )
    if plan.pays and best is not None:
        f, g = here.forecast, best.forecast
        ratio = f"{plan.gain:.2f} times as many{come}" if math.isfinite(plan.gain) else "only a split holds a rate"
        return (
            f"split into {best.name}: {best.goodput:.3g} requests/s within the bounds, {here.goodput:.3g} by "
            f"{here.name}: {ratio}. A token takes {g.tpot_s * 1e3:.3g} ms there beside {g.running:.3g} others, and "
            f"{f.tpot_s * 1e3:.3g} ms here beside {f.running:.3g} and their prompts; the split is then full by "
            f"{best.bottleneck}{many}"
        )
    because = "; ".join(f"{r.code}: {r.words}" for r in reasons)
    if not here.goodput:
        return f"no engines serve a request within the bounds. {because}"
    split = "" if best is None else f" (the best split, {best.name}, {best.goodput:.3g}, full by {best.bottleneck})"
    return f"stay co-located: {here.goodput:.3g} requests/s within the bounds{split}. {because}{many}"


# Sweeps ---------------------------------------------------------------------------------------------------------------


def break_even(
    engine: Engine, engines: int, slo: SLO, wire: Wire, bandwidths: Sequence[float], prompts: Sequence[int],
    output_tokens: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows over prompt length x bandwidth: prompt_tokens, bandwidth, colocated and split (goodputs, requests/s), best
    (its name), gain, pays, bottleneck (of the split)."""
    _asked(engines, slo)
    rows = []
    for m in prompts:
        steps = Steps(engine, Workload(m, output_tokens))
        together = colocated_pool(steps, engines, slo)
        for bandwidth in bandwidths:
            over = replace(wire, bandwidth=bandwidth)
            splits = split_pools(steps, engines, slo, over)
            best, gain = splits[0] if splits else None, gain_of(together, splits, None)
            rows.append({
                "prompt_tokens": m, "bandwidth": bandwidth, "colocated": together.goodput,
                "split": 0.0 if best is None else best.goodput, "best": "" if best is None else best.name,
                "gain": gain, "pays": gain >= 1 + MARGIN, "bottleneck": "" if best is None else best.bottleneck,
            })  # fmt: skip
    return rows


def over_load(
    engine: Engine, engines: int, workload: Workload, slo: SLO, wire: Wire, rates: Sequence[float]
) -> list[dict[str, Any]]:
    """Rows over the offered rate. "colocated" and "split" (the best one, None for one engine) each have: name, ok
    (share within the SLO), good (requests/s within it), ttft_s, tpot_s, running, terms of the TTFT."""
    plan = plan_split(engine, engines, replace(workload, rate=None), slo, wire, explain=False)
    steps = Steps(engine, workload)

    def at(pool: Pool | None, rate: float) -> dict[str, Any] | None:
        if pool is None:
            return None
        f = _forecast_of(steps, pool, slo, wire, rate)
        good = rate * f.attained
        return {
            "name": pool.name, "ok": f.attained, "good": good, "ttft_s": f.ttft_s, "tpot_s": f.tpot_s,
            "running": f.running, "terms": f.terms,
        }  # fmt: skip

    return [{"rate": r, "colocated": at(plan.colocated, r), "split": at(plan.best, r)} for r in rates]


def _forecast_of(steps: Steps, pool: Pool, slo: SLO, wire: Wire, rate: float) -> Forecast:
    if pool.prefill:
        return split(steps, pool.prefill, pool.decode, wire, slo, rate, pool.budget)
    return colocated(steps, pool.engines, slo, rate, pool.budget)


def coupling(
    engine: Engine, workload: Workload, wire: Wire, pools: Sequence[tuple[int, int]], budget: int | None = None
) -> list[dict[str, Any]]:
    """Rows over (prefill, decode) at the workload's rate: the limits (requests/s), and what piles up: input_queue,
    link_queue, kv_pile in requests/s, kv_bytes_per_s. More P alone piles KV up, more D alone leaves the input queueing.
    """
    if workload.rate is None:
        raise MinillmError("what piles up depends on what comes: give the workload a rate")
    steps, rows = Steps(engine, workload), []
    budget = max(engine.budgets) if budget is None else budget
    for p, d in pools:
        f = split(steps, p, d, wire, SLO(), workload.rate, budget)
        size = moving(steps, wire, budget).bytes
        rows.append(
            {"prefill": p, "decode": d, "rate": workload.rate, "limits": f.limits, **f.flow,
             "kv_bytes_per_s": f.flow["kv_pile"] * size}
        )  # fmt: skip
    return rows
