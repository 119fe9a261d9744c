"""References and mistakes of exercise 12 for order: who is served, who gives way, and how a step makes room.

The learner's policy and its `make_room` see requests as plain dicts and numbers, since a request cannot travel to where
an answer is run; here they are put into schedulers over shadows.
"""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Callable, Sequence
from typing import Any

from minillm.course.checks.shadows import Game, first_fault
from minillm.course.tasks import Wrong
from minillm.errors import MinillmError
from minillm.policy import FirstCome, Load
from minillm.request import Request, Status
from minillm.scheduler import Limits, ScheduledRow, Scheduler, SchedulerOutput
from minillm.shadow import ShadowCore

AGEING_S = 10.0
Row = dict[str, Any]


def as_dict(request: Request) -> Row:
    return {
        "id": request.request_id, "arrival": request.arrival, "priority": request.priority,
        "computed": request.num_computed_tokens, "blocks": len(request.block_ids),
        "preemptions": request.num_preemptions,
    }  # fmt: skip


# 12.3 a policy


class Policy:
    def key(self, request: Row) -> float:
        return float(request["arrival"] + AGEING_S * request["priority"])

    def victim(self, running: Sequence[Row]) -> str:
        return str(max(running, key=self.key)["id"])


class TakesTheLargest(Policy):
    def victim(self, running: Sequence[Row]) -> str:
        return str(max(running, key=lambda r: r["blocks"])["id"])


class TakesTheCheapest(Policy):
    def victim(self, running: Sequence[Row]) -> str:
        return str(min(running, key=lambda r: r["computed"])["id"])


class TakesTheFirst(Policy):
    def victim(self, running: Sequence[Row]) -> str:
        return str(min(running, key=self.key)["id"])


class TakesTheLastInTheList(Policy):
    def victim(self, running: Sequence[Row]) -> str:
        return str(running[-1]["id"])


class SparesTheHurt(Policy):
    """The one that was sent back least often."""

    def victim(self, running: Sequence[Row]) -> str:
        return str(min(running, key=lambda r: r["preemptions"])["id"])


class IgnoresArrival(Policy):
    def key(self, request: Row) -> float:
        return float(request["priority"])


class IgnoresPriority(Policy):
    def key(self, request: Row) -> float:
        return float(request["arrival"])


class LargerFirst(Policy):
    def key(self, request: Row) -> float:
        return float(request["arrival"] - AGEING_S * request["priority"])


class KeyMoves(Policy):
    """Whoever has computed much comes first."""

    def key(self, request: Row) -> float:
        return super().key(request) - float(request["computed"])


class Mounted(FirstCome):
    """A learner's policy as the engine's. Keys are asked for once: they must not change."""

    def __init__(self, policy: Any):
        self.policy, self.keys = policy, dict[Request, float]()

    def key(self, request: Request) -> float:
        if request not in self.keys:
            self.keys[request] = float(self.policy.key(as_dict(request)))
        return self.keys[request]

    def victim(self, running: Sequence[Request]) -> Request:
        name = self.policy.victim([as_dict(r) for r in running])
        found = [r for r in running if r.request_id == name]
        if not found:
            raise MinillmError(f"victim returned {name!r}; expected the id of one of {[r.request_id for r in running]}")
        return found[0]

    def admit(self, request: Request, load: Load) -> str | None:
        return None


def orders_of(kind: Any, groups: Sequence[Sequence[Row]]) -> list[tuple[list[str], str]]:
    """Ids by key in each group, and whether the keys stay what they are while requests get on."""
    said = []
    for group in groups:
        policy = kind()
        keys = {r["id"]: float(policy.key(dict(r))) for r in group}
        later = [r | {"computed": r["computed"] + 50, "blocks": r["blocks"] + 4, "preemptions": 2} for r in group]
        stay = all(float(policy.key(r)) == keys[r["id"]] for r in later)
        said.append((sorted(keys, key=lambda name: keys[name]), "the keys stay" if stay else "the keys changed"))
    return said


def victims_of(kind: Any, groups: Sequence[Sequence[Row]]) -> list[str]:
    policy = kind()
    return [str(policy.victim([dict(r) for r in group])) for group in groups]


def groups_args(seed: int, count: int = 5) -> Callable[[], Any]:
    """Lists of requests with different keys, in no order."""
    rng = random.Random(seed)

    def make() -> list[Row]:
        rows = []
        for name in rng.sample("ABCDEFGH", 5):
            computed = rng.randint(1, 90)
            rows.append({
                "id": name, "arrival": float(rng.randint(0, 25)), "priority": rng.choice([-1, 0, 0, 1, 2]),
                "computed": computed, "blocks": 1 + computed // 16, "preemptions": rng.randint(0, 3),
            })  # fmt: skip
        return rows if len({Policy().key(r) for r in rows}) == 5 else make()

    made = [make() for _ in range(count)]
    return lambda: (made,)


