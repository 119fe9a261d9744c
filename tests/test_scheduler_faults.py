"""What goes wrong ends the requests that it concerns, frees what they held once, and leaves the others alone.

Faults of parts (allocator, prefix cache, pool, sampler, detokenizer), aborts from inside a step, requests that can
never fit, and promises that the door makes. All over the shadow engine; streams over the real one at the end.
"""

from __future__ import annotations

import asyncio
import shutil
import threading

import pytest
from scheduler_mutants import RARE, slip
from tokenizers import Tokenizer as Backend
from tokenizers import models

from minillm import LLM, AsyncLLM, SamplingParams
from minillm.cache.blocks import BlockAllocator
from minillm.cache.namespace import PublicPrefixes
from minillm.cache.paged import PagedCache
from minillm.cache.prefix import RadixPrefixCache
from minillm.cache.tiers import HostTier, Tiers
from minillm.errors import MinillmError
from minillm.request import Status
from minillm.scheduler import Limits, SchedulerOutput
from minillm.shadow import ShadowCore, ShadowPool


class Failing:
    """Calls through to `what`, but raises at call number `at` (from 1)."""

    def __init__(self, what, at=1, error=None):
        self.what, self.at, self.calls, self.error = what, at, 0, error or RuntimeError("on fire")

    def __call__(self, *args, **options):
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return self.what(*args, **options)


def right(core, requests):
    for r in requests:
        assert r.finish_reason == "length", r.stop_reason
        assert r.output_token_ids == core.shadow.expected(r.prompt_token_ids, r.max_tokens)


def cached(pool, events, **options):
    return PagedCache(pool, prefix=RadixPrefixCache(pool.block_size), namespace="shadow", events=events, **options)


def ended(core, limit=500):
    """Everybody's last (request, text), in order; the engine must come to an end and hold nothing."""
    seen = []
    for _ in range(limit):
        if not core.has_work:
            break
        seen += core.step()
    assert not core.has_work
    assert core.idle
    return seen


# One request's own fault ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["allocate", "share"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_failing_allocator_fails_the_request_that_asked(where, at):
    core = ShadowCore(12, 2, limits=Limits(4, 64), make_cache=cached)
    first = core.request([1, 2, 3, 4, 5], 3)
    core.add(first)
    ended(core)
    setattr(core.kv.allocator, where, Failing(getattr(core.kv.allocator, where), at))
    requests = [core.request([1, 2, 3, 4, i], 4) for i in range(3)]  # each begins with two blocks that are cached
    for r in requests:
        core.add(r)
    ended(core)
    failed = [r for r in requests if r.finish_reason == "error"]
    assert len(failed) == 1
    assert "on fire" in failed[0].stop_reason
    right(core, [r for r in requests if r not in failed])


@pytest.mark.parametrize("where", ["use", "peek", "insert"])
def test_a_failing_prefix_cache_fails_the_request_that_asked(where):
    core = ShadowCore(12, 2, limits=Limits(4, 64), make_cache=cached)
    core.add(core.request([1, 2, 3, 4, 5], 3))
    ended(core)
    setattr(core.kv.prefix, where, Failing(getattr(core.kv.prefix, where), 2))
    requests = [core.request([1, 2, 3, 4, i], 4) for i in range(3)]
    for r in requests:
        core.add(r)
    ended(core)
    assert sorted(r.finish_reason for r in requests) == ["error", "length", "length"]
    right(core, [r for r in requests if r.finish_reason == "length"])


def test_a_failing_detokenizer_fails_its_own_request_and_every_other_gets_its_text():
    core = ShadowCore(12, 4, limits=Limits(4, 64))
    requests = [core.request([i], 2) for i in range(3)]
    for r in requests:
        core.add(r)
    core.outputs[requests[1]].push = Failing(core.outputs[requests[1]].push, 2)
    seen = ended(core)
    assert [r.finish_reason for r in requests] == ["length", "error", "length"]
    right(core, [requests[0], requests[2]])
    # The first ended in the very step in which the second failed: its last token is handed on all the same.
    assert [sum(r is who for r, _ in seen) for who in requests] == [2, 2, 2]
    assert isinstance(core.failures[requests[1]], RuntimeError)


def test_a_detokenizer_that_cannot_be_made_leaves_nothing_behind():
    core = ShadowCore()
    good, bad = core.request([1], 2), core.request([2], 2)
    core.add(good)
    core.make_output = Failing(core.make_output)
    with pytest.raises(RuntimeError):
        core.add(bad)
    ended(core)
    right(core, [good])
    assert bad.status == Status.WAITING


