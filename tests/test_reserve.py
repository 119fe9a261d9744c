"""Reserved blocks and held requests, one law a test. tests/test_scheduler_machine.py tries them in any order."""

from __future__ import annotations

import pytest
from schedules import Play, Setup

from minillm.cache.paged import PagedCache
from minillm.cache.prefix import RadixPrefixCache
from minillm.errors import MinillmError
from minillm.scheduler import Limits
from minillm.shadow import ShadowCore, ShadowError


def held(game: Play, length: int = 9, new: int = 4, **options):
    return game.add([1] * length, new, held=True, **options)


def test_a_loaded_request_computes_only_what_did_not_come():
    game = Play(Setup(blocks=8, block_size=4, budget=64))
    r = held(game, 9)
    game.reserve(r)
    assert game.core.kv.num_live == 3
    game.receive(r, 8)
    game.resume(r, load=True)
    game.step()
    assert game.core.shadow.computed == [1]
    assert (r.num_computed_tokens, r.num_cached_tokens) == (9, 0)
    game.end()


def test_the_shadow_sees_a_slot_that_was_never_written():
    game = Play(Setup(blocks=8, block_size=4, budget=64))
    r = held(game, 9)
    game.reserve(r)
    game.receive(r, 4)
    game.core.kv.loaded(r, 8)
    game.core.resume(r)
    game.core.step()
    assert isinstance(game.core.failures[r], ShadowError)
    assert "nothing yet" in str(game.core.failures[r])


def test_a_reservation_gives_way_before_a_running_request_is_preempted():
    game = Play(Setup(blocks=6, block_size=2, budget=64))
    a = game.add([1, 2, 1], 9)
    game.step()
    b, c = held(game, 3), held(game, 3)
    game.reserve(b)
    game.reserve(c)
    assert game.core.kv.num_free == 0
    while len(a.block_ids) < 4:
        game.step()
        game.look()
    assert c not in game.core.kv.reservations, "the latest first"
    assert b in game.core.kv.reservations
    assert c in game.core.scheduler.waiting, "it is computed here"
    assert a.num_preemptions == 0
    game.end()


def test_a_reservation_gives_way_when_nobody_runs_and_the_head_does_not_fit():
    game = Play(Setup(blocks=4, block_size=2, budget=64))
    b = held(game, 3)
    game.reserve(b)
    a = game.add([1] * 7, 1)
    game.step()
    assert a.finished
    assert b not in game.core.kv.reservations
    game.end()


def test_a_loaded_request_that_waits_for_its_turn_gives_way_as_well():
    """It has its blocks and no place to run: nobody may starve for them."""
    game = Play(Setup(blocks=4, block_size=2, seqs=1, budget=64))
    a = game.add([1], 7)
    game.step()
    b = held(game, 3)
    game.reserve(b)
    game.receive(b, 2)
    game.resume(b, load=True)
    while b in game.core.kv.reservations:
        game.step()
        game.look()
    assert not a.finished
    assert not a.num_preemptions
    game.end()
    assert len(b.output_token_ids) == 4


def test_who_waits_for_memory_comes_before_a_new_reservation():
    game = Play(Setup(blocks=4, block_size=2, budget=64))
    game.add([1, 2, 1], 5)
    game.step()
    game.add([1] * 7, 1)
    game.step()
    assert game.core.kv.somebody_waits
    b = held(game, 1, 1)
    game.reserve(b)
    assert b not in game.core.kv.reservations
    game.end()
    assert not game.core.kv.somebody_waits


def test_the_watermark_is_left_free():
    core = ShadowCore(blocks=4, block_size=2, limits=Limits(4, 8, True, 1))
    r = core.request([1] * 7, 1)
    core.hold(r)
    assert not core.kv.reserve(r, keep_free=1)
    assert core.kv.reserve(r, keep_free=0)
    core.abort(r)
    assert core.idle


def test_transferred_blocks_are_shared_from_their_admission_on():
    game = Play(Setup(blocks=8, block_size=2, budget=64, prefix="radix"))
    r = held(game, 5, 3)
    game.reserve(r)
    game.receive(r, 4)
    game.resume(r, load=True)
    other = game.add([1] * 5, 3)
    game.step()
    game.look()
    assert game.core.shadow.computed == [2]
    assert other.num_cached_tokens == 4
    game.end()


@pytest.mark.parametrize("stage", ["held", "reserved", "received", "loaded"])
def test_an_abort_at_any_stage_leaves_nothing(stage):
    core = ShadowCore(
        blocks=8, block_size=2, make_cache=lambda pool, events: PagedCache(pool, prefix=RadixPrefixCache(2))
    )
    r, ended = core.request([1] * 5, 3), []
    core.hold(r)
    core.watch(r, ended.append)
    if stage != "held":
        assert core.kv.reserve(r)
    if stage == "loaded":
        core.kv.loaded(r, 4)
        core.resume(r)
    core.abort(r)
    assert ended == [r]
    assert (r.finish_reason, r.status) == ("abort", "finished")
    assert not core.has_work
    assert not core.held
    assert core.idle
    core.resume(r)
    assert not core.scheduler.num_waiting, "what has ended does not come back"


def test_a_held_request_waits_without_blame_and_its_deadline_counts():
    game = Play(Setup())
    r = held(game, due_in=30.0)
    for _ in range(20):
        game.step()
    assert not r.finished
    game.now += 30
    ((ended, _),) = game.step()
    assert ended is r
    assert "deadline" in r.stop_reason
    assert game.core.idle


def test_what_cannot_be_loaded_is_said():
    core = ShadowCore(blocks=8, block_size=2)
    r = core.request([1] * 4, 3)
    core.hold(r)
    with pytest.raises(MinillmError, match="no reservation"):
        core.kv.loaded(r, 2)
    assert core.kv.reserve(r)
    for wrong in (1, 4, -2):
        with pytest.raises(MinillmError, match="whole blocks of 2"):
            core.kv.loaded(r, wrong)
    with pytest.raises(MinillmError, match="blocks already"):
        core.kv.reserve(r)
    core.abort(r)
    assert core.idle


def test_a_policy_that_fails_at_the_resume_ends_that_request_alone():
    class Once:
        def key(self, request):
            if request.params.max_tokens == 3:
                raise ValueError("no key")
            return 0.0

        def victim(self, running):
            return running[-1]

        def admit(self, request, load):
            return None

    core = ShadowCore(policy=Once())
    r, other = core.request([1] * 5, 3), core.request([1] * 5, 4)
    core.hold(r)
    core.add(other)
    assert core.kv.reserve(r)
    core.resume(r)
    core.finish_all()
    assert (r.finish_reason, other.finish_reason) == ("error", "length")
    assert core.idle
