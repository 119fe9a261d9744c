"""Random schedules for a learner's prefix cache or eviction policy: an engine over shadow slots. Exercise 11.

Every slot holds the prefix that it stands for (`minillm.shadow`), so a block that is served to the wrong request, or
lost, is noticed in the step in which it happens, and said in words.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minillm.cache.paged import PagedCache
from minillm.core import EngineCore
from minillm.course.candidate import NotAttempted, OverTimeError
from minillm.errors import MinillmError
from minillm.events import EventLog
from minillm.policy import FirstCome
from minillm.request import Request, SamplingParams
from minillm.scheduler import Limits, Scheduler
from minillm.shadow import ShadowPool, ShadowRunner


class _Tokens(list):  # type: ignore[type-arg]
    """The drawn tokens stand for the logits."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), 50


class _Runner:
    def __init__(self, shadow: ShadowRunner):
        self.shadow = shadow

    def forward(self, requests: Sequence[Request], num_new: Sequence[int] | None = None) -> Any:
        return _Tokens(self.shadow.forward(requests, num_new))

    def finish(self, request: Request) -> None:
        self.shadow.finish(request)


class _Sampler:
    def sample(self, logits: Any, requests: Sequence[Request]) -> tuple[list[int], list[None]]:
        return list(logits), [None] * len(logits)


class _Output:
    def __init__(self, request: Request):
        self.request = request

    def push(self, token: int) -> str:
        self.request.output_token_ids.append(token)
        if len(self.request.output_token_ids) == self.request.max_tokens:
            self.request.finish_reason = "length"
        return ""

    def finish(self) -> str:
        return ""


class ShadowEngine(EngineCore):
    """A whole engine without a model. make_prefix(block_size, floors) makes its prefix cache; None: it has none."""

    def __init__(
        self, make_prefix: Callable[[int, Mapping[str, int]], Any] | None, blocks: int = 16, block_size: int = 4,
        floors: Mapping[str, int] | None = None, limits: Limits | None = None, public: Any = None,
    ):  # fmt: skip
        pool, events = ShadowPool(blocks, block_size), EventLog()
        self.shadow = ShadowRunner(pool)
        prefix = make_prefix(block_size, floors or {}) if make_prefix else None
        self.kv = PagedCache(pool, prefix=prefix, namespace="shadow", public=public, events=events)
        limits = limits or Limits(max_num_seqs=4, max_num_batched_tokens=16)
        scheduler = Scheduler(self.kv, FirstCome(), limits, events)
        runner: Any = _Runner(self.shadow)
        make_output: Any = _Output
        super().__init__(scheduler, runner, _Sampler(), make_output, self.kv, events)
        self.made = 0

    def request(self, prompt: Sequence[int], new_tokens: int = 4, tenant: str = "") -> Request:
        self.made += 1
        return Request(
            str(self.made), list(prompt), SamplingParams(max_tokens=new_tokens), 0, max_tokens=new_tokens,
            times={"arrival": float(self.made)}, tenant=tenant,
        )  # fmt: skip

    def run(self, *requests: Request, limit: int = 10_000) -> None:
        for r in requests:
            self.add(r)
        for _ in range(limit):
            if not self.has_work:
                return
            self.step()
        raise MinillmError(f"{len(self.outputs)} requests did not end in {limit} steps")


def random_schedule(
    make_prefix: Callable[[int, Mapping[str, int]], Any], seed: int, steps: int = 60, law: bool = True
) -> str:
    """What went wrong in a random schedule, "" if nothing did. law: check after every step that no block is lost."""
    rng = random.Random(seed)
    floors = rng.choice(({}, {}, {"ann": 2}))
    limits = Limits(rng.randint(1, 4), rng.choice((2, 5, 16)))
    core = ShadowEngine(make_prefix, rng.randint(6, 12), 2, floors, limits)
    alive: list[Request] = []
    try:
        for _ in range(steps):
            if rng.random() < 0.35:
                tenant = rng.choice(("ann", "bob"))
                room = core.kv.capacity(tenant) * core.kv.pool.block_size
                prompt = [rng.randrange(2) for _ in range(rng.randint(1, min(9, room)))]
                r = core.request(prompt, rng.randint(1, min(5, room - len(prompt) + 1)), tenant)
                core.add(r)
                alive.append(r)
            if alive and rng.random() < 0.08:
                core.abort(rng.choice(alive))
            core.step()
            _not_attempted(core)
            if law:
                core.kv.check()
        core.run()
        _not_attempted(core)
        core.kv.check()
    except MinillmError as error:
        return str(error)
    for r in alive:
        if r.finish_reason not in ("length", "abort"):
            return str(r.stop_reason)
        if r.finish_reason == "length" and r.output_token_ids != core.shadow.expected(r.prompt_token_ids, r.max_tokens):
            return f"request {r.request_id} wrote other tokens than it would have written alone"
    if core.kv.num_live:
        return f"{core.kv.num_live} blocks are still held at the end"
    return ""


def _not_attempted(core: EngineCore) -> None:
    """A stub, or an answer that never returns, is not a fault of the engine: the grader wants to know."""
    for error in core.failures.values():
        if isinstance(error, NotAttempted | OverTimeError):
            raise error
