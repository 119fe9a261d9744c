"""One pool of engines at one rate: the share of requests within TTFT and TPOT, before anything runs. Lesson 15.

Requests of one shape arrive at random (Poisson): m prompt tokens, n output tokens. Goodput is the highest rate at which
nine in ten meet both bounds (DistServe; Zhong et al., 2024).

Co-located, each engine computes prompts in chunks beside its decodes. With T(r) the seconds of a step of r decodes and
x those that a prompt adds to the steps it shares, rate l an engine, a mean step takes

    T = T(r) / (1 - l x),    r = l (n - 1) T    (Little's law)

so a token waits for other people's prompts, but never longer than one full step: chunking bounds the interference.
Where a full step is longer than a bound on the longest gap (ITL), those keep it to whom no such step comes; where it
only becomes so beside many decodes, those beside whom there are never that many.
Split, the prompts' x is gone from decode (but for the few tokens of a partial block), and a prompt pays for its way.

Waits are those of a queue with c servers and constant service, Sakasegawa's (1977; `capacity.waiting`):
P(wait > t) = pi exp(-2 (limit - rate) t), pi = rho^(sqrt(2 (c + 1)) - 1). Of servers in a row only the slowest is
queued for, when each takes constant time (Friedman, 1965).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import torch

from minillm.cluster.migration import Migration, Wire, migration
from minillm.cluster.step_times import Steps, Workload
from minillm.errors import MinillmError
from minillm.roofline.capacity import waiting
from minillm.trace.latency import SLO

ATTAINMENT = 0.9  # of requests within all bounds
NORMAL = NormalDist()
SETTLE, SETTLED = 60, 1e-4  # half steps at most, and the change that is none


@dataclass(frozen=True)
class Forecast:
    """A pool at a rate. Shares from 0 to 1, seconds, requests/s.

    ttft_ok, tpot_ok  shares of requests within each bound;  attained: within all
    ttft_s, tpot_s    means;  terms: what the mean TTFT is made of
    running           requests that decode at a time, an engine
    limits            requests/s at which prefill, decode, link and KV room would be full, of the whole pool
    """

    rate: float
    ttft_ok: float
    tpot_ok: float
    ttft_s: float
    tpot_s: float
    running: float
    terms: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)

    @property
    def attained(self) -> float:
        return self.ttft_ok * self.tpot_ok

    @property
    def flow(self) -> dict[str, float]:
        """What piles up where the parts do not match, requests/s: input queues, KV finds no room at decode."""
        through = min(self.rate, self.limits["prefill"])
        passed = min(through, self.limits.get("link", math.inf))
        return {
            "input_queue": self.rate - through,
            "link_queue": through - passed,
            "kv_pile": max(0.0, passed - min(self.limits.get("decode", math.inf), self.limits["kv"])),
        }


def colocated(steps: Steps, n: int, slo: SLO, rate: float, budget: int) -> Forecast:
    """n engines, each with whole requests; a newcomer goes to the engine that has least to do."""
    w, each = steps.workload, rate / n
    outputs = w.output_tokens - 1  # the first comes with the prompt
    r, step = 0.0, steps.decode(1)
    for _ in range(SETTLE):  # decodes and the step need each other; half steps settle
        beside = min(r, budget - 1.0, float(steps.seats))
        prompt, count = steps.prompt(budget, beside)
        alone, longest = steps.decode(max(1.0, beside)), steps.full(budget, beside)
        last = steps.last(budget, beside)
        came = each * (prompt - last + step)  # others, before the last chunk's step, which they share
        joined = 1 - math.exp(-came)
        room = w.prompt_tokens / (budget - beside)
        x = (1 - joined) * (prompt - count * alone) + joined * (steps.shared(budget, beside) - room * alone)
        step = longest if each * x >= 1 else min(longest, alone / (1 - each * x))
        before, r = r, (r + min(each * outputs * step, 4.0 * steps.seats)) / 2
        if abs(r - before) < SETTLED * r:
            break
    limits = {"prefill": n / steps.shared(budget, beside), "kv": n * steps.seats / (prompt + outputs * step)}
    busy = min(1.0, each * prompt)  # share of time in steps with a chunk
    terms = {
        "queue": waiting(rate, limits["prefill"], n), "step under way": (1 - busy) * min(1.0, r) * alone / 2,
        "prefill": prompt, "others' chunk": max(0.0, min(joined * (longest - last), came * x)),
        "room": waiting(rate, limits["kv"], n * steps.seats),
    }  # fmt: skip
    # Who begins to decode has those behind it who came meanwhile; who ends does so in a step, and few steps hold a
    # chunk. The difference of the two queues is what it saw pass beyond the average.
    behind = each / n * min(sum(terms.values()), 10 * prompt) * max(0.0, 1 - count * step / prompt)
    mean = min(longest, step + behind * x / outputs)
    slope = steps.slope(max(1.0, beside))
    gain = 1 / max(0.02, 1 - each * outputs * slope - each * x)
    deviation = gain * math.sqrt(((r + behind) * (x / outputs) ** 2 + 2 * r / 3 * slope**2) / n)
    tpot_ok = 1.0 if slo.tpot_s is None or longest <= slo.tpot_s else _below(mean, deviation, slo.tpot_s)
    if slo.itl_s is not None:
        calm = _calm(n, r, steps.decodes_within(slo.itl_s, lambda k: steps.full(budget, k), budget - 1))
        if calm < 1:
            tpot_ok *= calm + (1 - calm) * _undisturbed(steps, n, slo.itl_s, rate, budget, beside, prompt, step)
    return _forecast(slo, w, rate, terms, limits, n, n * steps.seats, mean, tpot_ok, r)


def split(
    steps: Steps, prefill: int, decode: int, wire: Wire, slo: SLO, rate: float, budget: int
) -> Forecast:  # fmt: skip
    """`prefill` engines that compute prompts and `decode` engines that take their KV over `wire`."""
    w = steps.workload
    outputs = w.output_tokens - 1
    moved = moving(steps, wire, budget)
    prompt = steps.until(budget, moved.tokens)
    left = w.prompt_tokens - moved.tokens  # computed at decode
    each, r, step, busy = rate / decode, 0.0, steps.decode(1), 0.0
    for _ in range(SETTLE):
        beside = min(r, float(steps.seats))
        alone, first = steps.decode(max(1.0, beside)), steps.first(left, beside)
        came = each * (busy * first + (1 - busy) * alone)  # during a step: they begin in the next one, together
        together = came / (1 - math.exp(-came)) if came > 1e-9 else 1.0
        busy, x = min(1.0, each * first / together), max(0.0, first - alone) / together
        step = min(first, alone / (1 - each * x)) if each * x < 1 else first
        before, r = r, (r + min(each * outputs * step, 4.0 * steps.seats)) / 2
        if abs(r - before) < SETTLED * r:
            break
    slope = steps.slope(max(1.0, beside))
    gain = 1 / max(0.02, 1 - each * outputs * slope - each * x)
    deviation = gain * math.sqrt((r * (x / outputs) ** 2 + 2 * r / 3 * slope**2) / decode)
    tpot_ok = 1.0 if slo.tpot_s is None else _below(step, deviation, slo.tpot_s)
    if not moved.tokens:  # a prompt within a block is computed where it is decoded
        prompt = 0.0
    limits = {
        "prefill": prefill / steps.shared(budget, 0) if moved.tokens else math.inf,
        "link": min(prefill, decode) * wire.bandwidth / moved.bytes if moved.tokens else math.inf,
        "decode": decode * steps.seats / (outputs * steps.decode(float(steps.seats))),
        "kv": decode * steps.seats / (prompt + moved.transfer_s - moved.hidden_s + (outputs + 1) * step),
    }
    entry, way, last = min(limits["prefill"], limits["link"]), rate / prefill, steps.last(budget, 0)
    if slo.itl_s is not None:
        spread = _spread(rate / entry, outputs * step * entry)
        tpot_ok *= _calm(decode, r, steps.decodes_within(slo.itl_s, lambda k: steps.first(left, k)), spread)
    came = way * prompt
    others = min((1 - math.exp(-came)) * (steps.full(budget, 0) - last), came * steps.shared(budget, 0))
    others = max(0.0, others) if moved.tokens else 0.0
    under_way = busy * first / 2 + (1 - busy) * min(1.0, r) * alone / 2
    terms = {
        "queue": waiting(rate, entry, prefill) if moved.tokens else 0.0, "locate": moved.locate_s, "prefill": prompt,
        "others' chunk": others, "transfer": moved.transfer_s - moved.hidden_s, "layout": moved.layout_s,
        "allocate": max(0.0, moved.allocate_s + under_way - prompt),  # asked for when the prefill begins
        "step under way": under_way, "first step": first,
        "room": waiting(rate, limits["kv"], decode * steps.seats),
    }  # fmt: skip
    return _forecast(slo, w, rate, terms, limits, prefill, decode * steps.seats, step, tpot_ok, r)


def _calm(n: int, r: float, most: int, spread: float = 1.0) -> float:
    """Share of requests beside which never more than `most` others decode on their engine, of n with r on average.

    Engines are filled evenly, so it is a question of how many there are at once in the pool: the scan statistic of a
    Poisson process, a stay long, over the two stays that overlap with one's own. Alm's approximation (1983):
    P(< k) = F(k - 1) exp(-(1 - m / k) m p(k - 1)) with m on average. spread: variance of how many come over that of
    Poisson's; fewer in larger units have the same.
    """
    mean, places = n * r / spread, math.floor(n * (most + 0.5) / spread) + 1  # half of the engines have one more
    if most < 0 or places <= mean:
        return 0.0
    if mean < 1e-9:
        return 1.0
    p = math.exp((places - 1) * math.log(mean) - mean - math.lgamma(places))
    k, m = torch.tensor([places, mean], dtype=torch.float64)
    return float(torch.special.gammaincc(k, m)) * math.exp(-(1 - mean / places) * mean * p)


def _spread(busy: float, stay: float) -> float:
    """Variance over mean of how many requests leave a busy pool of prefill engines during a stay (in its services).

    Poisson's 1 where the pool idles. Services of constant time even out what comes at random: from one to the next
    Whitt's c^2 is 1 - busy^2 (QNA, 1983). But over times in which a queue comes and goes, 1 / 2 (1 - busy)^2 services
    (heavy traffic, constant service), as many leave as came.
    """
    busy = min(1.0, busy)
    x = 2 * stay * (1 - busy) ** 2
    return max(0.02, 1 - busy**2 * (-math.expm1(-x) / x if x > 1e-9 else 1.0))


def _undisturbed(
    steps: Steps, n: int, bound: float, rate: float, budget: int, beside: float, prompt: float, step: float
) -> float:
    """Share of requests of which no step takes longer than `bound`, where a step full of prompts would.

    Newcomers go to the engine that has least to do. Where one prompt is too much for a step, whoever is on that engine
    is late: of N requests inside, Poisson by Little's law, floor(N / n). Where `fit` prompts are in time, those who
    come during a step are too many from the (n fit + 1)st on, each for one engine of n.
    """
    outputs = steps.workload.output_tokens - 1
    if steps.decode(max(1.0, beside)) > bound:
        return 0.0
    if fit := steps.prompts_within(budget, beside + math.sqrt(beside), bound):  # beside as many as there often are
        late = outputs * _at_least(rate * step, n * fit + 1, 1) / n
    else:
        late = _at_least(rate * (prompt + outputs * step), n, n)
    return math.exp(-late)


def _at_least(mean: float, first: int, every: int) -> float:
    """P(N >= i) of a Poisson N, summed over i = first, first + every, ...: how many such places N fills on average."""
    most = math.ceil(mean + 12 * math.sqrt(mean) + 20)
    chance = [math.exp(i * math.log(mean) - mean - math.lgamma(i + 1)) for i in range(first, first + most)]
    return sum(p * (1 + k // every) for k, p in enumerate(chance))


def moving(steps: Steps, wire: Wire, budget: int) -> Migration:
    """The handoff of one prompt, hidden behind its prefill where the link overlaps."""
    key, m = (wire, budget), steps.workload.prompt_tokens
    if key not in steps.moves:
        hidden = steps.until(budget, steps.engine.moved(m))
        steps.moves[key] = migration(steps.engine, m, wire, prefill_s=hidden, budget=budget)
    return steps.moves[key]


def _forecast(
    slo: SLO, w: Workload, rate: float, terms: dict[str, float], limits: dict[str, float], servers: int, seats: int,
    step: float, tpot_ok: float, running: float,
) -> Forecast:  # fmt: skip
    base = sum(seconds for name, seconds in terms.items() if name not in ("queue", "room"))
    entry, room = min(limits["prefill"], limits.get("link", math.inf)), limits["kv"]
    bounds = [
        b
        for b in (slo.ttft_s, None if slo.e2e_s is None else slo.e2e_s - (w.output_tokens - 1) * step)
        if b is not None
    ]
    ok = 1.0
    if bounds:
        slack = min(bounds) - base
        late = _late(rate, entry, servers, slack) + _late(rate, room, seats, slack)
        ok = 0.0 if slack < 0 else max(0.0, 1 - late)
    elif rate >= min(entry, room):
        ok = 0.0
    return Forecast(rate, ok, tpot_ok, sum(terms.values()), step, running, terms, limits)


def _late(rate: float, limit: float, servers: int, slack: float) -> float:
    """P(wait > slack)."""
    if limit == math.inf:
        return 0.0
    if rate >= limit:
        return 1.0
    return (rate / limit) ** (math.sqrt(2 * (servers + 1)) - 1) * math.exp(-2 * (limit - rate) * max(0.0, slack))


def _below(mean: float, deviation: float, bound: float) -> float:
    return float(mean <= bound) if deviation <= 0 else NORMAL.cdf((bound - mean) / deviation)


def goodput(at: Callable[[float], Forecast]) -> Forecast:
    """The highest rate at which ATTAINMENT of the requests meet all bounds, and what is expected there.

    At rate 0 nobody is in anybody's way: where even that fails, the forecast's rate is 0.
    """
    alone = at(1e-9)
    if alone.attained < ATTAINMENT:
        return replace(alone, rate=0.0)
    low, high = 0.0, min(alone.limits.values())
    best = alone
    if high == math.inf:
        raise MinillmError("a pool without any limit has no goodput to look for")
    for _ in range(16):
        middle = (low + high) / 2
        found = at(middle)
        if found.attained >= ATTAINMENT:
            low, best = middle, found
        else:
            high = middle
    return best