def test_a_policy_that_cannot_give_a_key_leaves_nothing_behind():
    core = ShadowCore()
    core.scheduler.waiting.key = Failing(core.scheduler.waiting.key)
    with pytest.raises(RuntimeError):
        core.add(core.request([1], 2))
    assert core.scheduler.num_waiting == 0
    good = core.request([1], 2)
    core.add(good)
    ended(core)
    right(core, [good])


@pytest.mark.parametrize("part", ["forward", "sample"])
def test_a_failing_step_fails_who_was_in_it_and_nobody_else(part):
    core = ShadowCore(12, 4, limits=Limits(2, 64))
    requests = [core.request([i], 3) for i in range(4)]
    for r in requests:
        core.add(r)
    owner = core.runner if part == "forward" else core.sampler
    setattr(owner, part, Failing(getattr(owner, part), 2))
    ended(core)
    assert [r.finish_reason for r in requests] == ["error", "error", "length", "length"]
    right(core, requests[2:])


def test_a_pool_that_cannot_be_read_makes_a_swap_a_recompute():
    class Broken(ShadowPool):
        def read_blocks(self, ids):
            raise RuntimeError("no host memory left")

    def make(pool, events):
        pool.__class__ = Broken
        return PagedCache(pool, tiers=Tiers([HostTier(10_000)]), preemption_mode="swap", events=events)

    core = ShadowCore(4, 1, limits=Limits(2, 8), make_cache=make)
    requests = [core.request([1, 2], 3) for _ in range(2)]
    for r in requests:
        core.add(r)
    ended(core)
    right(core, requests)
    assert [e.data["how"] for e in core.events.of("preempted")] == ["recompute"] * len(core.events.of("preempted"))
    assert core.events.of("preempted")


# Never fits -------------------------------------------------------------------------------------------------------


def test_many_that_can_never_fit_are_refused_one_by_one_and_the_next_proceeds():
    core = ShadowCore(blocks=2)
    big = [core.request(range(20)) for _ in range(30)]
    small = core.request([1])
    for r in [*big, small]:
        core.add(r)
    ended(core)
    assert all("even alone" in r.stop_reason for r in big)
    right(core, [small])
    assert len(core.events.of("refused")) == 30


def public_and_floor(pool, events):
    prefix = RadixPrefixCache(pool.block_size, {"a": 2})
    public = PublicPrefixes([[0, 2, 1, 1]], pool.block_size)
    return PagedCache(pool, prefix=prefix, public=public, namespace="shadow", events=events)


def test_public_blocks_below_a_floor_are_no_part_of_what_others_are_promised():
    """A floor keeps its tenant's blocks, and those hold up the public blocks that they follow."""
    core = ShadowCore(7, 2, limits=Limits(4, 64), make_cache=public_and_floor)
    core.add(core.request([0, 2, 1, 1, 2, 0, 2, 2, 1], 1, tenant="a"))
    ended(core)
    most = core.kv.capacity("b")
    assert most == 7 - 2 - 2
    other = core.request([2] * (2 * most), 1, tenant="b")
    core.add(other)
    ended(core)
    right(core, [other])
    assert core.kv.capacity("a") == 7
    own = core.request([0, 2, 1, 1] + [1] * 10, 1, tenant="a")  # its hit is held, the rest of its blocks must go
    core.add(own)
    ended(core)
    right(core, [own])


def test_alone_a_tenant_may_take_its_own_floors_public_blocks_though_it_hits_others():
    def make(pool, events):
        public = PublicPrefixes([[0], [1]], 1)
        prefix = RadixPrefixCache(1, {"a": 1})
        return PagedCache(pool, prefix=prefix, public=public, namespace="shadow", events=events)

    core = ShadowCore(4, 1, limits=Limits(4, 64), make_cache=make)
    for prompt in ([0, 2, 2], [1, 2]):  # a public block below one of a's, twice
        core.add(core.request(prompt, 1, tenant="a"))
        ended(core)
    own = core.request([1, 0, 0, 0], 1, tenant="a")
    core.add(own)
    ended(core)
    right(core, [own])