class Eager(Scheduler):
    """The lesson's: lets everybody in at the first free block, shares the budget equally. Bad victims show here."""

    def schedule(self) -> SchedulerOutput:
        out = SchedulerOutput()
        while self.cache.available() and len(self.running) < self.limits.max_num_seqs and self.num_waiting:
            r = self.waiting.head()
            assert r is not None
            self.waiting.remove(r)
            r.status = Status.RUNNING
            insort(self.running, r, key=self.policy.key)
        share = max(1, self.limits.max_num_batched_tokens // max(1, len(self.running)))
        for r in list(self.running):
            n = min(share, r.num_new_tokens)
            if r.status == Status.RUNNING and self._make_room(r, r.num_computed_tokens + n, out):
                out.rows.append(ScheduledRow(r, n))
        return out


PAIRS = ((13, 40, 8), (13, 44, 8), (16, 40, 12), (15, 44, 4))  # blocks of 4, prompt tokens, budget


PAIRS_STEPS = 150


def pairs(kind: Any) -> list[str]:
    """Two requests that fit alone and not together: how many end, and what the first one lost."""
    said = []
    for blocks, prompt, budget in PAIRS:
        core = ShadowCore(blocks, 4, Mounted(kind()), Limits(4, budget), make_scheduler=Eager)
        for i in range(2):
            core.add(core.request([i] * prompt, 8))
        for _ in range(PAIRS_STEPS):
            if core.has_work:
                core.step()
        for error in core.failures.values():
            raise error
        ended = len(core.events.of("finished"))
        lost = sum(e.request_id == "1" for e in core.events.of("preempted"))
        said.append(
            f"{ended} of 2 end; the first loses its blocks {lost} times" if ended == 2 else "a livelock: they preempt "
            "each other for ever"
        )  # fmt: skip
    return said


def crowd(kind: Any, seed: int) -> list[str]:
    """Twelve requests of different priority in the engine's scheduler: who was sent back while a later one ran on."""
    rng, policy = random.Random(seed), Mounted(kind())
    core = ShadowCore(14, 4, policy, Limits(12, 64))
    requests = [
        core.request([rng.randrange(9) for _ in range(rng.randint(2, 20))], rng.randint(6, 20), arrival=i,
                     priority=rng.choice([0, 0, 1, -1]))
        for i in range(12)
    ]  # fmt: skip
    right = {r: Policy().key(as_dict(r)) for r in requests}
    for r in requests:
        core.add(r)
    wronged = 0
    for _ in range(2_000):
        if not core.has_work:
            break
        before = {r: r.num_preemptions for r in core.scheduler.running}
        core.step()
        for error in core.failures.values():
            raise error
        last = max((right[r] for r in core.scheduler.running if r in before), default=0.0)
        wronged += sum(r.num_preemptions > n and right[r] < last for r, n in before.items())
    ended = len(core.events.of("finished"))
    return [f"{ended} of 12 end", f"{wronged} times one is sent back while a later one runs on"]


def played(**parts: Any) -> str:
    """Random schedules; a fault is told in words."""
    if fault := first_fault(range(6), Game(steps=40), **parts):
        raise Wrong(fault)
    return "no fault in six random schedules"


def policy_mounted(kind: Any) -> str:
    return played(policy=lambda: Mounted(kind()))


# 12.4 room for a request


def make_room(me: int, need: int, free: int, blocks: Sequence[int], begun: Sequence[bool]) -> list[int]:
    return room_with(me, need, free, blocks, begun)


def room_with(
    me: int, need: int, free: int, blocks: Sequence[int], begun: Sequence[bool], *, front: bool = False,
    use_begun: bool = True, short: int = 0, extra: bool = False, keeps_me: bool = False, everybody: bool = False,
    largest: bool = False, goes_on: bool = False,
) -> list[int]:  # fmt: skip
    """The switches are the mistakes by name."""
    able = [i for i in range(len(blocks)) if not (use_begun and begun[i]) and not (keeps_me and i == me)]
    able = able if front else able[::-1]
    if largest:
        able.sort(key=lambda i: -blocks[i])
    gone: list[int] = []
    for i in able:
        enough = free + short >= need
        if enough and not (extra and gone and len(gone) == 1) and not (everybody and gone):
            break
        gone.append(i)
        free += blocks[i]
        if i == me and not goes_on:
            break
    return gone


def rooms(function: Any, inputs: Sequence[Any]) -> list[list[int]]:
    """Several in one case: a constant must not earn points."""
    return [list(function(me, need, free, list(b), list(begun))) for me, need, free, b, begun in inputs]


def mounted_room(function: Any) -> type[Scheduler]:
    """The engine's scheduler with the learner's loop. Also in the exercise's last cell."""

    class Roomy(Scheduler):
        def _make_room(self, request: Request, num_tokens: int, out: SchedulerOutput) -> bool:
            while not self.cache.grow(request, num_tokens):  # again where blocks are shared: fewer came free than held
                running, begun = list(self.running), {r for r, _ in out.rows}
                need = self.cache.blocks_for(num_tokens) - len(request.block_ids)
                free, held = self.cache.available(request.tenant), [len(r.block_ids) for r in running]
                answer = function(running.index(request), need, free, held, [r in begun for r in running])
                places = list(answer)
                if not places or len(set(places)) != len(places) or not set(places) <= set(range(len(running))):
                    raise MinillmError(
                        f"make_room returned {places!r:.80} for {need} blocks with {free} free; expected different "
                        f"positions below {len(running)}, at least one"
                    )
                for i in places:
                    self._preempt(running[i], out)
                if running.index(request) in places:
                    return False
            return True

    return Roomy


def room_mounted(function: Any) -> str:
    return played(scheduler=mounted_room(function))
