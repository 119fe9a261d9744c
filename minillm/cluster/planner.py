"""Which of tensor, pipeline and data parallelism serves a model on a set of devices, and why. Lesson 14 builds this.

Every way to use the devices is predicted, tp ranks within a layer, pp stages, dp replicas, and ranked: those that keep
the SLO first. The plan keeps the terms of each (`Option.step`), what decided against it, and where nothing will do the
nearest change that would (`plan_advice.py`). Pure: the same question has the same answer, and nothing is measured.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from minillm.cluster.fleet import Fleet, fleet_of
from minillm.cluster.migration import BUDGETS
from minillm.cluster.operating_point import Demand, Point, Replica
from minillm.cluster.pools import CLEAR
from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.parallel.shard import why_not
from minillm.roofline.parallel import RankMemory, Step
from minillm.trace.latency import SLO

__all__ = ["Change", "Demand", "Fleet", "Option", "Plan", "Question", "fleet_of", "option", "plan", "rank", "shapes"]


@dataclass(frozen=True)
class Option:
    """One way to use the devices. Times in seconds, memory in bytes.

    verdict   "good", "slow" (misses the SLO), "full" (the weights or one request's KV do not fit), "uncut" (sizes do
              not divide);  why: that in words
    at        the busiest replica under the demand;  step: its decode step, term by term
    budget         tokens a step (max_num_batched_tokens) that serve best, of those asked
    tokens_per_s   tokens written, by all replicas;   most, most_users: requests/s, or users, within the SLO, by all.
                   Of dp replicas it is dp times one's: nobody is more busy than the others (paced_replicas.py measures)
    spent          seconds of all devices for each token written at the load that options are compared by: `most`, or
                   the users; token, first: the TPOT and the TTFT of `at`. Each by what it goes to (operating_point.py)
    close          good, and within CLEAR of the best: the model cannot tell them apart
    """

    tp: int
    pp: int
    dp: int
    verdict: str
    why: str = ""
    memory: RankMemory | None = None
    seats: int = 0
    at: Point | None = None
    step: Step | None = None
    tokens_per_s: float = 0.0
    most: float = 0.0
    most_users: int = 0
    budget: int = 0
    spent: dict[str, float] = field(default_factory=dict)
    token: dict[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    close: bool = False
    misses: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"tp {self.tp} x pp {self.pp} x dp {self.dp}"

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def worst(self) -> float:
        """By which factor the worst bound is missed; 1 where none is."""
        return max((v / b for v, b in self.misses.values()), default=1.0)


@dataclass(frozen=True)
class Question:
    """What is planned for. dtype, max_num_seqs: as the engine has them. budgets: max_num_batched_tokens, of which each
    option takes the one that serves it best."""

    config: ModelConfig
    fleet: Fleet
    demand: Demand
    slo: SLO = field(default_factory=SLO)
    dtype: str = "bfloat16"
    budgets: tuple[int, ...] = BUDGETS
    max_num_seqs: int = 256

    def __post_init__(self) -> None:
        if not self.budgets:
            raise MinillmError("budgets needs at least one number of tokens a step (max_num_batched_tokens)")
        longest, limit = self.demand.prompt_tokens + self.demand.output_tokens, self.config.max_position_embeddings
        if longest > limit:
            raise MinillmError(
                f"a request of {self.demand.prompt_tokens} + {self.demand.output_tokens} tokens is longer than the "
                f"model's limit of {limit}; plan for shorter ones"
            )


@dataclass(frozen=True)
class Change:
    """What would do instead, in words, and the question that it makes: `plan` of it is good."""

    text: str
    question: Question


@dataclass(frozen=True)
class Plan:
    """The options, best first; whether the best will do (`good`); why it is the best, and if not, what would do."""

    question: Question
    options: tuple[Option, ...]
    why: str
    advice: tuple[Change, ...]

    @property
    def best(self) -> Option:
        return self.options[0]

    @property
    def good(self) -> bool:
        return self.best.verdict == "good"

    def to_dict(self) -> dict[str, Any]:
        """Plain data. A time without end is null."""
        q, fleet = self.question, self.question.fleet
        asked = {
            "device": fleet.device.name, "count": fleet.count, "node": fleet.node, "within": fleet.within.to_dict(),
            "between": fleet.between and fleet.between.to_dict(), "demand": asdict(q.demand), "dtype": q.dtype,
            "slo": {n: getattr(q.slo, n) for n in ("ttft_s", "tpot_s", "itl_s", "e2e_s")},
            "max_num_batched_tokens": list(q.budgets), "max_num_seqs": q.max_num_seqs,
        }  # fmt: skip
        answer = {"good": self.good, "why": self.why, "advice": [c.text for c in self.advice]}
        answer["close"] = [o.name for o in self.options if o.close]
        options = [asdict(o) | {"devices": o.devices} for o in self.options]
        found: dict[str, Any] = _finite(asked | answer | {"options": options})
        return found


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {k: _finite(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def shapes(config: ModelConfig, count: int) -> list[tuple[int, int, int]]:
    """Every (tp, pp, dp) with as many replicas as `count` devices hold. A pipeline that leaves some over is none."""
    found = []
    for tp in range(1, count + 1):
        if why_not(config, tp) is not None:
            if not tp & (tp - 1):  # a size that does not divide is worth a word where people would try it
                found.append((tp, 1, count // tp))
            continue
        for pp in range(1, min(count // tp, config.num_layers) + 1):
            if pp == 1 or count % (tp * pp) == 0:
                found.append((tp, pp, count // (tp * pp)))
    return found


def option(q: Question, tp: int, pp: int, dp: int, *, quick: bool = False) -> Option:
    """One way to use the devices, predicted at the budget that serves it best.

    quick: where a decode alone is over the bound of TPOT no budget helps, and one is enough to say so.
    """
    if (why := why_not(q.config, tp)) is not None:
        return Option(tp, pp, dp, "uncut", why)
    tp_link, pp_link = q.fleet.links(tp, pp, dp)
    replicas = [
        Replica(
            q.config, q.fleet.device, q.demand, q.dtype, tp=tp, pp=pp, tp_link=tp_link, pp_link=pp_link, budget=budget,
            max_num_seqs=q.max_num_seqs,
        )
        for budget in q.budgets
    ]  # fmt: skip
    replica = replicas[0]
    memory, tokens = replica.memory, q.demand.prompt_tokens + q.demand.output_tokens
    if not memory.fits:
        why = f"{memory.weights / 1e9:.1f} GB of weights a device, where {memory.budget / 1e9:.1f} GB may be used"
        return Option(tp, pp, dp, "full", why, memory)
    if not replica.seats:
        why = f"room for the KV of {memory.kv_tokens} tokens, and one request has {tokens}"
        return Option(tp, pp, dp, "full", why, memory)
    if quick and q.slo.tpot_s is not None and replica.step(1).expected > q.slo.tpot_s:
        replicas = replicas[-1:]
    found = [_served(q, r, memory, (tp, pp, dp)) for r in replicas]
    best = min(found, key=lambda o: _order(q, o))
    return replace(best, most=max(o.most for o in found), most_users=max(o.most_users for o in found))


def _served(q: Question, replica: Replica, memory: RankMemory, shape: tuple[int, int, int]) -> Option:
    dp = shape[2]
    at, rate = _busiest(replica, q.demand, dp)
    misses = at.over(q.slo)
    within = replica.within(q.slo)
    if at.ttft_s == math.inf:  # what is missed then is the rate, not a bound
        misses = {n: v for n, v in misses.items() if v[0] < math.inf} | {"rate": (q.demand.rate or 0.0, rate)}
    if q.demand.rate is None:
        spent = {n: v * at.rate / rate for n, v in replica.spent(at).items()}
    else:
        spent = {n: v / dp for n, v in replica.spent(within or at).items()}
    return Option(
        *shape, "slow" if misses else "good", "; ".join(missed(n, *v) for n, v in misses.items()), memory,
        replica.seats, at, replica.step(max(1, round(at.decoding))), rate * q.demand.output_tokens,
        within.rate * dp if within else 0.0, replica.users(q.slo) * dp, replica.budget,
        spent, replica.token(at), replica.first(at), misses=misses,
    )  # fmt: skip


def _busiest(replica: Replica, demand: Demand, dp: int) -> tuple[Point, float]:
    """The busiest of dp replicas, and requests/s of all. Users go to whoever has least to do."""
    if demand.rate is not None:
        at = replica.open(demand.rate / dp)
        assert at is not None  # it has seats
        return at, min(demand.rate, at.rate * dp)
    each, more = divmod(demand.concurrency or 1, dp)
    loads = [(each + 1, more), (each, dp - more)]
    points = [(replica.closed(users), n) for users, n in loads if users and n]
    rate = sum(at.rate * n for at, n in points if at)
    first = points[0][0]
    assert first is not None
    return first, rate


def missed(name: str, value: float, bound: float) -> str:
    """A bound that is not kept, in words."""
    from minillm.roofline.evidence import seconds

    if name == "rate":
        return f"{value:.4g} requests/s come and it can serve {bound:.4g}"
    return f"{name.removesuffix('_s').upper()} {seconds(value)}, over {seconds(bound)}"


def gain(q: Question, o: Option) -> float:
    """What options are compared by: requests/s within the SLO where requests come, tokens/s where users wait."""
    return o.most if q.demand.rate is not None else o.tokens_per_s


def _order(q: Question, o: Option) -> tuple[float, ...]:
    order = ("good", "slow", "full", "uncut").index(o.verdict)
    if o.verdict == "slow":
        return (order, o.worst, -o.tokens_per_s)
    if o.at is None:
        return (order, o.memory.weights - o.memory.budget if o.memory else 0, o.tp)
    return (order, -float(f"{gain(q, o):.4g}"), o.at.tpot_s, o.devices)


def rank(q: Question, *, quick: bool = False) -> list[Option]:
    """All options, best first. For a rate the best could take most within the SLO; for users it writes most.

    quick: only good ones are of interest.
    """
    options = sorted(
        (option(q, *shape, quick=quick) for shape in shapes(q.config, q.fleet.count)), key=lambda o: _order(q, o)
    )
    best = options[0]
    if best.verdict != "good":
        return options
    near = (o is not best and o.verdict == "good" and gain(q, o) * (1 + CLEAR) >= gain(q, best) for o in options)
    return [replace(o, close=close) for o, close in zip(options, near, strict=True)]


def plan(q: Question) -> Plan:
    """Ranked options, why the first is first, and where it will not do what would."""
    from minillm.cluster import plan_advice

    options = rank(q)
    why, changes = plan_advice.why(q, options), plan_advice.nearest(q, options)
    return Plan(q, tuple(plan_advice.explained(q, options)), why, tuple(changes))
