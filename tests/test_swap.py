"""What leaves the pool and comes back: which blocks go to a tier, what it costs, and what the cost model is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minillm.cache.paged import PagedCache
from minillm.scheduler import Limits
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
