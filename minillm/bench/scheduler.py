"""What scheduling costs the host in a step: `schedule()`, and moving the counters. Lesson 09.

Not in it: building the batch and the plan of the attention, sampling and text, which `bench single` accounts for.

No model runs. 256 requests decode, others wait; in every step one request ends, one is admitted and one arrives, so all
queues move and their lengths stay. A step's cost must not depend on how many wait: measured with 10, 1,000 and 100,000,
step by step in turn.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

from minillm.bench.common import Options, ceilings, ceilings_after, progress, recorder
from minillm.cache.paged import PagedCache
from minillm.cache.prefix import RadixPrefixCache
from minillm.policy import FirstCome
from minillm.request import Request, SamplingParams
from minillm.roofline.evidence import seconds
from minillm.scheduler import Limits, Scheduler
from minillm.shadow import ShadowPool

RUNNING = 256
WAITING = (10, 1_000, 100_000)
PROMPT, NEW = 64, 512  # tokens of a request; it ends when the bench says so
BUDGET = RUNNING + PROMPT  # tokens a step: every decode, and one prompt
GOAL = 1e-3  # seconds a step


class Load:
    """A scheduler with `RUNNING` requests under way and so many waiting. `step` is one step of the host's work."""

    def __init__(self, waiting: int, prefix: bool = False):
        blocks = (RUNNING + 1) * -(-(PROMPT + NEW) // 16)
        cache = RadixPrefixCache(16) if prefix else None
        self.cache = PagedCache(ShadowPool(blocks, 16), prefix=cache, namespace="bench")
        self.scheduler = Scheduler(self.cache, FirstCome(), Limits(RUNNING, BUDGET))
        self.numbers = itertools.count()
        self.params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
        for _ in range(RUNNING + waiting - 1):  # and one comes at the end of each step
            self.arrive()
        self.scheduled = 0
        while len(self.scheduler.running) < RUNNING or any(r.num_new_tokens > 1 for r in self.scheduler.running):
            self.work()

    def arrive(self) -> None:
        n = next(self.numbers)
        tokens = [n & 1023, n >> 10, *range(2, PROMPT)]
        self.scheduler.add(Request(str(n), tokens, self.params, seed=0, max_tokens=NEW, times={"arrival": float(n)}))

    def work(self) -> float:
        """Schedule a step, and afterwards move every request on. Returns the seconds of `schedule` alone."""
        start = time.perf_counter()
        rows = self.scheduler.schedule().rows
        spent = time.perf_counter() - start
        for r, n in rows:
            r.num_computed_tokens += n
            self.cache.commit(r)
            if not r.num_new_tokens:
                r.output_token_ids.append(7)
        self.scheduled = len(rows)
        return spent

    def step(self) -> tuple[float, float]:
        """Seconds of `schedule` alone and of the whole: with the counters, one request that ends and one that comes."""
        start = time.perf_counter()
        spent = self.work()
        self.scheduler.finish(max(self.scheduler.running, key=lambda r: r.num_tokens))
        self.arrive()
        return spent, time.perf_counter() - start


def run(options: Options) -> dict[str, Any]:
    """Measure, check, record. Nothing is predicted: no roofline speaks of Python."""
    repeats = options.repeats or 200
    device = ceilings(options)
    book = recorder(
        options, device, running=RUNNING, waiting=list(WAITING), prompt=PROMPT, budget=BUDGET, repeats=repeats,
        policy="fcfs", goal_s=GOAL, step="one request ends, one is admitted, one arrives",
    )  # fmt: skip
    book.seal()
    loads = {f"{RUNNING}x{n}": Load(n) for n in WAITING} | {f"{RUNNING}x{WAITING[1]}.prefix": Load(WAITING[1], True)}
    samples: dict[str, list[float]] = {f"{part}.{key}": [] for key in loads for part in ("schedule", "step")}
    full = True
    for i in progress(range(-10, repeats), "scheduler"):
        for key in list(loads)[:: 1 if i % 2 else -1]:
            schedule, step = loads[key].step()
            full &= loads[key].scheduled == RUNNING
            if i >= 0:
                samples[f"schedule.{key}"].append(schedule)
                samples[f"step.{key}"].append(step)
    for key, values in samples.items():
        book.measured(key, values)
    first, last = f"step.{RUNNING}x{WAITING[0]}", f"step.{RUNNING}x{WAITING[-1]}"
    book.derive("waiting_ratio", "ratio", [last, first])
    for load in loads.values():
        load.cache.check()
    book.check(f"every step gave {RUNNING} requests their tokens", full, f"{len(loads)} loads, {repeats} steps each")
    waits = [load.scheduler.num_waiting for load in loads.values()]
    book.check("as many wait at the end as at first", waits == [*WAITING, WAITING[1]], f"{waits}")
    return book.finish(ceilings_after(options))


def show(record: dict[str, Any]) -> str:
    """The record as text."""
    setup, lines = record["setup"], []
    for key, e in record["results"].items():
        lines.append(f"  {key:<28}{seconds(e['median']):>10} (p10 {seconds(e['p10'])}, p90 {seconds(e['p90'])})")
    ratio = record["derived"]["waiting_ratio"]
    lines.append(
        f"  with {setup['waiting'][-1]} waiting a step takes {ratio['median']:.2f} times as long as with "
        f"{setup['waiting'][0]} (p10 {ratio['p10']:.2f}, p90 {ratio['p90']:.2f}); goal {seconds(setup['goal_s'])}"
    )
    lines += [f"  check  {'ok  ' if c['passed'] else 'FAIL'}  {c['name']}: {c['detail']}" for c in record["checks"]]
    return f"{setup['running']} requests decode, host time of a step\n" + "\n".join(lines)
