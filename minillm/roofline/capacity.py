"""What a request costs and how many a machine can take: C = a m + b n, and the curve that follows. Lesson 13.

m prompt tokens, n output tokens, C in seconds of the machine: while it works on one request it could have worked on
another. A machine gives one second a second, so requests can come at 1 / mean C a second and no faster: the knee of its
saturation curve. Without prompts this is the familiar QPS <= R / n, R in tokens a second.

a and b can only be told apart by requests whose m and n vary on their own. And b is no constant. A step costs

    w + a p + d r        seconds, with p prompt tokens and r requests that decode in it

w (reading the weights) is paid once a step, so an output token costs b = w / r + d: dear alone, cheap in a full batch.
A fit of single requests gives b at r = 1 and promises too little; the limit of a machine is b at its full batch. Steps
of different sizes tell w from d (`fit_steps`), and then b is known at every batch (`StepModel.cost`).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from minillm.errors import MinillmError
from minillm.events import Event, work
from minillm.roofline.little import Little, little

if TYPE_CHECKING:
    from minillm.trace.latency import SLO

__all__ = [
    "Cost", "Little", "Load", "StepModel", "fit", "fit_steps", "knee", "little", "measured_knee", "predict_load",
    "rate_limit", "rate_within", "steps_of", "waiting",
]  # fmt: skip

Sample = tuple[float, float, float]  # prompt tokens, output tokens (of a step: requests that decode), seconds
APART = 0.1  # least singular value over the greatest, of scaled columns, below which they cannot be told apart


class _Costs:
    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]
            v = getattr(self, f.name)
            if isinstance(v, bool) or not isinstance(v, int | float) or not 0 <= v < math.inf:
                raise MinillmError(f"{f.name} is a finite number of seconds, at least 0, got {v!r:.80}")


@dataclass(frozen=True)
class Cost(_Costs):
    """Seconds of the machine: a for a prompt token, b for an output token, at one batch size."""

    a: float
    b: float

    def seconds(self, m: float, n: float) -> float:
        return self.a * m + self.b * n

    def errors(self, samples: Iterable[Sample]) -> list[float]:
        """|predicted - measured| / measured of each sample."""
        return [abs(self.seconds(m, n) - s) / s for m, n, s in samples]


@dataclass(frozen=True)
class StepModel(_Costs):
    """Seconds of a step: w for the step itself, a for a prompt token, d for a request that decodes in it."""

    w: float
    a: float
    d: float

    def seconds(self, p: float, r: float, steps: float = 1.0) -> float:
        """Of a step, or of several: p and r then count over all of them."""
        return self.w * steps + self.a * p + self.d * r

    def errors(self, steps: Iterable[Sample]) -> list[float]:
        return [abs(self.seconds(p, r) - s) / s for p, r, s in steps]

    def cost(self, batch: float) -> Cost:
        """What a request costs when `batch` requests decode together: 1 is a request alone."""
        if not batch >= 1:
            raise MinillmError(f"a batch has at least 1 request, got {batch!r:.80}")
        return Cost(self.a, self.w / batch + self.d)


def fit(samples: Sequence[Sample]) -> Cost:
    """a and b by non-negative least squares of the relative error. It holds for the load at which it was measured.

    A sample is one request that ran alone, with its end-to-end seconds; or a whole run of a full machine, with the sums
    of its prompts, its outputs, and its seconds. Raises MinillmError where a and b cannot be told apart.
    """
    a, b = _least_squares([(m, n) for m, n, _ in samples], [s for *_, s in samples], (
        "prompts and outputs must vary on their own: requests of one shape, or all with m proportional to n, show only "
        "the sum of the two costs"
    ))  # fmt: skip
    return Cost(a, b)


def fit_steps(steps: Sequence[Sample]) -> StepModel:
    """w, a and d by non-negative least squares of the relative error. Raises MinillmError where they look alike."""
    w, a, d = _least_squares([(1.0, p, r) for p, r, _ in steps], [s for *_, s in steps], (
        "steps must vary in prompt tokens and in batch size: at one batch size the weights and the rows cost the same"
    ))  # fmt: skip
    return StepModel(w, a, d)


def _least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float], alike: str) -> list[float]:
    """Non-negative least squares, all choices of columns tried: there are two or three."""
    columns = len(rows[0]) if rows else 1
    if len(rows) < columns or min(seconds) <= 0 or any(min(r) < 0 or not any(r) for r in rows):
        raise MinillmError(f"a fit needs at least {columns} samples with tokens and with seconds above 0")
    raw = np.array(rows, dtype=float)
    scaled = raw / np.maximum(np.linalg.norm(raw, axis=0), 1e-300)
    singular = np.linalg.svd(scaled, compute_uv=False)
    if singular[-1] < APART * singular[0]:
        raise MinillmError(alike)
    x = raw / np.array(seconds)[:, None]
    best, least = np.zeros(columns), math.inf
    for used in itertools.product((False, True), repeat=columns):
        found, mask = np.zeros(columns), list(used)
        if any(used):
            found[mask] = np.linalg.lstsq(x[:, mask], np.ones(len(x)), rcond=None)[0]
        error = float(((x @ found - 1) ** 2).sum())
        if found.min() >= 0 and error < least:
            best, least = found, error
    return best.tolist()


def steps_of(events: Iterable[Event]) -> list[Sample]:
    """(prompt tokens, requests that decode, seconds) of every step of an event log that computed something."""
    return [(*work(e.data["rows"]), e.data["seconds"]) for e in events if e.kind == "step" and e.data["rows"]]


# How many, and how fast -------------------------------------------------------------------------------------------


def rate_limit(cost: Cost, lengths: Sequence[tuple[float, float]], machines: float = 1.0) -> float:
    """Requests a second that `machines` can take, for requests of these (m, n): QPS <= R / mean C."""
    if not lengths:
        raise MinillmError("a rate limit needs the lengths (m, n) of at least one request")
    mean = statistics.fmean(cost.seconds(m, n) for m, n in lengths)
    return machines / mean if mean > 0 else math.inf


def knee(model: StepModel, m: float, n: float, seats: int) -> float:
    """Requests a second at which all seats are taken: beyond it the queue grows without end. seats: max_num_seqs."""
    _shape(m, n, seats)
    return rate_limit(model.cost(seats), [(m, n)])


@dataclass(frozen=True)
class Load:
    """What to expect at an offered rate (requests/s): means, in seconds. Beyond the knee ttft_s has no bound (inf).

    running  requests that decode at a time;  served  requests that are finished, a second
    """

    rate: float
    ttft_s: float
    tpot_s: float
    running: float
    served: float


def predict_load(model: StepModel, rate: float, m: float, n: float, seats: int, cv: float = 0.0) -> Load:
    """The means at an offered rate, for Poisson arrivals of requests of m and n tokens. Before anything is measured.

    TPOT is the mean step T while one decodes. It holds r = rate n T others (Little's law), oneself, and the prompts
    that arrive meanwhile: T = w + d (r + 1) + a m rate T + own, so T = (w + d + own) / (1 - rate (a m + d n)). That is
    the work of one alone stretched by 1 / (1 - load), as in processor sharing (Kleinrock, Queueing Systems II, 1976).
    own: those that came during the step of one's own prompt, which is longer than others, have their prompts in the
    first step after it: a m rate (own step - T), over n tokens.

    TTFT is the rest of the step under way, the step of one's own prompt, and the wait for a seat (`waiting`). A long
    step is met more often than a short one: the rest is half of the steps' mean square over their mean, and those who
    come in the same step are as many as arrive in twice that (renewal theory, Feller 1971).

    Close to the knee the means are those of an endless run; a real one is shorter. Tails are not predicted. cv:
    deviation over mean of the times of service.
    """
    _shape(m, n, seats)
    if isinstance(rate, bool) or not 0 <= rate < math.inf:
        raise MinillmError(f"rate is a number of requests a second, at least 0, got {rate!r:.80}")
    limit, prompt = knee(model, m, n, seats), model.a * m
    if limit == math.inf:
        raise MinillmError("a machine whose steps take no time has no load to predict")
    full = seats / (limit * n)  # of a step in which all seats are taken
    if rate >= limit:
        return Load(rate, math.inf, full, seats, limit)
    stretch = 1 / (1 - min(rate * (prompt + model.d * n), 1 - 1e-12))
    step = min(full, (model.w + model.d) * stretch)
    for _ in range(100):  # `own` and the step need each other; half steps settle
        running = rate * n * step
        somebody = 1 - math.exp(-running)  # runs when one arrives, if their number is a Poisson count
        rest = somebody * (step + rate * prompt**2) / 2  # a step holds a Poisson number of prompts
        own = model.seconds(m * (1 + 2 * rate * rest), running)
        more = prompt * rate * max(0.0, own - step) / n
        step = (step + min(full, (model.w + model.d + more) * stretch)) / 2
    wait = waiting(rate, limit, seats, rate / limit * step / full, cv)
    return Load(rate, rest + own + wait, step, rate * n * step, rate)


def waiting(rate: float, limit: float, seats: int, occupied: float | None = None, cv: float = 0.0) -> float:
    """Mean seconds in the queue before a seat is free, of Poisson arrivals. limit: requests a second of a full machine.

    rho^(sqrt(2 (c + 1)) - 1) / (limit - rate) * (1 + cv^2) / 2 with c seats: Sakasegawa (1977), for M/G/c with the
    correction of Allen and Cunneen. rho is the share of seats that are taken: rate / limit, unless told otherwise,
    because a step with few requests is quicker. For one seat it is the formula of Pollaczek and Khinchine, exact.
    """
    if rate >= limit:
        return math.inf
    rho = rate / limit if occupied is None else occupied
    return rho ** (math.sqrt(2 * (seats + 1)) - 1) / (limit - rate) * (1 + cv**2) / 2


def rate_within(model: StepModel, slo: SLO, m: float, n: float, seats: int, cv: float = 0.0) -> float:
    """The highest rate at which the predicted means still meet the SLO; 0.0 where even an empty machine does not."""

    def good(rate: float) -> bool:
        at = predict_load(model, rate, m, n, seats, cv)
        pairs = ((at.ttft_s, slo.ttft_s), (at.tpot_s, slo.tpot_s), (at.ttft_s + (n - 1) * at.tpot_s, slo.e2e_s),
                 (at.tpot_s, slo.itl_s))  # fmt: skip
        return math.isfinite(at.ttft_s) and all(bound is None or value <= bound for value, bound in pairs)

    return _last(good, knee(model, m, n, seats)) if good(0.0) else 0.0


def _last(good: Callable[[float], bool], high: float) -> float:
    """The largest number up to `high` that is good, where all below a good one are good: by halving."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def _shape(m: float, n: float, seats: int) -> None:
    if not (0 <= m < math.inf and 1 <= n < math.inf and isinstance(seats, int) and seats >= 1):
        raise MinillmError(
            f"a load has m >= 0 prompt tokens, n >= 1 output tokens, seats >= 1; got {m}, {n}, {seats!r}"
        )


def measured_knee(offered: Sequence[float], served: Sequence[float]) -> float | None:
    """The rate K for which min(offered, K) is closest to what was served (least squares). None: not reached."""
    if len(offered) != len(served) or not offered:
        raise MinillmError(f"each offered rate needs a served one, got {len(offered)} and {len(served)}")
    pairs = sorted(zip(offered, served, strict=True), reverse=True)
    best, least = None, sum((x - y) ** 2 for x, y in pairs)  # no knee at all
    for i in range(1, len(pairs) + 1):  # the i highest rates are beyond the knee: then K is their mean
        k = statistics.fmean(y for _, y in pairs[:i])
        error = sum((min(x, k) - y) ** 2 for x, y in pairs)
        if error < least and k < pairs[0][0]:
            best, least = k, error
    return best