# Tiers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slipped", [False, True])
def test_a_request_that_is_swapped_shorter_than_before_leaves_nothing_in_the_tiers(slipped):
    tiers = Tiers([HostTier(100_000)])
    make_cache = slip(*RARE["a shorter swap forgets a longer one"]).cache if slipped else PagedCache

    def make(pool, events):
        return make_cache(pool, tiers=tiers, preemption_mode="swap", namespace="shadow", events=events)

    core = ShadowCore(8, 1, limits=Limits(1, 2), make_cache=make)
    r = core.request([1, 2, 3, 4, 5, 6], 2)
    core.add(r)
    core.step()
    core.step()  # 4 tokens
    core.scheduler._preempt(r, core.scheduler.schedule())
    assert len(tiers) == 4
    key = next(core.kv.swap.keys(r, 0, 1))
    tiers.discard(*key)  # as a small tier forgets its oldest
    core.step()  # the first block is missing: recomputed from the start
    assert r.num_computed_tokens == 2
    core.scheduler._preempt(r, core.scheduler.schedule())
    core.abort(r)
    assert len(tiers) == (2 if slipped else 0)
    assert core.idle


# Rule 4: what a step in flight reads is freed when it retires -----------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "sample", "schedule", "push"])
@pytest.mark.parametrize("prefix", [False, True])
def test_an_abort_from_inside_a_step_takes_effect_when_the_step_retires(where, prefix):
    core = ShadowCore(12, 2, limits=Limits(4, 64), **({"make_cache": cached} if prefix else {}))
    requests = [core.request([i, 1, 2], 4) for i in range(3)]
    for r in requests:
        core.add(r)
    core.step()
    owner = {
        "forward": core.runner, "sample": core.sampler, "schedule": core.scheduler, "push": core.outputs[requests[1]],
    }[where]  # fmt: skip
    inner, held = getattr(owner, where), []

    def aborts(*args):
        if not held:
            assert core.abort(requests[1]) == ""
            assert core.abort(requests[1]) == ""
        held.append(list(requests[1].block_ids))
        out = inner(*args)
        held.append(list(requests[1].block_ids))
        return out

    setattr(owner, where, aborts)
    done = core.step()
    setattr(owner, where, inner)
    assert all(held[:2]), "blocks of a step in flight were freed"
    assert requests[1].finish_reason == "abort"
    assert not requests[1].block_ids
    assert done[-1] == (requests[1], "")
    assert len(core.events.of("aborted")) == 1
    ended(core)
    right(core, [requests[0], requests[2]])


def test_an_abort_from_inside_the_step_in_which_the_request_ends_changes_nothing():
    core = ShadowCore()
    r = core.request([1], 1)
    core.add(r)
    forward = core.runner.forward
    core.runner.forward = lambda *args: (core.abort(r), forward(*args))[1]
    assert core.step() == [(r, "")]
    right(core, [r])
    assert not core.events.of("aborted")


def test_a_step_inside_a_step_is_refused_in_words():
    core = ShadowCore()
    r, other = core.request([1], 2), core.request([2], 2)
    core.add(r)
    forward = core.runner.forward
    core.runner.forward = lambda *args: core.step()
    core.step()
    assert r.finish_reason == "error"
    assert "a step is under way" in r.stop_reason
    core.runner.forward = forward
    core.add(other)
    ended(core)
    right(core, [other])


