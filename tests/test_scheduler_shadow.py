"""The scheduler, the caches and the step loop over a pool that knows what every slot must hold (minillm.shadow).

Random schedules: shared prefixes, tiny pools, budgets down to 1, aborts, pauses, preemptions, swaps, tenants.
"""

from __future__ import annotations

import random

import pytest

from minillm.cache.paged import PagedCache
from minillm.cache.prefix import RadixPrefixCache
from minillm.cache.prefix_hash import HashPrefixCache
from minillm.cache.tiers import HostTier, Tiers
from minillm.errors import MinillmError
from minillm.events import EventLog
from minillm.policy import Deadline, FirstCome, Priority
from minillm.request import Status
from minillm.scheduler import Limits
from minillm.shadow import ShadowCore


def test_requests_get_what_they_would_get_alone():
    core = ShadowCore()
    requests = [core.request(range(n), 5) for n in (1, 4, 7, 12)]
    for r in requests:
        core.add(r)
    core.finish_all()
    for r in requests:
        assert r.output_token_ids == core.shadow.expected(r.prompt_token_ids, 5), r.stop_reason
        assert r.status == Status.FINISHED
    assert core.idle


def plain(rng):
    return lambda pool, events: PagedCache(pool, events=events)


def with_prefix(rng):
    make = rng.choice([RadixPrefixCache, HashPrefixCache])
    floors = rng.choice([{}, {"a": 1}])
    return lambda pool, events: PagedCache(
        pool, prefix=make(pool.block_size, floors), namespace="shadow", events=events
    )


def with_tiers(rng):
    prefix = rng.choice([None, RadixPrefixCache, HashPrefixCache])
    mode = rng.choice(["auto", "swap", "recompute"])
    room = rng.choice([100, 1000, 100_000])
    return lambda pool, events: PagedCache(
        pool, prefix=prefix and prefix(pool.block_size), tiers=Tiers([HostTier(room)]), preemption_mode=mode,
        namespace="shadow", events=events,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [plain, with_prefix, with_tiers])
@pytest.mark.parametrize("seed", range(20))
def test_random_schedules(seed, kind):
    rng = random.Random(seed)
    policy = rng.choice([FirstCome(), Priority(3.0), Deadline(20.0)])
    limits = Limits(rng.randint(1, 6), rng.choice([1, 2, 3, 8, 64]), rng.random() < 0.7, rng.randint(0, 1))
    events = EventLog()
    core = ShadowCore(rng.randint(2, 12), rng.choice([1, 2, 4]), policy, limits, kind(rng), events)
    alive = []
    for _ in range(300):
        if rng.random() < 0.4:
            most = core.kv.pool.num_blocks * core.kv.pool.block_size
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, max(1, most - 1)))]
            most = core.kv.capacity(tenant := rng.choice(["", "a", "b"])) * core.kv.pool.block_size
            prompt = prompt[: max(1, most - 1)]
            r = core.request(prompt, rng.randint(1, most - len(prompt) + 1), priority=rng.randint(-2, 2), tenant=tenant)
            core.add(r)
            alive.append(r)
        if alive and rng.random() < 0.1:
            core.abort(rng.choice(alive))
        if alive and rng.random() < 0.1:
            r = rng.choice(alive)
            if r.finish_reason is None:
                core.scheduler.pause(r, not r.paused)
        core.step()
        core.kv.check()
        waiting = list(core.scheduler.waiting)
        assert len(set(waiting) | set(core.scheduler.running)) == len(waiting) + len(core.scheduler.running)
    for r in alive:
        if r.paused and r.finish_reason is None:
            core.scheduler.pause(r, False)
    core.finish_all()
    for r in alive:
        assert r.finish_reason in ("length", "abort"), r.stop_reason
        if r.finish_reason == "length":
            assert r.output_token_ids == core.shadow.expected(r.prompt_token_ids, r.max_tokens)
    assert core.idle


def test_a_request_that_can_never_fit_is_refused_and_the_next_proceeds():
    core = ShadowCore(blocks=2)
    big, small = core.request(range(20)), core.request(range(3))
    core.add(big)
    core.add(small)
    core.finish_all()
    assert big.finish_reason == "error"
    assert "even alone" in big.stop_reason
    assert small.finish_reason == "length"
    assert core.idle


def test_a_request_is_never_added_twice():
    core = ShadowCore()
    r = core.request([1])
    core.add(r)
    with pytest.raises(MinillmError, match="before"):
        core.add(r)
