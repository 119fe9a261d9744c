"""Random schedules over a learner's scheduler, policy, allocator or prefix cache: the first fault, in words.

The model is a shadow (`minillm.shadow`): each KV slot holds the prefix that it stands for, so a block that two requests
write into, or that is freed before its reader is done, is noticed in the step in which it happens. Exercises 09 to 12
grade with it: `first_fault(range(20), scheduler=MyScheduler)` is "" for a part that does what it must.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from minillm.cache.blocks import BlockAllocator
from minillm.cache.paged import PagedCache
from minillm.cache.tiers import HostTier, Tiers
from minillm.course.candidate import NotAttempted, OverTimeError
from minillm.errors import MinillmError
from minillm.events import EventLog
from minillm.policy import FirstCome, Priority
from minillm.request import Request
from minillm.scheduler import Limits, Scheduler
from minillm.shadow import ShadowCore

MOST_ALIVE = 10  # requests, before new ones come
ALPHABET = 3  # different tokens in prompts: so few that prompts begin alike


@dataclass(frozen=True)
class Game:
    """What a random schedule may do, and what is looked at beside the shadow's own checks.

    roomy      memory for everybody at once: nobody has to be preempted, or to wait for a block
    whole      no token budget: a prompt is computed in one step
    aborts     requests are cancelled at any time
    ordered    `running` is in the order of the keys, and nobody joins before a waiting request with a smaller key
    full       in a roomy game: a place is never empty while somebody waits (what static batching gets wrong)
    """

    steps: int = 80
    roomy: bool = False
    whole: bool = False
    aborts: bool = True
    ordered: bool = True
    full: bool = True


class Fault(Exception):
    """What was expected, and what happened instead."""


def first_fault(
    seeds: Iterable[int], game: Game | None = None, *, scheduler: Callable[..., Any] = Scheduler,
    policy: Callable[[], Any] | None = None, allocator: Callable[[int], Any] = BlockAllocator,
    prefix: Callable[[int], Any] | None = None, tiers: bool = False,
) -> str:  # fmt: skip
    """Play a schedule for each seed. Returns "" or the first fault, with its seed and step.

    scheduler(cache, policy, limits, events), policy(), allocator(num_blocks), prefix(block_size): makers of parts; what
    is not given is the engine's own, the policy one of two at random. tiers: preempted blocks go to host memory.
    Raises NotAttempted and OverTimeError of a candidate as they are.
    """
    for seed in seeds:
        if fault := _Play(seed, game or Game(), scheduler, policy, allocator, prefix, tiers).fault():
            return fault
    return ""


class _Play:
    """One random schedule, to its end."""

    def __init__(
        self, seed: int, game: Game, scheduler: Callable[..., Any], policy: Callable[[], Any] | None,
        allocator: Callable[[int], Any], prefix: Callable[[int], Any] | None, tiers: bool,
    ):  # fmt: skip
        self.seed, self.game, self.rng = seed, game, random.Random(seed)
        rng = self.rng
        self.step = 0
        self.made: list[Request] = []
        self.keys: dict[Request, float] = {}  # a policy may live in a sandbox: each key is asked for once
        self.block_size = rng.choice([1, 2, 4])
        blocks = 200 if game.roomy else rng.randint(3, 12)
        self.most = 24 if game.roomy else min(24, blocks * self.block_size)  # tokens that are computed for one request
        budget = 10_000 if game.whole else rng.choice([1, 3, 8, 64])
        self.limits = Limits(rng.randint(1, 5), budget)
        self.parts = scheduler, policy or rng.choice([FirstCome, lambda: Priority(3.0)]), allocator, prefix, tiers
        self.blocks = blocks

    def fault(self) -> str:
        try:
            core = self._core()
            while self.step < self.game.steps or core.has_work:
                self._turn(core)
                if self.step > 50 * self.game.steps:
                    raise Fault(f"{len(core.outputs)} requests never end")
            self._end(core)
        except (NotAttempted, OverTimeError):
            raise
        except Fault as error:
            return self._said(str(error))
        except Exception as error:  # a part that raised, or an answer that cannot be read
            return self._said(str(error) if isinstance(error, MinillmError) else f"{type(error).__name__}: {error}")
        return ""

    def _said(self, text: str) -> str:
        limits = self.limits
        budget = "" if self.game.whole else f", a budget of {limits.max_num_batched_tokens} tokens"
        return (
            f"schedule {self.seed}, step {self.step} (at most {limits.max_num_seqs} at once{budget}, {self.blocks} "
            f"blocks of {self.block_size}): {text}"
        )

    def _core(self) -> ShadowCore:
        scheduler, policy, allocator, prefix, tiers = self.parts

        def make_cache(pool: Any, events: EventLog) -> PagedCache:
            made = None if prefix is None else prefix(pool.block_size)
            host = Tiers([HostTier(10_000)]) if tiers else None
            return PagedCache(pool, allocator, prefix=made, tiers=host, namespace="shadow", events=events)

        return ShadowCore(self.blocks, self.block_size, policy(), self.limits, make_cache, make_scheduler=scheduler)

    def _turn(self, core: ShadowCore) -> None:
        """What may happen between two steps, then the step, then a look at everything."""
        rng, game = self.rng, self.game
        if self.step < game.steps:
            for _ in range(rng.choice([0, 0, 0, 1, 1, 4]) if len(core.outputs) < MOST_ALIVE else 0):
                prompt = [rng.randrange(ALPHABET) for _ in range(rng.randint(1, max(1, self.most - 1)))]
                new = rng.randint(1, min(9, self.most - len(prompt) + 1))
                request = core.request(prompt, new, priority=rng.randint(-2, 2))
                self.made.append(request)
                core.add(request)
            if game.aborts and self.made and rng.random() < 0.1:
                core.abort(rng.choice(self.made))
                self._look(core)
        before, number = self._waiting(core), core.events.step
        core.step()
        self.step += 1
        self._raise_failures(core)
        self._look(core)
        rows = self._rows(core, number)
        if game.ordered:
            self._in_order(core, rows, before)
        if game.full and game.roomy and game.whole:
            able = min(self.limits.max_num_seqs, len(before) + len([r for r in rows if r not in before]))
            if len(rows) < able:
                raise Fault(
                    f"{len(rows)} requests are in the step and {len(before)} waited before it; expected {able} in it: "
                    "a place that is free is given to the next in the queue"
                )

    def _raise_failures(self, core: ShadowCore) -> None:
        for error in core.failures.values():
            if isinstance(error, NotAttempted | OverTimeError):
                raise error
        for request, error in core.failures.items():
            raise Fault(f"request {request.request_id}: {error}" if str(error) else f"{type(error).__name__}")
        for r in self.made:
            if r.finish_reason == "error":
                raise Fault(f"request {r.request_id} was refused: {r.stop_reason}")

    def _waiting(self, core: ShadowCore) -> list[Request]:
        """Everybody who is in the engine and not in the batch."""
        running = list(core.scheduler.running)
        return [r for r in core.outputs if r not in running]

    def _rows(self, core: ShadowCore, number: int) -> list[Request]:
        """Who was in step `number` of the engine, if it came to one."""
        if core.events.step == number:
            return []
        by_id = {r.request_id: r for r in self.made}
        return [by_id[row[0]] for row in core.events.events[-1].data["rows"]]

    def _look(self, core: ShadowCore) -> None:
        """Laws that hold between any two steps."""
        core.kv.check()
        running = list(core.scheduler.running)
        names = [r.request_id for r in running]
        if len(set(names)) != len(names):
            raise Fault(f"`running` has a request twice: {names}")
        if gone := [r.request_id for r in running if r not in core.outputs]:
            raise Fault(f"request {gone[0]} has ended and is still in `running`")
        if len(running) > self.limits.max_num_seqs:
            raise Fault(f"{len(running)} requests run; at most {self.limits.max_num_seqs} may")
        waiting = core.scheduler.num_waiting
        if waiting + len(running) != len(core.outputs):
            raise Fault(
                f"{waiting} wait and {len(running)} run, and {len(core.outputs)} have come and not ended: somebody is "
                "lost, or in the queue though running or ended"
            )
        holders = [r for r in self.made if r.block_ids and r not in core.outputs]
        if holders:
            raise Fault(f"request {holders[0].request_id} has ended and still holds {len(holders[0].block_ids)} blocks")

    def _in_order(self, core: ShadowCore, rows: list[Request], before: list[Request]) -> None:
        key = self._key(core)
        running = list(core.scheduler.running)
        keys = [key(r) for r in running]
        if keys != sorted(keys):
            raise Fault(f"`running` is not in the order of the keys: {[r.request_id for r in running]} has {keys}")
        joined = [r for r in rows if r in before]
        left = [r for r in before if r not in rows and r in core.outputs]
        if joined and left and max(map(key, joined)) > min(map(key, left)):
            last, first = max(joined, key=key), min(left, key=key)
            raise Fault(
                f"request {last.request_id} (key {key(last):g}) joined, and {first.request_id} (key {key(first):g}), "
                "which comes before it, was left waiting"
            )

    def _key(self, core: ShadowCore) -> Callable[[Request], float]:
        known = self.keys

        def key(request: Request) -> float:
            if request not in known:
                known[request] = core.policy.key(request)
            return float(known[request])

        return key

    def _end(self, core: ShadowCore) -> None:
        for r in self.made:
            if r.finish_reason == "abort":
                continue
            want = core.shadow.expected(r.prompt_token_ids, r.max_tokens)
            if r.output_token_ids != want:
                raise Fault(f"request {r.request_id} generated {r.output_token_ids}; run alone it gives {want}")
        if not core.idle:
            raise Fault(f"everybody has ended, and {core.kv.num_live} blocks are still held")