def test_an_interrupt_in_a_step_loses_the_step_and_not_the_engine():
    core = ShadowCore()
    r, other = core.request([1], 2), core.request([2], 2)
    core.add(r)
    forward = core.runner.forward
    core.runner.forward = Failing(forward, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        core.step()
    assert r.finish_reason == "error"
    core.add(other)
    ended(core)
    right(core, [other])


def test_a_scheduler_that_never_schedules_fails_everybody_in_words():
    core = ShadowCore()
    r = core.request([1], 2)
    core.add(r)
    core.scheduler.schedule = SchedulerOutput
    for _ in range(20):
        core.step()
    assert "scheduled nothing in 8 steps" in r.stop_reason
    assert core.idle


def test_idle_steps_of_paused_requests_are_nobodys_fault():
    core = ShadowCore()
    r = core.request([1], 2)
    core.add(r)
    core.scheduler.pause(r)
    for _ in range(20):
        assert core.step() == []
    schedule = core.scheduler.schedule
    core.scheduler.pause(r, False)
    core.scheduler.schedule = SchedulerOutput  # one idle step more, as one that only preempts
    core.step()
    core.scheduler.schedule = schedule
    ended(core)
    right(core, [r])


def test_a_finished_request_cannot_be_added_again():
    core = ShadowCore()
    r = core.request([1], 2)
    core.add(r)
    ended(core)
    with pytest.raises(MinillmError, match="before"):
        core.add(r)


def test_an_allocator_of_a_learners_that_lies_is_told_from_a_request_that_is_too_large():
    class Leaky(BlockAllocator):
        def free(self, ids):
            super().free(list(ids)[1:])

    core = ShadowCore(4, 1, make_cache=lambda pool, events: PagedCache(pool, Leaky, events=events))
    for _ in range(5):
        core.add(core.request([1, 2], 1))
    for _ in range(100):
        core.step()
    assert any("it has lost some" in f.args[0] for f in core.failures.values())


# Streams over the real engine -------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SMALL = {"num_kv_blocks": 12, "max_model_len": 64, "dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults") / "model"
    shutil.copytree(tiny_folder("qwen3"), folder)
    Backend(models.WordLevel({f"w{i}": i for i in range(211)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def streams(folder):
    with AsyncLLM(folder, **SMALL) as llm:
        yield llm


def run(work):
    return asyncio.run(asyncio.wait_for(work, 120))


async def last(stream):
    return [output async for output in stream][-1]


async def settled(llm):
    while llm.core.outputs or not llm._commands.empty():  # `run` says when it has waited too long
        await asyncio.sleep(0.01)
    heard = threading.Event()
    llm.call(heard.set)  # between steps: an end that is under way in the engine's thread is over then
    while not heard.is_set():
        await asyncio.sleep(0.01)
    llm.engine.cache.check()
    assert llm.engine.cache.num_live == 0
    assert not llm.core.outputs
    assert not llm._streams


def test_a_stream_whose_detokenizer_cannot_be_made_fails_alone(streams):
    streams.core.make_output = Failing(streams.core.make_output, 2)

    async def main():
        works = [last(streams.generate([i], GREEDY)) for i in range(3)]
        results = await asyncio.gather(*works, return_exceptions=True)
        assert sum(isinstance(r, MinillmError) and "on fire" in str(r) for r in results) == 1
        assert sum(not isinstance(r, Exception) and r.finished for r in results) == 2
        assert (await last(streams.generate([9], GREEDY))).finished
        await settled(streams)

    run(main())


def test_a_stream_that_ends_in_the_step_in_which_anothers_detokenizer_fails_is_told(streams):
    make_output, made = streams.core.make_output, []

    def make(r):
        output = make_output(r)
        made.append(r)
        if len(made) == 2:
            output.push = Failing(output.push, GREEDY.max_tokens)
        return output

    streams.core.make_output = make

    async def main():
        works = [last(streams.generate([i], GREEDY)) for i in range(3)]
        results = await asyncio.gather(*works, return_exceptions=True)
        assert sum(isinstance(r, MinillmError) and "on fire" in str(r) for r in results) == 1
        assert sum(not isinstance(r, Exception) and len(r.outputs[0].token_ids) == 6 for r in results) == 2
        await settled(streams)

    run(main())


def test_a_scheduler_that_never_schedules_ends_its_streams_in_words(streams):
    streams.core.scheduler.schedule = SchedulerOutput

    async def main():
        with pytest.raises(MinillmError, match="scheduled nothing in 8 steps"):
            await last(streams.generate([1], GREEDY))
        await settled(streams)

    run(main())


def test_cancels_from_another_thread_wait_for_the_step_in_flight(streams):
    """The engine's thread hears commands between steps only: what a forward pass reads is held until it has ended."""
    forward, inside, cancelled, held = streams.engine.runner.forward, threading.Event(), threading.Event(), []

    def slow(requests, counts):
        held.append([list(r.block_ids) for r in requests])
        inside.set()
        assert cancelled.wait(30)
        held.append([list(r.block_ids) for r in requests])
        return forward(requests, counts)

    streams.engine.runner.forward = slow

    async def main():
        task = asyncio.create_task(last(streams.generate([1, 2, 3], GREEDY)))
        await asyncio.to_thread(inside.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.05)  # the command is sent
        cancelled.set()
        await settled(streams)

    run(main())
    assert held[0] == held[1]
    assert all(held[0])


def test_a_run_that_is_collected_inside_another_runs_step_frees_nothing_that_the_step_reads(folder):
    """Python may close an abandoned generator anywhere, so also in the middle of a step that both share."""
    llm = LLM(folder, **SMALL)
    engine = llm.engine
    forward, held = engine.runner.forward, []
    mine, theirs = (engine.make_request([i, 1, 2], GREEDY) for i in (5, 6))
    alone = llm.generate([[5, 1, 2]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    other = engine.run([theirs])
    next(other)

    def closes(requests, counts):
        if theirs in requests and not held:
            other.close()
            held.append(list(theirs.block_ids))
        return forward(requests, counts)

    engine.runner.forward = closes
    for _ in engine.run([mine]):
        pass
    assert held[0]
    assert theirs.finish_reason == "abort"
    assert mine.output_token_ids == alone
    engine.cache.check()
    assert engine.cache.num_live == 0
