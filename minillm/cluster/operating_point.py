"""One replica under load: from its predicted steps to rate, TTFT and TPOT. Lesson 14.

While r requests decode, a step takes D(r) seconds, and a prompt that is computed beside them adds x(r) to the steps it
shares. Requests come at the rate l, so of each second l x goes to prompts, and a step lasts D / (1 - l x). The decodes
there are by Little's law are r = l (n - 1) D / (1 - l x), since a request decodes n - 1 tokens. Solved for the rate,

    l(r) = r / ((n - 1) D(r) + r x(r)),

which grows with r up to `Replica.peak`: every load below it is one r. These are means; `cluster/goodput.py` says what
share of requests is within bounds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.roofline.capacity import waiting
from minillm.roofline.comm import Link
from minillm.roofline.device import Device
from minillm.roofline.parallel import NOWHERE, RankMemory, Step, predict_parallel, rank_memory
from minillm.trace.latency import SLO

TERMS = ("compute", "all_reduce", "all_gather", "send", "idle")  # of a Step
MOST = 65536  # of sequences, and of tokens, in a step: a larger number is a mistake


@dataclass(frozen=True)
class Demand:
    """Requests of one shape: tokens in, tokens out, and how many there are. One of the two, over all replicas:

    concurrency  closed loop: so many requests are there at any time, each user waits for an answer before the next
    rate         open loop: so many requests a second come, at random (Poisson)
    """

    prompt_tokens: int
    output_tokens: int
    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        whole = {"prompt_tokens": 1, "output_tokens": 2} | ({} if self.concurrency is None else {"concurrency": 1})
        for name, least in whole.items():
            v = getattr(self, name)
            if isinstance(v, bool) or not isinstance(v, int) or not least <= v <= 10**9:
                raise MinillmError(f"{name} is a whole number from {least} to 10^9, got {v!r:.80}")
        if (self.concurrency is None) == (self.rate is None):
            raise MinillmError(
                "a demand has a concurrency (so many users) or a rate (requests a second): give one of them"
            )
        if self.rate is not None and (isinstance(self.rate, bool) or not 0 < self.rate < math.inf):
            raise MinillmError(f"rate is a number of requests a second above 0, got {self.rate!r:.80}")


@dataclass(frozen=True)
class Point:
    """A replica at one load. Seconds, means; itl_s is the longest gap: a step that also computes a full chunk.

    rate     requests/s;  decoding: requests that decode at a time;  inside: those and the ones whose prompt is computed
    waiting  requests beyond `inside` that wait for a seat
    """

    rate: float
    ttft_s: float
    tpot_s: float
    itl_s: float
    e2e_s: float
    decoding: float
    inside: float
    waiting: float = 0.0

    def over(self, slo: SLO) -> dict[str, tuple[float, float]]:
        """(value, bound) of each bound that is not kept."""
        found = {n: (getattr(self, n), getattr(slo, n)) for n in ("ttft_s", "tpot_s", "itl_s", "e2e_s")}
        return {n: (v, b) for n, (v, b) in found.items() if b is not None and v > b}


class _Prompt(NamedTuple):
    """Seconds, each with its TERMS: `own` of the steps in which it is computed, `added` to them; of the longest."""

    own: dict[str, float]
    added: dict[str, float]
    longest: float


@lru_cache(512)
def _steps(key: str) -> dict[int, Step]:
    """Steps that are known by batch size: plans of other loads and chunks ask for the same ones."""
    return {}


@lru_cache(4096)
def _prompts(key: str, budget: int) -> dict[int, _Prompt]:
    return {}


class Replica:
    """tp * pp devices that serve one copy of the model, by prediction.

    budget, max_num_seqs: as in EngineConfig. A step of decodes is a CUDA graph where one device computes it: an engine
    with ranks has none. Raises MinillmError when the model cannot be cut like this.
    """

    def __init__(
        self, config: ModelConfig, device: Device, demand: Demand, dtype: str = "bfloat16", *, tp: int = 1, pp: int = 1,
        tp_link: Link = NOWHERE, pp_link: Link = NOWHERE, budget: int = 8192, max_num_seqs: int = 256,
    ):  # fmt: skip
        for name, v in (("max_num_batched_tokens", budget), ("max_num_seqs", max_num_seqs)):
            if isinstance(v, bool) or not isinstance(v, int) or not 1 <= v <= MOST:
                raise MinillmError(f"{name} is a whole number from 1 to {MOST}, got {v!r:.80}")
        self.config, self.device, self.demand, self.dtype, self.budget = config, device, demand, dtype, budget
        self.how: dict[str, Any] = {"tp": tp, "pp": pp, "tp_link": tp_link, "pp_link": pp_link}
        self.captured = tp * pp == 1 and device.kind == "cuda"
        self.memory: RankMemory = rank_memory(config, device, dtype, tp=tp, pp=pp)
        m, n = demand.prompt_tokens, demand.output_tokens
        room = self.memory.kv_tokens // (m + n) if self.memory.fits else 0
        self.seats = min(max_num_seqs, room, max(1, budget))  # a step computes a token of each
        self.context = m + n // 2  # of a decode, on average
        key = repr((config, device, dtype, m, n, self.how))
        self._steps: dict[int, Step] = _steps(key)
        self._prompts: dict[int, _Prompt] = _prompts(key, budget)
        self._grid = sorted({min(self.seats, round(2 ** (i / 2))) for i in range(2 * self.seats.bit_length() + 2)})

    def step(self, r: int) -> Step:
        """A step of r decodes, term by term."""
        if r not in self._steps:
            rows = [(1, self.context)] * r
            self._steps[r] = self._predict(rows, captured=self.captured)
        return self._steps[r]

    def _predict(self, rows: list[tuple[int, int]], captured: bool = False) -> Step:
        return predict_parallel(self.config, rows, self.device, self.dtype, captured=captured, **self.how)

    def _prompt(self, r: int) -> _Prompt:
        """A prompt beside r decodes.

        It is computed in chunks of what the budget leaves; the last chunk sees most context, and is the longest. As
        many prompts come as requests end, r / (n - 1) a step: above one, several share the room that a step's bytes
        leave to arithmetic, and each adds its part.
        """
        if r not in self._prompts:
            m, room = self.demand.prompt_tokens, max(1, self.budget - r)
            chunk, beside = min(m, room), [(1, self.context)] * r
            together = min(max(1, round(r / (self.demand.output_tokens - 1))), max(1, room // m))
            ends = [self._predict([*beside, *[(chunk, a)] * together]) for a in sorted({0, m - chunk})]
            chunks, alone = m / chunk, self.step(r) if r else None
            own = {n: chunks * sum(getattr(s, n) for s in ends) / len(ends) for n in ("expected", *TERMS)}
            added = {n: (v - chunks * getattr(alone, n) if alone else v) / together for n, v in own.items()}
            if added["expected"] < 0:
                added = dict.fromkeys(added, 0.0)
            self._prompts[r] = _Prompt(own, added, ends[-1].expected)
        return self._prompts[r]

    def _between(self, r: float, f: Callable[[int], float]) -> float:
        """f at a number of requests that is none: a straight line between two of the grid."""
        if r <= 0 or not self._grid:
            return f(0)
        i = bisect_left(self._grid, r)
        if i == len(self._grid) or self._grid[i] == r:
            return f(self._grid[min(i, len(self._grid) - 1)])
        low, high = ([0, *self._grid][i], self._grid[i])
        return f(low) + (f(high) - f(low)) * (r - low) / (high - low)

    def decode_s(self, r: float) -> float:
        """D(r); below one request it is that of one."""
        return self._between(max(1.0, r), lambda n: self.step(max(1, n)).expected)

    def prompt_s(self, r: float) -> float:
        """Seconds of the steps in which a prompt is computed beside r decodes."""
        return self._between(r, lambda n: self._prompt(n).own["expected"])

    def added_s(self, r: float) -> float:
        """x(r): what a prompt adds to the steps it shares. Beside nobody: all of them."""
        return self._between(r, lambda n: self._prompt(n).added["expected"])

    def at(self, r: float) -> Point:
        """The load at which r requests decode at a time."""
        n = self.demand.output_tokens
        base, x = self.decode_s(r), self.added_s(r)
        rate = r / ((n - 1) * base + r * x)
        step = base / (1 - rate * x)
        own = self.prompt_s(r)
        # Prompts are computed one after the other (Pollaczek and Khinchine), from the end of the step under way.
        ahead = rate * x * x / (2 * (1 - rate * x)) if rate * x < 1 else math.inf
        ttft = own + ahead + min(1.0, r) * step / 2
        longest = self._between(r, lambda k: self._prompt(k).longest)
        return Point(rate, ttft, step, max(step, longest), ttft + (n - 1) * step, r, r + rate * ttft)

    # Where the time goes: weights (what a step of one costs: reading them, and calls), decodes (what more of them add),
    # prompts (their operators), messages, idle (stages that wait for each other).

    def _decode_terms(self, r: float) -> dict[str, float]:
        step = {n: self._between(max(1.0, r), lambda k, n=n: getattr(self.step(max(1, k)), n)) for n in TERMS}  # type: ignore[misc]
        once = self.step(1).compute
        return {"weights": once, "decodes": step["compute"] - once} | _said(step)

    def spent(self, at: Point) -> dict[str, float]:
        """Seconds of this replica for each token that it writes, 1 / (rate * tokens of an answer), term by term."""
        r, n = at.decoding, self.demand.output_tokens
        found = {k: v * (n - 1) / (n * r) for k, v in self._decode_terms(r).items()}
        added = {k: self._between(r, lambda b, k=k: self._prompt(b).added[k]) / n for k in TERMS}  # type: ignore[misc]
        for k, v in ({"prompts": added["compute"]} | _said(added)).items():
            found[k] = found.get(k, 0.0) + v
        return found

    def token(self, at: Point) -> dict[str, float]:
        """The TPOT, term by term: a decode step, and the prompts that other steps hold."""
        found = self._decode_terms(at.decoding)
        return found | {"prompts": at.tpot_s - sum(found.values())}

    def first(self, at: Point) -> dict[str, float]:
        """The TTFT, term by term: the steps in which the prompt is computed, and what is before them (queue)."""
        own = {k: self._between(at.decoding, lambda b, k=k: self._prompt(b).own[k]) for k in TERMS}  # type: ignore[misc]
        found = {"prompts": own["compute"]} | _said(own)
        return found | {"queue": at.ttft_s - sum(found.values())}

    def _largest(self, good: Callable[[Point], bool]) -> Point | None:
        """The greatest load that is good, where all below a good one are good; None: not even the least."""
        low, high, found = 0.0, float(self.seats), None
        least = self.at(1e-9)
        if not self.seats or not good(least):
            return None
        for _ in range(36):
            middle = (low + high) / 2
            at = self.at(middle)
            if good(at):
                low, found = middle, at
            else:
                high = middle
        return found or least

    @cached_property
    def full(self) -> Point | None:
        """All seats, or all of the budget, are taken. None: no room for one."""
        each = 1 + self.demand.prompt_tokens / (self.demand.output_tokens - 1)  # tokens a step for each that decodes
        return self._largest(lambda at: at.inside <= self.seats and at.decoding * each <= self.budget)

    @cached_property
    def peak(self) -> Point | None:
        """The load of the greatest rate: `full`, but where prompts cost more the more decodes are beside them."""
        if self.full is None:
            return None
        grid = [r for r in self._grid if r < self.full.decoding] + [self.full.decoding]
        i = max(range(len(grid)), key=lambda k: self.at(grid[k]).rate)
        if i == len(grid) - 1:
            return self.full
        low, high = grid[max(0, i - 1)], grid[i + 1]
        for _ in range(36):
            a, b = low + (high - low) / 3, high - (high - low) / 3
            low, high = (a, high) if self.at(a).rate < self.at(b).rate else (low, b)
        return self.at((low + high) / 2)

    def within(self, slo: SLO) -> Point | None:
        """The highest load at which the means keep the SLO; None where even one request alone does not."""
        top = self.full if self.demand.rate is None else self.peak
        return top and self._largest(lambda at: at.decoding <= top.decoding and not self._queued(at, top).over(slo))

    def users(self, slo: SLO) -> int:
        """The most users within the SLO. Beyond the seats they wait as long as a bound, if any, allows."""
        at, top = self.within(slo), self.full
        if at is None or top is None:
            return 0
        slack = [b - v for v, b in ((at.ttft_s, slo.ttft_s), (at.e2e_s, slo.e2e_s)) if b is not None]
        wait = min(slack, default=0.0) if at.decoding >= (1 - 1e-6) * top.decoding else 0.0
        return int(at.inside + wait * top.rate + 1e-6)

    def _queued(self, at: Point, top: Point) -> Point:
        """With the wait for a seat, where requests come at random."""
        if self.demand.rate is None:
            return at
        return _later(at, waiting(at.rate, top.rate, self.seats), 0.0)

    def closed(self, users: int) -> Point | None:
        """So many users, each with one request at a time; those beyond the seats wait. None: no room for one."""
        top = self.full
        if top is None or users <= top.inside:
            return top and (self._largest(lambda at: at.inside <= users) or self.at(1e-9))
        return _later(top, (users - top.inside) / top.rate, users - top.inside)

    def open(self, rate: float) -> Point | None:
        """So many requests a second. More than it can serve: TTFT has no end (inf). None: no room for one."""
        top = self.peak
        if top is None or rate >= top.rate:
            return top and _later(top, math.inf, math.inf)
        at = self._largest(lambda at: at.decoding <= top.decoding and at.rate <= rate) or self.at(1e-9)
        return self._queued(at, top)


def _said(terms: dict[str, float]) -> dict[str, float]:
    return {"messages": terms["all_reduce"] + terms["all_gather"] + terms["send"], "idle": terms["idle"]}


def _later(at: Point, wait: float, others: float) -> Point:
    return replace(at, ttft_s=at.ttft_s + wait, e2e_s=at.e2e_s + wait, waiting=others)
