"""What leaves the pool and comes back: which blocks go to a tier, what it costs, and what the cost model is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minillm.cache import block_file
from minillm.cache.paged import PagedCache
from minillm.cache.prefix import RadixPrefixCache
from minillm.cache.prefix_hash import HashPrefixCache
from minillm.cache.tiers import DiskTier, HostTier, Tiers
from minillm.scheduler import Limits, SchedulerOutput
from minillm.shadow import ShadowCore


class Costs:
    """A cost model that takes notes, and says yes."""

    def __init__(self):
        self.steps, self.copies, self.asked = [], [], []

    def observe_step(self, rows, seconds):
        self.steps.append(list(rows))

    def observe_copy(self, tier, blocks, seconds, *, write):
        self.copies.append((tier, blocks, "to" if write else "from"))

    def preemption(self, blocks, *, stored=0, tier="host", tail=1):
        self.asked.append(("preemption", tier, blocks, stored))
        return SimpleNamespace(how="swap")

    def restoring(self, tiers, *, context_before=0, tail=1):
        return len(tiers), None

    def worth_keeping(self, tier="host", *, context_before=0):
        self.asked.append(("keep", tier, context_before))
        return True


def core_with(blocks=12, size=2, limits=None, **options):
    costs = Costs()
    core = ShadowCore(
        blocks, size, limits=limits or Limits(4, 64),
        make_cache=lambda pool, events: PagedCache(pool, events=events, namespace="shadow", restore=costs, **options),
    )  # fmt: skip
    return core, costs


# What the cost model is told of steps


def test_a_step_is_observed_as_new_tokens_after_the_context_before_it():
    core, costs = core_with(limits=Limits(4, 3))
    core.add(core.request([1, 2, 3, 4, 5], 3))
    core.finish_all()
    assert costs.steps == [[(3, 0)], [(2, 3)]], "and steps of decode tokens alone are left out"


@pytest.mark.parametrize("where", ["runner", "sampler"])
def test_a_step_that_failed_is_neither_observed_nor_logged_as_computed(where):
    core, costs = core_with()
    request = core.request([1, 2, 3, 4, 5], 3)
    core.add(request)

    def broken(*args):
        raise RuntimeError("on fire")

    setattr(getattr(core, where), "forward" if where == "runner" else "sample", broken)
    core.step()
    assert request.finish_reason == "error"
    assert costs.steps == []
    (step,) = core.events.of("step")
    assert step.data["rows"] == []
    assert core.events.step == 1


def test_a_device_is_waited_for_before_a_step_or_a_restore_is_timed(monkeypatch):
    """A kernel's launch is not its end. On a CPU there is nothing to wait for."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    core, costs = core_with(limits=Limits(4, 3))
    core.add(core.request([1, 2, 3, 4, 5], 1))
    core.step()
    assert waited == []
    core.kv.pool.k = SimpleNamespace(is_cuda=True, device="cuda:0")
    core.step()
    assert waited == ["cuda:0"]
    assert len(costs.steps) == 2


# Which blocks go, and how that is told


def preempted(core, request, keep=()):
    """Preempt it once all of its prompt is computed; (how, copied) of the event."""
    core.add(request)
    while request.num_new_tokens > 1 or not request.output_token_ids:
        core.step()
    core.scheduler._preempt(request, SchedulerOutput())
    event = core.events.of("preempted")[-1]
    return event.data["how"], event.data["copied"]


def block_room(core):
    """Bytes of a block of the shadow's in a host tier: 2 tokens of 8 bytes, and its key."""
    host = HostTier(1000)
    host.put(*next(core.kv.swap.keys(core.request([1, 2, 3, 4, 5]), 1, 2)), core.kv.pool.read_blocks([1])[0])
    return host.nbytes


@pytest.mark.parametrize("room", [1, 2, 5])
def test_of_a_request_larger_than_the_tier_the_head_survives(room):
    core, _ = core_with(tiers=Tiers([HostTier(1)]))
    core.kv.tiers = Tiers([HostTier(room * block_room(core))])
    request = core.request([1, 2, 3, 4, 5, 6, 7, 8, 9], 3)
    how, copied = preempted(core, request)
    assert how == "swap"
    assert copied == min(4, core.kv.tiers.tiers[0].stats["puts"])
    assert len(core.kv.tiers) == min(4, room)
    core.finish_all()
    hits = [e.data["tokens"] for e in core.events.of("hit")]
    assert hits == [2 * min(4, room)], "the first blocks come back; the rest is computed"
    assert request.output_token_ids == core.shadow.expected(request.prompt_token_ids, 3)
    assert len(core.kv.tiers) == 0


def test_no_more_is_read_than_a_tier_can_hold(monkeypatch):
    core, _ = core_with(blocks=64, tiers=Tiers([HostTier(1)]), limits=Limits(4, 256))
    core.kv.tiers = Tiers([HostTier(2 * block_room(core))])
    read, read_blocks = [], core.kv.pool.read_blocks
    monkeypatch.setattr(core.kv.pool, "read_blocks", lambda ids: (read.extend(ids), read_blocks(ids))[1])
    assert preempted(core, core.request([1] * 101, 3)) == ("swap", 2)
    assert len(read) == 3, "one to see how large a block is"
    assert core.kv.tiers.stats["host"] == {"puts": 2}


def test_a_swap_that_keeps_nothing_is_a_recompute():
    core, costs = core_with(tiers=Tiers([HostTier(1)]))
    assert preempted(core, core.request([1, 2, 3, 4, 5], 3)) == ("recompute", 0)
    assert costs.copies == [], "nothing was written, so nothing is known of writing"
    core.finish_all()
    assert core.events.of("hit") == []


