"""Random schedules over scheduler, paged cache and step loop, and what they must notice.

A seeded driver, fast enough for tens of thousands; a state machine of hypothesis, which makes a failure small; and
mutants, each of which the driver must catch. MINILLM_SCHEDULES=20000 plays as many schedules as it says.
"""

from __future__ import annotations

import os
import random
import tempfile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_mutants import SLIPS, slip
from schedules import ALPHABET, POLICIES, TENANTS, Play, Setup, play, random_setup

SCHEDULES = int(os.environ.get("MINILLM_SCHEDULES", "300"))
MUTANT_SEEDS = 100  # the slowest mutant to be noticed takes about 40


def test_random_schedules():
    reads = sum(play(seed, moves=12, look_every=4) for seed in range(SCHEDULES))
    assert reads > 300 * SCHEDULES, "hardly anything was read, so hardly anything was checked"


@pytest.mark.parametrize("seed", range(25))
def test_random_schedules_with_every_law_after_every_move_and_a_disk(seed, tmp_path):
    rng = random.Random(seed)
    setup = random_setup(rng, disk=20_000)
    play(seed, moves=20, setup=setup, folder=tmp_path)


@pytest.mark.parametrize("slipped", list(SLIPS))
def test_the_random_schedules_notice(slipped):
    parts = slip(*SLIPS[slipped])
    assert any(fails(seed, parts) for seed in range(MUTANT_SEEDS))


def fails(seed, parts):
    try:
        play(seed, parts, moves=15)
    except Exception:  # a Fault, or whatever the slip breaks first
        return True
    return False


class Machine(RuleBasedStateMachine):
    """Moves in any order; after each, every law of `Play.look`, and at the end, everybody's tokens and the pool."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.game = None

    @initialize(
        blocks=st.integers(2, 10), size=st.sampled_from([1, 2, 4]), seqs=st.integers(1, 5),
        budget=st.sampled_from([1, 2, 3, 8, 64]), chunked=st.booleans(), keep=st.integers(0, 1),
        policy=st.sampled_from(sorted(POLICIES)), prefix=st.sampled_from([None, "radix", "hash", "collide"]),
        floor=st.integers(0, 2), public=st.lists(st.integers(0, ALPHABET - 1), max_size=8),
        host=st.sampled_from([0, 200, 1000, 100_000]), disk=st.booleans(),
        mode=st.sampled_from(["auto", "swap", "recompute"]),
    )  # fmt: skip
    def start(self, blocks, size, seqs, budget, chunked, keep, policy, prefix, floor, public, host, disk, mode):
        public = tuple(public) if prefix and len(public) >= size else ()
        floors = {"a": min(floor, blocks - 1)} if prefix else {}
        self.game = Play(
            Setup(
                blocks, size, seqs, budget, chunked, keep, policy, prefix, floors, public,
                host, 20_000 if host and disk else 0, mode,
            ),
            folder=self.folder.name,
        )  # fmt: skip

    def someone(self, data):
        return data.draw(st.sampled_from(self.game.made), label="whom")

    @rule(
        prompt=st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=24), new=st.integers(1, 8),
        tenant=st.sampled_from(TENANTS), priority=st.integers(-2, 2), due=st.none() | st.floats(0, 30),
        held=st.booleans(),
    )  # fmt: skip
    def add(self, prompt, new, tenant, priority, due, held):
        self.game.add(prompt, new, tenant, priority, due, held)

    @precondition(lambda self: self.game.core.held)
    @rule(data=st.data(), tokens=st.integers(0, 24), what=st.sampled_from(["reserve", "receive", "load", "recompute"]))
    def transfer(self, data, tokens, what):
        r = data.draw(st.sampled_from(sorted(self.game.core.held, key=lambda r: int(r.request_id))), label="whose")
        if what == "reserve":
            self.game.reserve(r)
        elif what == "receive":
            self.game.receive(r, tokens)
        else:
            self.game.resume(r, load=what == "load")

    @precondition(lambda self: self.game.made)
    @rule(data=st.data(), keep=st.integers(1, 30), tail=st.lists(st.integers(0, ALPHABET - 1), max_size=4))
    def add_one_that_begins_like(self, data, keep, tail):
        other = self.someone(data)
        self.game.add([*other.tokens[:keep], *tail], 3, data.draw(st.sampled_from([other.tenant, "b"])))

    @precondition(lambda self: self.game.setup.public)
    @rule(tenant=st.sampled_from(TENANTS), tail=st.lists(st.integers(0, ALPHABET - 1), max_size=9))
    def add_one_that_begins_publicly(self, tenant, tail):
        self.game.add([*self.game.setup.public, *tail], 3, tenant)

    @rule(times=st.integers(1, 5))
    def step(self, times):
        for _ in range(times):
            self.game.step()

    @precondition(lambda self: self.game.made)
    @rule(data=st.data())
    def abort(self, data):
        self.game.abort(self.someone(data))

    @precondition(lambda self: self.game.made)
    @rule(data=st.data())
    def abort_inside_the_next_step(self, data):
        self.game.inside = self.someone(data)
        self.game.step()

    @precondition(lambda self: self.game.made)
    @rule(data=st.data(), paused=st.booleans())
    def pause_or_resume(self, data, paused):
        self.game.pause(self.someone(data), paused)

    @precondition(lambda self: self.game.made)
    @rule(data=st.data())
    def change_ones_mind(self, data):
        """Cancelled, and asked for again."""
        r = self.someone(data)
        self.game.abort(r)
        self.game.add(r.prompt_token_ids, r.max_tokens, r.tenant, r.priority)

    @invariant()
    def everything_holds(self):
        if self.game is not None:
            self.game.look()

    def teardown(self):
        if self.game is not None:
            self.game.end()
        self.folder.cleanup()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30)
