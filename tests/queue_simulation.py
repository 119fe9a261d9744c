"""The real scheduler over shadows and a virtual clock: what waits are predicted, and what happens. Not a test file."""

from __future__ import annotations

import random
from dataclasses import dataclass

from minillm.cache.paged import PagedCache
from minillm.cache.prefix_hash import HashPrefixCache
from minillm.events import EventLog
from minillm.policy import Priority
from minillm.roofline.capacity import StepModel
from minillm.scheduler import Limits
from minillm.server.admission import predicted_wait
from minillm.server.meter import LoadMeter
from minillm.shadow import ShadowCore

COSTS = StepModel(w=0.020, a=0.001, d=0.002)  # what the simulated machine needs


@dataclass
class Probe:
    """A request whose wait was predicted when it arrived. told, waited: seconds; told is None if nothing was known."""

    told: float | None
    waited: float
    waiting: int
    running: int


class Simulation:
    """places, budget: the limits of a step. real: the share of max_tokens that is generated before a stop.

    prefix: tokens that all prompts begin with, which a prefix cache keeps.
    """

    def __init__(
        self, places=8, budget=64, blocks=4000, real=1.0, by_priority=False, predict=predicted_wait, seed=0, prefix=0
    ):
        self.now, self.random, self.predict = 0.0, random.Random(seed), predict
        policy = Priority(ageing_s=1e6) if by_priority else None
        events = EventLog(0, clock=lambda: self.now)
        self.prefix = list(range(prefix))
        cached = lambda pool, events: PagedCache(pool, prefix=HashPrefixCache(16), namespace="all", events=events)
        make_cache = cached if prefix else None
        self.core = ShadowCore(blocks, 16, policy, Limits(places, budget), make_cache, events)
        self.meter = LoadMeter(places, budget, by_priority=by_priority)
        events.subscribe(self.meter.observe)
        self.probes: list[tuple] = []
        inner, simulation = self.core.runner, self

        class Runner:
            """A step takes as long as its tokens say."""

            def forward(self, requests, counts):
                prefill = sum(n for r, n in zip(requests, counts) if r.num_computed_tokens + n <= r.num_prompt_tokens)
                simulation.now += COSTS.seconds(prefill, sum(counts) - prefill)
                return inner.forward(requests, counts)

            def finish(self, request):
                inner.finish(request)

        self.core.runner = Runner()
        make = self.core.make_output

        def stopping(request):
            output, at = make(request), max(1, round(request.max_tokens * real * self.random.uniform(0.7, 1.3)))
            push = output.push

            def stop(token):
                push(token)
                if real < 1 and len(request.output_token_ids) >= at and not request.finished:
                    request.finish_reason = "stop"
                return ""

            output.push = stop
            return output

        self.core.make_output = stopping

    def send(self, prompt, new, priority=0):
        """A request arrives now; what is predicted for it is kept."""
        queue = self.meter.queue(priority)
        told = self.predict(queue, 1, new)
        tokens = self.prefix + [self.random.randrange(50) for _ in range(prompt)]
        request = self.core.request(tokens, new, arrival=self.now, priority=priority)
        self.meter.reserve(request.request_id, len(tokens), new, priority=priority)
        self.core.add(request)
        self.probes.append((request, told, queue, self.now))
        return request

    def run(self, until=float("inf")):
        while self.core.has_work and self.now < until:
            self.core.step()
        self.now = max(self.now, until) if until != float("inf") else self.now

    def results(self):
        return [
            Probe(told, r.times["scheduled"] - at, queue.waiting, queue.running)
            for r, told, queue, at in self.probes if "scheduled" in r.times
        ]  # fmt: skip
