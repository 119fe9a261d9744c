"""Random schedules over the engine's own scheduler, paged cache and step loop, and the laws that hold between steps.

Shared by the fast seeded driver, the state machine and the mutants. The shadow (minillm.shadow) sees every slot that a
step reads. What it cannot see is looked at here: who may share with whom, that the log tells what happened, that
nobody is lost, doubled or idle.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minillm.cache.blocks import BlockAllocator
from minillm.cache.paged import PagedCache
from minillm.cache.prefix import PublicPrefixes, RadixPrefixCache
from minillm.cache.prefix_hash import HashPrefixCache
from minillm.cache.tiers import DiskTier, HostTier, Tiers
from minillm.events import EventLog
from minillm.policy import Deadline, FirstCome, Priority
from minillm.request import Request, Status
from minillm.scheduler import Limits, Scheduler
from minillm.shadow import ShadowCore

ALPHABET = 3  # different tokens of a prompt: so few that prompts begin alike
TENANTS = ("", "a", "b")
POLICIES = {"fcfs": FirstCome, "priority": lambda: Priority(3.0), "deadline": lambda: Deadline(20.0)}


class Fault(AssertionError):
    """A law that does not hold."""


def law(holds: bool, text: str) -> None:
    if not holds:
        raise Fault(text)


@dataclass(frozen=True)
class Setup:
    """An engine. prefix: None, "radix", "hash" or "collide" (every block has the same hash). host, disk: bytes."""

    blocks: int = 8
    block_size: int = 4
    seqs: int = 4
    budget: int = 8
    chunked: bool = True
    keep_free: int = 0
    policy: str = "fcfs"
    prefix: str | None = None
    floors: dict[str, int] = field(default_factory=dict)
    public: tuple[int, ...] = ()  # the beginning that all tenants may share
    host: int = 0
    disk: int = 0
    mode: str = "auto"


def random_setup(rng: random.Random, disk: int = 0) -> Setup:
    blocks, size = rng.randint(2, 12), rng.choice([1, 2, 4])
    prefix = rng.choice([None, "radix", "radix", "hash", "collide"])
    floors: dict[str, int] = {}
    if prefix and rng.random() < 0.3:
        floors = {"a": rng.randint(1, max(1, blocks // 2))}
    public = [rng.randrange(ALPHABET) for _ in range(size * rng.randint(1, 2))] if rng.random() < 0.3 else []
    host = rng.choice([0, 0, 200, 1000, 100_000])
    return Setup(
        blocks, size, rng.randint(1, 6), rng.choice([1, 2, 3, 8, 64]), rng.random() < 0.7, rng.choice([0, 0, 1]),
        rng.choice([*POLICIES]), prefix, floors, tuple(public) if prefix else (), host,
        disk if rng.random() < 0.5 else 0, rng.choice(["auto", "swap", "recompute"]),
    )  # fmt: skip


def make_prefix(setup: Setup) -> Any:
    if setup.prefix is None:
        return None
    if setup.prefix == "radix":
        return RadixPrefixCache(setup.block_size, setup.floors)
    if setup.prefix == "collide":
        return HashPrefixCache(setup.block_size, setup.floors, hash_function=lambda before, reader, tokens: 0)
    return HashPrefixCache(setup.block_size, setup.floors)


@dataclass
class Parts:
    """What a mutant replaces."""

    scheduler: Callable[..., Any] = Scheduler
    cache: Callable[..., Any] = PagedCache
    core: Callable[..., Any] = ShadowCore
    policy: Callable[[], Any] | None = None
    allocator: Callable[[int], Any] = BlockAllocator
    prefix: Callable[[Setup], Any] = make_prefix


class Play:
    """One engine under a schedule. Every move is followed by a look at everything (`look`)."""

    def __init__(self, setup: Setup, parts: Parts | None = None, folder: Any = None):
        self.setup, self.now = setup, 0.0
        parts = parts or Parts()
        self.tiers: Tiers | None = None
        if setup.host or setup.disk:
            tiers: list[Any] = [HostTier(setup.host)] if setup.host else []
            tiers += [DiskTier(folder, setup.disk)] if setup.disk else []
            self.tiers = Tiers(tiers)
        public = PublicPrefixes([setup.public], setup.block_size) if setup.public else None

        def make_cache(pool: Any, events: EventLog) -> PagedCache:
            return parts.cache(
                pool, parts.allocator, prefix=parts.prefix(setup), tiers=self.tiers, preemption_mode=setup.mode,
                namespace="shadow", public=public, events=events,
            )  # fmt: skip

        self.events = EventLog(clock=lambda: self.now)
        policy = (parts.policy or POLICIES[setup.policy])()
        limits = Limits(setup.seqs, setup.budget, setup.chunked, setup.keep_free)
        self.core = parts.core(
            setup.blocks, setup.block_size, policy, limits, make_cache, self.events, make_scheduler=parts.scheduler
        )
        self.inside: Request | None = None  # to be aborted from inside the next step
        forward, self.core.runner.forward = self.core.runner.forward, self._forward
        self._inner = forward
        self.made: list[Request] = []
        self.alive: list[Request] = []
        # What the log must agree with.
        self.computed: dict[str, int] = {}  # request -> tokens that have KV, as its events tell
        self.reached: dict[str, int] = {}  # request -> the most of its tokens that ever had KV
        self.preempted: dict[str, int] = {}
        self.first_hit: dict[str, int] = {}
        self.rows_total = 0
        self.owned: set[tuple[str | None, int]] = set()  # (tenant or None for public, number of a prefix with KV)
        self.by_id: dict[str, Request] = {}
        self.dice = random.Random(repr(setup))  # of whose KV comes from elsewhere; other draws stay as they were
        self.received: dict[Request, int] = {}  # held or not yet admitted -> tokens that were written for it
        self.gave_way: list[Request] = []

    # Moves ------------------------------------------------------------------------------------------

    def most(self, tenant: str) -> int:
        """Tokens that may be computed for a request of the tenant's."""
        return self.core.kv.capacity(tenant) * self.setup.block_size

    def add(
        self, prompt: Sequence[int], new: int, tenant: str = "", priority: int = 0, due_in: float | None = None,
        held: bool = False,
    ) -> Request | None:  # fmt: skip
        """A request, cut to what the engine's door would let in. held: its KV comes from elsewhere, perhaps."""
        most = self.most(tenant)
        if most < 1:
            return None
        prompt = list(prompt)[:most]
        new = max(1, min(new, most - len(prompt) + 1))
        self.now += 0.01
        deadline = None if due_in is None else self.now + due_in
        r = self.core.request(prompt, new, tenant=tenant, priority=priority, deadline=deadline, arrival=self.now)
        self.made.append(r)
        self.alive.append(r)
        self.by_id[r.request_id] = r
        (self.core.hold if held else self.core.add)(r)
        return r

    def reserve(self, r: Request) -> None:
        """Room for a held request."""
        if r in self.core.held and r not in self.core.kv.reservations:
            before = self.core.kv.num_live
            if self.core.kv.reserve(r, self.setup.keep_free, self.gave_way.append):
                self.received[r] = 0
            else:
                law(self.core.kv.num_live == before, "a reservation in vain took blocks")

    def receive(self, r: Request, tokens: int) -> None:
        """The next tokens of a reserved request arrive, as many as may be loaded."""
        kv, size = self.core.kv, self.setup.block_size
        if r not in self.core.held or r not in kv.reservations:
            return
        most = (r.num_tokens - 1) // size * size
        ids, start, end = kv.reservations.ids(r), self.received[r], min(most, self.received[r] + tokens)
        for i, number in enumerate(self._numbers(r, end)[start:], start):
            kv.pool.slots[ids[i // size]][i % size] = number
        self.received[r] = end

    def resume(self, r: Request, load: bool) -> None:
        """With what has been received, or without."""
        if r not in self.core.held:
            return
        kv, size = self.core.kv, self.setup.block_size
        if r in kv.reservations:
            if load:
                kv.loaded(r, self.received[r] // size * size)
            else:
                kv.release(r)
        self.core.resume(r)

    def abort(self, r: Request) -> None:
        ended = r.finished
        self.core.abort(r)
        law(r.finished, f"request {r.request_id} was aborted and has not ended")
        law(ended or r.finish_reason == "abort", f"an aborted request ended with {r.finish_reason}")
        self.alive = [x for x in self.alive if not x.finished]

    def _forward(self, requests: Sequence[Request], counts: Sequence[int]) -> Any:
        """A forward pass in the middle of which somebody may be aborted."""
        if self.inside is not None:
            self.core.abort(self.inside)
        for r, n in zip(requests, counts, strict=True):
            enough = len(r.block_ids) * self.setup.block_size >= r.num_computed_tokens + n
            law(enough, f"blocks of request {r.request_id} were freed while a step was reading them")
        return self._inner(requests, counts)

    def pause(self, r: Request, paused: bool) -> None:
        if r in self.core.outputs:
            self.core.scheduler.pause(r, paused)

    def step(self) -> list[Any]:
        self.now += 1.0
        running = [(r, r.num_new_tokens) for r in self.core.scheduler.running if not r.paused]
        able = [r for r in self.core.outputs if not r.paused and r not in self.core.held]
        late = {
            r for r in self.core.outputs
            if r.deadline is not None and r.deadline < self.now and r.status == Status.WAITING and not r.paused
        }  # fmt: skip
        waited = list(self.core.scheduler.waiting)
        kept = self._size_of_floors()
        number, before = self.events.step, {r: list(r.output_token_ids) for r in able}
        done = self.core.step()
        for r in self.gave_way:
            law(r not in self.core.kv.reservations, "a reservation gave way and is still there")
            self.core.resume(r)
        self.gave_way.clear()
        if any(e.kind == "preempted" for e in self.events if e.step == number):
            law(not self.core.kv.reservations or self._ousted(number), "somebody gave way before a reservation")
        law(self.inside is None or self.events.step == number or self.inside.finished, "an abort was lost")
        self.inside = None
        for error in self.core.failures.values():
            raise Fault(f"a request failed: {error!r}") from error
        law(all(r.finish_reason == "abort" for r in late), "a request whose deadline had passed was not ended")
        law(not late & {r for r, *_ in self._rows(number)}, "a request whose deadline had passed ran")
        self._budget(number, running)
        self._order(number, running, waited)
        for tenant, size in kept.items():
            least = min(size, self.setup.floors[tenant])
            law(self.core.kv.prefix._size[tenant] >= least, f"{tenant!r} was brought below its floor")
        some = self.events.step > number or bool(done)
        law(some or not able, "nothing was computed in a step in which somebody could run")
        for r, old in before.items():
            law(r.output_token_ids[: len(old)] == old, f"request {r.request_id} lost output tokens")
        ended = [r for r in self.alive if r.finished]
        for r in ended:
            self._right(r)
        self.alive = [r for r in self.alive if not r.finished]
        return done

    # Laws --------------------------------------------------------------------------------------------

    def _rows(self, number: int) -> list[tuple[Request, int, int]]:
        if self.events.step == number:
            return []
        step = next(e for e in reversed(self.events.events) if e.kind == "step")
        return [(self.by_id[name], n, before) for name, n, before in step.data["rows"]]

    def _budget(self, number: int, running: list[tuple[Request, int]]) -> None:
        rows, setup = self._rows(number), self.setup
        total = sum(n for _, n, _ in rows)
        whole = not setup.chunked and len(rows) == 1
        law(whole or total <= setup.budget, f"a step computed {total} tokens; the budget is {setup.budget}")
        law(len(rows) <= setup.seqs, f"{len(rows)} requests in a step; at most {setup.seqs} may run")
        law(not any(r.paused for r, *_ in rows), "a paused request was scheduled")
        if not rows:
            return
        taken = {e.request_id for e in self.events if e.step == number and e.kind == "preempted"}
        if not setup.chunked:
            old = {r for r, _ in running if r.request_id not in taken}
            law(len({r in old for r, *_ in rows}) == 1, "a whole prompt shared its step with a stream")
            if rows[0][0] not in old:
                return
        got = {r for r, *_ in rows}
        streams = sum(n == 1 for _, n, _ in rows)
        for r, n in running:
            if n == 1 and r not in got and r.request_id not in taken and not r.finished:
                law(streams >= setup.budget, f"stream {r.request_id} was held up by a chunk")

    def _order(self, number: int, running: list[tuple[Request, int]], waited: list[Request]) -> None:
        """Who joined, and who gave way, by their keys."""
        core, key = self.core, self.core.policy.key
        taken = {self.by_id[e.request_id] for e in self.events if e.step == number and e.kind == "preempted"}
        joined = [r for r, *_ in self._rows(number) if r in waited]
        queue = core.scheduler.waiting
        left = [key(r) for r in waited if r in queue]
        law(not joined or not left or max(map(key, joined)) <= min(left), "somebody joined before its turn")
        for r, _ in running:
            if r in taken:
                later = [x for x, _ in running if key(x) > key(r) and x not in taken and x in core.scheduler.running]
                law(not later, f"request {r.request_id} gave way, and {[x.request_id for x in later]} come after it")
                law(not any(x.paused for x in core.scheduler.running), "somebody gave way before one that is paused")
        stayed = [r for r, _ in running if r in core.scheduler.running and r not in taken]
        joined = [r for r in joined if r not in self.received]  # whose blocks were reserved, once
        if joined and stayed and self.setup.prefix is None:
            law(core.kv.available() >= self.setup.keep_free, "the watermark was not left free")

    def _size_of_floors(self) -> dict[str, int]:
        """Cached blocks of each tenant that has a floor and nobody in the engine: others cannot take all of them."""
        busy = {r.tenant for r in self.core.outputs}
        return {t: self.core.kv.prefix._size[t] for t in self.setup.floors if t not in busy}

    def _right(self, r: Request) -> None:
        law(r.finish_reason in ("length", "abort"), f"request {r.request_id} ended with {r.stop_reason!r}")
        want = self.core.shadow.expected(r.prompt_token_ids, r.max_tokens)
        law(r.output_token_ids == want[: len(r.output_token_ids)], f"request {r.request_id} generated something else")
        law(r.finish_reason == "abort" or len(r.output_token_ids) == r.max_tokens, "too few tokens")
        law(not r.block_ids, f"request {r.request_id} has ended and holds blocks")
        late = r.finish_reason == "abort" and "deadline" in str(r.stop_reason)
        law(not late or (not r.output_token_ids and not r.num_preemptions), "a deadline ended who had begun")

    def look(self) -> None:
        """Everything that must hold between two moves."""
        core, scheduler = self.core, self.core.scheduler
        core.kv.check()
        key, running, waiting = core.policy.key, list(scheduler.running), list(scheduler.waiting)
        keys = [key(r) for r in running]
        law(keys == sorted(keys), f"running is not in the order of the keys: {keys}")
        everybody = [*running, *waiting, *scheduler.parked, *core.held]
        law(len(set(everybody)) == len(everybody), "somebody is in two places, or twice in one")
        law(set(everybody) == set(core.outputs), "somebody is lost, or has ended and is still there")
        law(len(waiting) == scheduler.num_waiting, "the queue counts wrongly")
        law(len(running) <= self.setup.seqs, "too many run")
        for r in running:
            law(r.status == Status.RUNNING, f"a running request is {r.status}")
            law(0 <= r.num_computed_tokens < r.num_tokens, f"{r.num_computed_tokens} of {r.num_tokens} computed")
            law(len(r.block_ids) <= core.kv.most_blocks(r), "more blocks than the request can ever need")
            law(len(r.block_ids) >= core.kv.blocks_for(r.num_computed_tokens), "fewer blocks than tokens with KV")
        for r in (*waiting, *scheduler.parked, *core.held):
            law(r.status in (Status.WAITING, Status.PREEMPTED), f"a waiting request is {r.status}")
            law(not r.block_ids and not r.num_computed_tokens, "a waiting request holds blocks, or counts KV")
        law(not any(r.paused for r in waiting), "a paused request waits in the queue")
        self._sharing(running)
        self._log()
        self._tiers_hold_only_the_livings()

    def _sharing(self, running: Sequence[Request]) -> None:
        """A block in two tables is full, has the same tokens before it, and is public or one tenant's."""
        size, kv = self.setup.block_size, self.core.kv
        seen: dict[int, tuple[Request, int]] = {}
        for r in running:
            law(len(set(r.block_ids)) == len(r.block_ids), "a block is twice in a table")
            for i, block in enumerate(r.block_ids):
                if block in seen:
                    other, at = seen[block]
                    end = size * (i + 1)
                    law(at == i and other.tokens[:end] == r.tokens[:end], "a shared block has two meanings")
                    law(r.tenant == other.tenant or end <= self._public(r), "tenants share a private block")
                    law(min(r.num_computed_tokens, other.num_computed_tokens) >= end, "a shared block is not full")
                seen[block] = r, i
        reserved = [i for r in self.core.outputs if r in kv.reservations for i in kv.reservations.ids(r)]
        law(len(reserved) == kv.reservations.num_blocks, "a reservation outlives its request")
        law(len(set(reserved)) == len(reserved) and not set(seen) & set(reserved), "a reserved block is used")
        law(set(seen) | set(reserved) == set(kv._users), "live blocks are not those of the running requests")

    def _public(self, r: Request) -> int:
        return 0 if self.core.kv.public is None else self.core.kv.public.leading(r.prompt_token_ids)

    def _log(self) -> None:
        """Replay what is new in the log: hits + computed is the counter, and a hit is of KV that its tenant made."""
        for e in self.events:
            r = self.by_id.get(e.request_id)
            if e.kind == "hit":
                law(e.data["tokens"] > 0 and e.data["tokens"] % self.setup.block_size == 0, "a hit of part of a block")
                start = self.computed.get(e.request_id, 0)
                end = self.computed[e.request_id] = start + e.data["tokens"]
                if e.data["source"] == "transfer":
                    size = self.setup.block_size
                    law((start, end) == (0, self.received[r] // size * size), "a transfer moved the counter elsewhere")
                    self.first_hit[e.request_id] = 0
                    self.reached[e.request_id] = max(self.reached.get(e.request_id, 0), end)
                    self._own(r, end)
                else:
                    self._may_read(r, start, end)
            elif e.kind == "preempted":
                law(e.data["computed"] == self.computed.get(e.request_id, 0), "preempted with another counter")
                self.computed[e.request_id] = 0
                self.preempted[e.request_id] = self.preempted.get(e.request_id, 0) + 1
            elif e.kind == "step":
                for name, n, before in e.data["rows"]:
                    law(n > 0, "a row without tokens")
                    law(
                        self.computed.get(name, 0) == before,
                        f"request {name}: its events tell of {self.computed.get(name, 0)} tokens, its row of {before}",
                    )
                    self.first_hit.setdefault(name, before)
                    self.computed[name] = before + n
                    self.reached[name] = max(self.reached.get(name, 0), before + n)
                    self.rows_total += n
                    self._own(self.by_id[name], before + n)
                free, live, cached = (e.data[k] for k in ("free", "live", "cached"))
                law(free + live + cached == self.setup.blocks, "the step's event has lost a block")
        self.events.clear()
        law(self.rows_total == sum(self.core.shadow.computed), "the log's rows are not what was computed")
        for r in self.core.outputs:
            law(r.num_preemptions == self.preempted.get(r.request_id, 0), "preemptions are not those of the log")
            law(r.num_computed_tokens == self.computed.get(r.request_id, 0), "the counter is not the log's")
            if r.request_id in self.first_hit:
                law(r.num_cached_tokens == self.first_hit[r.request_id], "num_cached_tokens is not the first hit")

    def _own(self, r: Request, end: int) -> None:
        public = self._public(r)
        for i, number in enumerate(self._numbers(r, end)):
            self.owned.add((None if i < public else r.tenant, number))

    def _ousted(self, number: int) -> bool:
        """Whether who was preempted was paused: that makes room for somebody who waits."""
        taken = [e.request_id for e in self.events if e.step == number and e.kind == "preempted"]
        return all(self.by_id[name].paused for name in taken)

    def _numbers(self, r: Request, end: int) -> list[int]:
        return self.core.shadow.prefixes.of(r.tokens[:end])

    def _may_read(self, r: Request, start: int, end: int) -> None:
        law(end < r.num_tokens, "a hit of all tokens: nothing is left to give logits")
        if self.setup.prefix is None:
            law(end <= self.reached.get(r.request_id, 0), "a hit of what the request has never computed itself")
            return
        public = self._public(r)
        for i, number in enumerate(self._numbers(r, end)[start:], start):
            law((None if i < public else r.tenant, number) in self.owned, "a hit of what its tenant never computed")

    def _tiers_hold_only_the_livings(self) -> None:
        private = self.core.kv.swap.private
        law(set(private) <= set(self.core.outputs), "a request has ended, and its private blocks are kept")
        if self.tiers is not None and self.setup.prefix is None:
            most = sum(self.reached.get(r.request_id, 0) // self.setup.block_size for r in private)
            law(len(self.tiers) <= most, "the tiers keep blocks that nobody will ask for")

    # The end ------------------------------------------------------------------------------------------

    def bound(self) -> int:
        """Steps within which everybody ends. Why: see `test_random_workloads_end_within_the_bound`."""
        n, total = len(self.alive), sum(r.num_prompt_tokens + r.max_tokens for r in self.alive)
        return (n + 1) * (total + 1)

    def end(self, look_every: int = 1) -> None:
        for r in list(self.alive):
            if r.paused:
                self.pause(r, False)
            self.resume(r, load=len(r.prompt_token_ids) % 2 == 0)
        most = self.bound()
        for i in range(most):
            if not self.core.has_work:
                break
            self.step()
            if i % look_every == 0:
                self.look()
        law(not self.core.has_work, f"{len(self.core.outputs)} requests did not end in {most} steps")
        self.look()
        kv = self.core.kv
        law(kv.num_live == 0 and kv.num_free + kv.num_cached == self.setup.blocks, "the pool is not as it began")
        law(self.tiers is None or self.setup.prefix is not None or len(self.tiers) == 0, "tiers keep private blocks")
        if kv.prefix is not None:  # what is cached can be given back, to the last block
            kv.allocator.free(kv.prefix.clear())
            law(kv.num_free == self.setup.blocks, "a cached block is held by somebody")
        if self.tiers is not None:
            self.tiers.close()


def play(
    seed: int, parts: Parts | None = None, moves: int = 30, look_every: int = 1, setup: Setup | None = None,
    folder: Any = None,
) -> int:  # fmt: skip
    """One random schedule to its end. Returns how many slots were read and compared. Raises Fault, or what broke."""
    rng = random.Random(seed)
    game = Play(setup or random_setup(rng), parts, folder)
    for i in range(moves):
        for _ in range(rng.choice([0, 0, 1, 1, 3]) if len(game.alive) < 10 else 0):
            add_random(game, rng)
        if game.made and (x := rng.random()) < 0.3:
            r = rng.choice(game.alive or game.made)
            if x < 0.1:
                game.abort(r)
            elif x < 0.15:
                game.inside = r
            else:
                game.pause(r, not r.paused)
        if game.core.held:
            transfer_random(game, game.dice)
        game.step()
        if i % look_every == 0:
            game.look()
    game.end(look_every)
    return game.core.shadow.reads


def add_random(game: Play, rng: random.Random) -> None:
    setup, tenant = game.setup, rng.choice(TENANTS)
    most = max(1, game.most(tenant))
    length = rng.randint(1, most)
    if rng.random() < 0.3:  # whole blocks exactly
        length = max(setup.block_size, length - length % setup.block_size)
    prompt = [rng.randrange(ALPHABET) for _ in range(length)]
    if game.made and rng.random() < 0.5:  # begins as an earlier one did, answer included
        head = rng.choice(game.made).tokens
        prompt = head[: rng.randint(1, len(head))] + prompt
    elif setup.public and rng.random() < 0.7:
        prompt = [*setup.public, *prompt]
    due = rng.choice([None, None, rng.uniform(0, 30)])
    held = game.dice.random() < 0.2
    game.add(prompt[: max(1, length)], rng.randint(1, 9), tenant, rng.randint(-2, 2), due, held)


def transfer_random(game: Play, rng: random.Random) -> None:
    """Something happens to those whose KV is on its way."""
    for r in sorted(game.core.held, key=lambda r: int(r.request_id)):
        x = rng.random()
        if x < 0.5:
            game.reserve(r)
        if x < 0.8:
            game.receive(r, rng.randint(0, 2 * game.setup.block_size))
        if x > 0.7:
            game.resume(r, load=x < 0.95)
