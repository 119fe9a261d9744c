"""What more replicas serve of the same load, measured on a virtual clock. Lesson 14.

The planner takes dp replicas for dp times one. Here they are that many engines behind one queue: the scheduler, cache
and step loop that serve, in steps that take predicted seconds (paced.py). Arrivals, balance and batches decide how far
from dp times it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from minillm.cluster.migration import Engine
from minillm.cluster.paced import Colocated
from minillm.cluster.step_times import Workload
from minillm.errors import MinillmError
from minillm.trace.arrivals import poisson

REQUESTS = 400
SETTLED = (0.2, 0.9)  # shares of the answers between which a rate is taken: neither filling up nor draining


@dataclass(frozen=True)
class Served:
    """A run. rate: requests/s that ended, in the settled part; ratio: over the first run's.

    shares    of the requests, by replica;  busy: of the time until the last answer, by replica
    ttft_s, tpot_s   means over all requests, seconds
    """

    replicas: int
    rate: float
    ratio: float
    shares: tuple[float, ...]
    busy: tuple[float, ...]
    ttft_s: float
    tpot_s: float


def same_load(
    engine: Engine, workload: Workload, counts: Sequence[int] = (1, 2, 4, 8), budget: int = 512,
    requests: int = REQUESTS, seed: int = 0,
) -> list[Served]:  # fmt: skip
    """The same Poisson arrivals at `workload.rate` on each number of replicas, to the last answer.

    What counts is requests/s: give a rate above what most of them serve, and a run shows its capacity; below it all
    ratios come to 1, for nobody serves more than comes. Raises MinillmError without a rate, counts or requests.
    """
    if workload.rate is None:
        raise MinillmError("the same load for all: give the workload a rate")
    if not counts or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in counts):
        raise MinillmError(f"counts are whole numbers of replicas from 1, got {counts!r:.80}")
    if requests < 10:
        raise MinillmError(f"a rate needs at least 10 requests, got {requests}")
    found: list[Served] = []
    for n in counts:
        fleet = Colocated(engine, n, budget)
        run = fleet.run(poisson(requests, workload.rate, seed), workload.prompt_tokens, workload.output_tokens)
        ends = sorted(s.end for s in run.stamps)
        first, last = (int(share * (requests - 1)) for share in SETTLED)
        rate = (last - first) / (ends[last] - ends[first])
        found.append(Served(
            n, rate, rate / found[0].rate if found else 1.0,
            tuple(sum(e is at for at, _ in fleet.made) / requests for e in fleet.engines),
            tuple(e.busy_s / ends[-1] for e in fleet.engines),
            fmean(s.ttft or 0.0 for s in run.stamps), fmean(s.tpot or 0.0 for s in run.stamps),
        ))  # fmt: skip
    return found