@pytest.mark.parametrize(("kind", "most"), [("host", 1), ("disk", 3)])
def test_what_the_tier_has_already_is_not_copied_again_unless_the_copies_took_its_room(kind, most, tmp_path):
    """Four blocks, room for three, two there. How many files fit is not known before: there the head goes once more."""
    core, _ = core_with(tiers=Tiers([HostTier(1)]))
    request = core.request([1, 2, 3, 4, 5], 6)
    if kind == "host":
        tier = HostTier(3 * block_room(core))
    else:
        key, payload = next(core.kv.swap.keys(request, 1, 2)), core.kv.pool.read_blocks([1])[0]
        tier = DiskTier(tmp_path, 3 * len(block_file.encode(*key, payload)))
    core.kv.tiers = Tiers([tier])
    assert preempted(core, request) == ("swap", 2)
    while len(request.output_token_ids) < 5:
        core.step()
    core.scheduler._preempt(request, SchedulerOutput())
    assert core.events.of("preempted")[-1].data["copied"] == most
    assert core.kv.tiers.match(core.kv.swap.keys(request, 0, 4)) == [kind] * 3
    core.finish_all()
    assert request.output_token_ids == core.shadow.expected(request.prompt_token_ids, 6)
    tier.close()


def test_with_a_prefix_cache_nothing_is_copied_until_it_is_evicted():
    """A preempted request's blocks stay where they can be hit. Only what makes room goes to a tier."""
    core, _ = core_with(blocks=8, tiers=Tiers([HostTier(10_000)]), prefix=RadixPrefixCache(2))
    request = core.request([1, 2, 3, 4, 5, 6, 7], 2)
    assert preempted(core, request) == ("cached", 0)
    assert core.kv.num_cached == 3
    assert len(core.kv.tiers) == 0
    core.kv.allocator.free(core.kv.prefix.evict(2))
    assert len(core.kv.tiers) == 2
    core.finish_all()
    assert [(e.data["source"], e.data["tokens"]) for e in core.events.of("hit")] == [("prefix", 2), ("host", 4)]
    assert request.output_token_ids == core.shadow.expected(request.prompt_token_ids, 2)


def test_a_spill_that_failed_is_tried_again():
    """Its block stays in the cache, and so must its name."""
    core, _ = core_with(blocks=8, tiers=Tiers([HostTier(10_000)]), prefix=RadixPrefixCache(2))
    core.add(core.request([1, 2, 3, 4, 5], 1))
    core.finish_all()
    read, core.kv.pool.read_blocks = core.kv.pool.read_blocks, None
    with pytest.raises(TypeError):
        core.kv.prefix.evict(1)
    core.kv.pool.read_blocks = read
    core.kv.allocator.free(core.kv.prefix.evict(2))
    assert len(core.kv.tiers) == 2


@pytest.mark.parametrize("prefix", [False, True])
def test_a_disk_alone_is_judged_and_observed_as_a_disk(tmp_path, prefix):
    tiers = Tiers([DiskTier(tmp_path, 100_000)])
    core, costs = core_with(blocks=8, tiers=tiers, prefix=RadixPrefixCache(2) if prefix else None)
    request = core.request([1, 2, 3, 4, 5], 2)
    preempted(core, request)
    if prefix:
        core.kv.allocator.free(core.kv.prefix.evict(2))
        assert costs.asked == [("keep", "disk", 2), ("keep", "disk", 0)]
        assert costs.copies == [("disk", 1, "to")] * 2
    else:
        assert costs.asked == [("preemption", "disk", 2, 0)]
        assert costs.copies == [("disk", 2, "to")]
    core.finish_all()
    assert costs.copies[-1] == ("disk", 2, "from")
    tiers.close()


def test_a_copy_is_booked_where_it_went(tmp_path):
    """The host is too small for a block: the first tier is asked for, and the disk has the copies."""
    tiers = Tiers([HostTier(1), DiskTier(tmp_path, 100_000)])
    core, costs = core_with(tiers=tiers)
    assert preempted(core, core.request([1, 2, 3, 4, 5], 2)) == ("swap", 2)
    assert costs.asked == [("preemption", "host", 2, 0)]
    assert costs.copies == [("disk", 2, "to")]
    core.finish_all()
    tiers.close()


# Costs


@pytest.mark.parametrize("kind", [RadixPrefixCache, HashPrefixCache])
def test_evicting_a_long_prefix_into_a_tier_is_linear_in_its_tokens(kind, monkeypatch):
    """Counted in bytes hashed and bytes of keys kept, from the first token to the eviction of the last block."""
    hashed = []
    sha256 = block_file.hashlib.sha256
    monkeypatch.setattr(block_file.hashlib, "sha256", lambda content: (hashed.append(len(content)), sha256(content))[1])

    def play(blocks):
        hashed.clear()
        tiers = Tiers([HostTier(1 << 20)])
        core, _ = core_with(blocks + 1, 2, Limits(1, 64), tiers=tiers, prefix=kind(2))
        core.add(core.request([7] * (2 * blocks), 1))
        core.finish_all()
        core.kv.allocator.free(core.kv.prefix.evict(blocks))
        assert len(tiers) == blocks
        return sum(hashed), tiers.nbytes

    (few, small), (many, large) = play(60), play(120)
    assert many < 2.1 * few
    assert large < 2.1 * small
