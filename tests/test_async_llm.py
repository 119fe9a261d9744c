"""AsyncLLM: many streams over one engine, cancelled at any time, stalled without harm, ended in words."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import shutil
import threading
import time

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from minillm import LLM, AsyncLLM, MinillmError, SamplingParams
from minillm.async_llm import IDLE_WAIT_S
from minillm.core import MAX_IDLE_STEPS
from minillm.errors import RequestError
from minillm.llm import Given
from minillm.models.detokenizer import IncrementalDetokenizer
from minillm.policy import FirstCome
from minillm.scheduler import Scheduler, SchedulerOutput

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6], [7] * 20, [8], [9] * 33, [10, 11, 12]]
SMALL = {"num_kv_blocks": 12, "max_model_len": 64, "dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    """A random Qwen3 of 211 words."""
    folder = tmp_path_factory.mktemp("async") / "model"
    shutil.copytree(tiny_folder("qwen3"), folder)
    Backend(models.WordLevel({f"w{i}": i for i in range(211)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def make(folder):
    made = []

    def build(**options):
        made.append(AsyncLLM(folder, **(SMALL | options)))
        return made[-1]

    yield build
    for llm in made:
        llm.shutdown()
        assert not llm._thread.is_alive()


@pytest.fixture(scope="module")
def alone(folder):
    """What each prompt gives in an engine of its own."""
    llm = LLM(folder, **SMALL)
    return [llm.generate([p], GREEDY, use_tqdm=False)[0].outputs[0] for p in PROMPTS]


async def last(stream):
    return [output async for output in stream][-1]


async def until(true, what):
    end = time.monotonic() + 60  # of a machine that is busy with other things
    while not true():
        assert time.monotonic() < end, f"it never happened: {what}"
        await asyncio.sleep(0.002)


async def settled(llm):
    """Commands are heard between steps: wait for the engine's thread, then look."""
    await until(lambda: not llm.core.outputs and llm._commands.empty(), "the engine has heard of all ends")
    heard = threading.Event()
    llm.call(heard.set)
    await until(heard.is_set, "what it did before is done")
    cache = llm.engine.cache
    cache.check()
    assert cache.num_live == 0
    assert not llm.core.outputs
    assert not llm._streams
    assert not llm._ids
    assert not llm.core.failures
    return cache.num_free + cache.num_cached == cache.pool.num_blocks


def run(work, timeout=600):
    return asyncio.run(asyncio.wait_for(work, timeout))


def test_streams_give_what_each_prompt_gives_alone(make, alone):
    llm = make()

    async def main():
        outputs = await asyncio.gather(*[last(llm.generate(p, GREEDY)) for p in PROMPTS])
        assert [o.outputs[0].token_ids for o in outputs] == [a.token_ids for a in alone]
        assert [o.outputs[0].text for o in outputs] == [a.text for a in alone]
        assert all(o.finished and o.outputs[0].finish_reason == "length" for o in outputs)
        assert await settled(llm)

    run(main())


def test_outputs_grow_token_by_token_and_only_the_last_is_finished(make, alone):
    llm = make()

    async def main():
        seen = [o async for o in llm.generate(PROMPTS[0], GREEDY, request_id="mine")]
        counts = [len(o.outputs[0].token_ids) for o in seen]
        assert counts == sorted(counts)
        assert counts[-1] == 12
        assert [o.finished for o in seen] == [False] * (len(seen) - 1) + [True]
        assert all(o.outputs[0].finish_reason is None for o in seen[:-1])
        assert all(alone[0].text.startswith(o.outputs[0].text) for o in seen)
        assert {o.request_id for o in seen} == {"mine"}

    run(main())


def test_a_thousand_cancels_at_random_times_leave_nothing(make):
    llm, rng = make(num_kv_blocks=6, max_num_batched_tokens=16), random.Random(0)

    async def leave(prompt, after):
        async for o in llm.generate(prompt, GREEDY):
            if len(o.outputs[0].token_ids) >= after:
                break

    async def torn(prompt, seconds):
        task = asyncio.create_task(last(llm.generate(prompt, GREEDY)))
        await asyncio.sleep(seconds)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # unless it had finished already
            await task

    async def main():
        for _ in range(20):
            works = []
            for _ in range(50):
                prompt = [rng.randrange(211) for _ in range(rng.randint(1, 50))]
                some = leave(prompt, rng.randint(0, 6)) if rng.random() < 0.5 else torn(prompt, rng.random() * 0.05)
                works.append(some)
            await asyncio.gather(*works)
        assert await settled(llm)
        assert (await last(llm.generate([5], GREEDY))).finished

    run(main())


def test_a_stalled_reader_is_paused_and_nobody_else_waits(make, alone):
    llm = make(max_buffered=2)

    async def main():
        stalled = llm.generate(PROMPTS[0], GREEDY)
        await anext(stalled)
        others = await asyncio.gather(*[last(llm.generate(p, GREEDY)) for p in PROMPTS[1:]])
        assert [o.outputs[0].token_ids for o in others] == [a.token_ids for a in alone[1:]]
        await until(lambda: len(llm.core.outputs) == 1, "the others have ended")
        (request,) = llm.core.outputs
        assert request.paused
        assert len(request.output_token_ids) <= 2 + 2  # the buffer, and what was under way
        assert (await last(stalled)).outputs[0].token_ids == alone[0].token_ids
        assert await settled(llm)

    run(main())


def test_a_stalled_reader_gives_way_when_memory_is_short(make, alone):
    llm = make(max_buffered=1, num_kv_blocks=4)

    async def main():
        stalled = llm.generate(PROMPTS[3], GREEDY)  # 3 of the 4 blocks
        await anext(stalled)
        assert (await last(llm.generate(PROMPTS[1], GREEDY))).outputs[0].token_ids == alone[1].token_ids
        assert llm.engine.events.of("preempted")
        assert (await last(stalled)).outputs[0].token_ids == alone[3].token_ids
        assert await settled(llm)

    run(main())


def test_an_expired_request_never_runs(make):
    llm = make(max_num_seqs=1)

    async def main():
        first = asyncio.create_task(last(llm.generate([5], GREEDY.replace(max_tokens=60))))
        await asyncio.sleep(0)
        output = await last(llm.generate([6], GREEDY, deadline_s=1e-6))
        assert output.outputs[0].finish_reason == "abort"
        assert "deadline" in output.outputs[0].stop_reason
        assert output.outputs[0].token_ids == []
        assert not any(name == output.request_id for e in llm.engine.events.of("step") for name, *_ in e.data["rows"])
        assert (await first).finished
        assert await settled(llm)

    run(main())


def test_a_failing_step_fails_its_requests_and_not_the_engine(make, alone, monkeypatch):
    llm = make()
    forward, calls = llm.engine.runner.forward, []

    def fails(*args):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the device is on fire")
        return forward(*args)

    monkeypatch.setattr(llm.engine.runner, "forward", fails)

    async def main():
        results = await asyncio.gather(*[last(llm.generate(p, GREEDY)) for p in PROMPTS[:3]], return_exceptions=True)
        assert any(isinstance(r, MinillmError) and "on fire" in str(r) for r in results)
        assert (await last(llm.generate(PROMPTS[2], GREEDY))).outputs[0].token_ids == alone[2].token_ids
        assert await settled(llm)

    run(main())


def test_bad_input_is_refused_before_anything_is_queued(make):
    llm = make()

    async def main():
        for prompt, how, field in (
            ([], {}, "prompt"), ([999], {}, "prompt"), (5, {}, "prompt"), ([1], {"priority": "high"}, "priority"),
            ([1], {"priority": 1}, "priority"),
            ([1], {"deadline_s": 0}, "deadline_s"), ([1], {"tenant": 5}, "tenant"),
            ([1], {"request_id": 5}, "request_id"),
            ([1], {"sampling_params": {"n": 2}}, "sampling_params"),
        ):  # fmt: skip
            with pytest.raises(RequestError) as error:
                await last(llm.generate(prompt, **how))
            assert error.value.field == field
        assert await settled(llm)

    run(main())


def test_an_id_under_way_cannot_be_used_again(make):
    llm = make()

    async def main():
        stream = llm.generate([5], GREEDY, request_id="a")
        await anext(stream)
        with pytest.raises(RequestError, match="under way"):
            await anext(llm.generate([5], GREEDY, request_id="a"))
        await stream.aclose()
        assert (await last(llm.generate([5], GREEDY, request_id="a"))).finished

    run(main())


def test_several_completions_of_one_prompt(make, folder):
    llm, params = make(), SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True)
    own = LLM(folder, **SMALL).generate([[5, 6]], params, use_tqdm=False)[0]

    async def main():
        output = await last(llm.generate([5, 6], params))
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in own.outputs]
        assert [c.index for c in output.outputs] == [0, 1, 2]

    run(main())


def test_a_shutdown_ends_every_stream_in_words_and_later_ones_at_the_door(make):
    """While none of them can end: their third token comes when the shutdown has been asked for."""
    llm, asked = make(), threading.Event()
    compute, steps = llm.core._compute, []

    def third(*args):
        steps.append(args)
        assert len(steps) < 3 or asked.wait(60)
        return compute(*args)

    llm.core._compute = third
    shut = lambda: (llm._commands.put(None), asked.set(), llm.shutdown())

    async def main():
        tasks = [asyncio.create_task(last(llm.generate([5], GREEDY.replace(max_tokens=60)))) for _ in range(3)]
        await until(lambda: len(steps) == 3, "they are under way")
        await asyncio.to_thread(shut)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, MinillmError)
            assert "shut down" in str(result)
        with pytest.raises(MinillmError, match="has ended"):
            await last(llm.generate([5], GREEDY))

    run(main())


def test_it_needs_an_engine_that_requests_may_join(folder):
    with pytest.raises(MinillmError, match="kv_cache='paged'"):
        AsyncLLM(folder, **(SMALL | {"batching": "static"}))
    with pytest.raises(MinillmError, match="max_buffered"):
        AsyncLLM(folder, max_buffered=0, **SMALL)


def test_two_loops_in_two_threads_share_the_engine(make, alone):
    llm = make()
    results = {}

    def own_loop(i):
        results[i] = run(last(llm.generate(PROMPTS[i], GREEDY))).outputs[0].token_ids

    threads = [threading.Thread(target=own_loop, args=(i,)) for i in range(len(PROMPTS))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {i: a.token_ids for i, a in enumerate(alone)}


# A fault of one stream, and of nobody else ----------------------------------------------------------------------


class Kept(Scheduler):
    """A learner's scheduler that queues and never schedules."""

    def schedule(self):
        return SchedulerOutput()


class KeyFails(FirstCome):
    def key(self, request):
        if request.tenant == "bad":
            raise KeyError("no such tenant")
        return super().key(request)


class AddFails(Scheduler):
    def add(self, request):
        if request.tenant == "bad":
            raise KeyError("no such tenant")
        super().add(request)


class NoPause:
    """A learner's scheduler with what the protocol asks for, and nothing else."""

    def __init__(self, *arguments):
        self._inner = Scheduler(*arguments)
        self.add, self.schedule, self.finish = self._inner.add, self._inner.schedule, self._inner.finish

    running = property(lambda self: self._inner.running)
    num_waiting = property(lambda self: self._inner.num_waiting)


class PauseFails(Scheduler):
    def pause(self, request, paused=True):
        raise KeyError("cannot pause")


def test_a_scheduler_that_schedules_nothing_ends_the_stream_in_words(make):
    llm = make(parts={"scheduler": Kept})

    async def main():
        with pytest.raises(MinillmError, match="scheduled nothing"):
            await last(llm.generate([5], GREEDY))
        assert await settled(llm)

    run(main())


def test_an_engine_whose_readers_all_stall_neither_spins_nor_fails(make, alone):
    llm, steps = make(max_buffered=2), []
    step = llm.core.step

    def counted():
        steps.append(time.monotonic())
        return step()

    llm.core.step = counted

    async def main():
        streams = [llm.generate(p, GREEDY) for p in PROMPTS[:2]]
        for s in streams:
            await anext(s)
        while len(llm._paused) < 2:
            await asyncio.sleep(0.001)
        del steps[:]
        while len(steps) < 3 * MAX_IDLE_STEPS:  # long enough to be taken for a fault
            await asyncio.sleep(0.01)
        assert all(b - a >= 0.9 * IDLE_WAIT_S for a, b in itertools.pairwise(steps))  # it waits in between
        assert [(await last(s)).outputs[0].token_ids for s in streams] == [a.token_ids for a in alone[:2]]
        assert await settled(llm)

    run(main())


@pytest.mark.parametrize("parts", [{"policy": KeyFails()}, {"scheduler": AddFails}])
def test_a_part_that_fails_for_one_request_fails_that_stream_alone(make, alone, parts):
    llm = make(parts=parts)

    async def main():
        bad = last(llm.generate(PROMPTS[0], GREEDY.replace(n=2), tenant="bad"))
        results = await asyncio.gather(last(llm.generate(PROMPTS[1], GREEDY)), bad, return_exceptions=True)
        assert results[0].outputs[0].token_ids == alone[1].token_ids
        assert isinstance(results[1], MinillmError)
        assert "no such tenant" in str(results[1])
        assert (await last(llm.generate(PROMPTS[2], GREEDY))).outputs[0].token_ids == alone[2].token_ids
        assert await settled(llm)

    run(main())


def test_a_detokenizer_that_cannot_be_made_fails_its_stream_alone(make, alone):
    def detokenizer(tokenizer, prompt, skip):
        if prompt == [66]:
            raise KeyError("no text for 66")
        return IncrementalDetokenizer(tokenizer, prompt, skip)

    llm = make(parts={"detokenizer": detokenizer})

    async def main():
        with pytest.raises(MinillmError, match="no text for 66"):
            await last(llm.generate([66], GREEDY))
        assert (await last(llm.generate(PROMPTS[2], GREEDY))).outputs[0].token_ids == alone[2].token_ids
        assert await settled(llm)

    run(main())


def test_a_scheduler_that_cannot_pause_fails_the_stalled_stream_alone(make, alone):
    llm = make(max_buffered=1, parts={"scheduler": PauseFails})

    async def main():
        stalled = llm.generate(PROMPTS[0], GREEDY)
        with pytest.raises(MinillmError, match="cannot pause"):
            await last(stalled)
        llm.max_buffered = 100
        assert (await last(llm.generate(PROMPTS[2], GREEDY))).outputs[0].token_ids == alone[2].token_ids
        assert await settled(llm)

    run(main())


def test_a_bound_that_a_scheduler_cannot_keep_is_refused_at_the_start(folder, make, alone):
    with pytest.raises(MinillmError, match="max_buffered needs a scheduler with pause"):
        AsyncLLM(folder, max_buffered=2, parts={"scheduler": NoPause}, **SMALL)
    llm = make(parts={"scheduler": NoPause})
    assert llm.max_buffered is None

    async def main():
        assert (await last(llm.generate(PROMPTS[0], GREEDY))).outputs[0].token_ids == alone[0].token_ids

    run(main())


@pytest.mark.parametrize("buffered", [1, 64])
def test_a_loop_that_was_closed_gives_its_blocks_back(make, alone, buffered):
    """Whether its stream is paused or running: nobody will ever read it."""
    llm, loop = make(max_buffered=buffered), asyncio.new_event_loop()
    stream = llm.generate(PROMPTS[0], GREEDY.replace(max_tokens=60), request_id="mine")
    loop.run_until_complete(anext(stream))
    if buffered == 1:
        asyncio.run(until(lambda: llm._paused, "it is paused"))
    loop.close()

    async def main():
        assert await settled(llm)
        output = await last(llm.generate(PROMPTS[1], GREEDY, request_id="mine"))
        assert output.outputs[0].token_ids == alone[1].token_ids

    run(main())
    with contextlib.suppress(RuntimeError, StopAsyncIteration):
        asyncio.run(stream.aclose())


# What a stream is given ----------------------------------------------------------------------------------------


def test_an_output_is_a_snapshot_that_does_not_grow(make, folder):
    llm, params = make(), GREEDY.replace(logprobs=2)
    own = LLM(folder, **SMALL).generate([[5, 6]], params, use_tqdm=False)[0].outputs[0]

    async def main():
        seen = [(o, len(o.outputs[0].token_ids)) async for o in llm.generate([5, 6], params)]
        for o, count in seen:
            (c,) = o.outputs
            assert len(c.token_ids) == len(c.logprobs) == count
            assert c.token_ids == own.token_ids[:count]
            want = sum(entry[t].logprob for t, entry in zip(c.token_ids, c.logprobs, strict=True))
            assert c.cumulative_logprob == pytest.approx(want)
        assert seen[-1][0].outputs[0].cumulative_logprob == own.cumulative_logprob

    run(main())


def test_each_chosen_token_is_summed_once(make, monkeypatch):
    """The work of an output does not grow with what was given before."""
    taken, take = [], Given.take
    monkeypatch.setattr(Given, "take", lambda self, r, piece, count, last: (
        taken.append(count - self.count), take(self, r, piece, count, last)))  # fmt: skip
    llm = make()

    async def main():
        await last(llm.generate([5, 6], GREEDY.replace(max_tokens=40, logprobs=1)))

    run(main())
    assert sum(taken) == 40


def test_the_log_carries_the_callers_id_from_the_start_and_the_refusals_of_the_door(make):
    llm = make(num_kv_blocks=3)

    async def main():
        await last(llm.generate([5], GREEDY, request_id="mine"))
        await last(llm.generate([5], GREEDY.replace(n=2), request_id="two"))
        for prompt, params, field in (
            ([999], GREEDY, "prompt"), ([5], GREEDY.replace(max_tokens=60), "max_tokens"),
        ):  # fmt: skip
            with pytest.raises(RequestError):
                await last(llm.generate(prompt, params, request_id="bad"))
            event = llm.engine.events.of("refused")[-1]
            assert (event.request_id, event.data["field"]) == ("bad", field)
            assert event.data["reason"]
        assert await settled(llm)

    run(main())
    assert [e.request_id for e in llm.engine.events.of("queued")] == ["mine", "two-0", "two-1"]
    assert {e.request_id for e in llm.engine.events} == {"", "mine", "two-0", "two-1", "bad"}


def test_a_policy_at_the_door_sees_the_engine_while_it_runs(make):
    class Door(FirstCome):
        def __init__(self):
            self.loads = []

        def admit(self, request, load):
            self.loads.append(load)
            return "we are full" if load.running + load.waiting >= 3 else None

    policy = Door()
    llm = make(parts={"policy": policy}, enable_prefix_caching=True, cache_floors={"a": 2})

    async def main():
        works = [last(llm.generate([i] * 20, GREEDY, tenant="ab"[i % 2])) for i in range(40)]
        results = await asyncio.gather(*works, return_exceptions=True)
        refused = [r for r in results if isinstance(r, RequestError) and "we are full" in str(r)]
        assert len(refused) + sum(not isinstance(r, Exception) for r in results) == 40
        assert len(refused) == len(llm.engine.events.of("refused"))
        assert await settled(llm)

    run(main())
    assert len(policy.loads) == 40
    assert all(0 <= load.free_blocks <= load.total_blocks == 12 for load in policy.loads)


def test_a_conversation_is_answered_as_llm_answers_it(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "chat")
    template = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
    (copy / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    messages = [{"role": "user", "content": "w5 w6"}]
    want = LLM(copy, **SMALL).chat(messages, GREEDY, use_tqdm=False, tenant="a", deadline_s=60)[0]

    async def main(llm):
        got = await last(llm.chat(messages, GREEDY, request_id="c", tenant="a", deadline_s=60))
        assert (got.prompt, got.prompt_token_ids) == (want.prompt, want.prompt_token_ids)
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
        for wrong in ("hi", [], [{"role": "user"}, 5]):
            with pytest.raises(MinillmError):
                await last(llm.chat(wrong, GREEDY))
        with pytest.raises(RequestError, match="chat_template_kwargs"):
            await last(llm.chat(messages, GREEDY, chat_template_kwargs=5))

    with AsyncLLM(copy, **SMALL) as llm:
        run(main(llm))


def test_a_step_wakes_the_readers_loop_once_however_many_read(make):
    """Each wake is a write to the loop's own socket, by the engine's thread. Mutation: one a stream is four a step."""
    wakes, together = [], threading.Event()

    async def main(llm):
        loop = asyncio.get_running_loop()
        real = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *a, **k: (wakes.append(a), real(*a, **k))[1]
        llm.call(lambda: together.wait(60))  # no step before all four are there
        work = [asyncio.create_task(last(llm.generate([5 + i], GREEDY.replace(max_tokens=8)))) for i in range(4)]
        await until(lambda: llm._commands.qsize() == 4, "all are there")
        together.set()
        return await asyncio.gather(*work)

    llm = make()
    outputs = run(main(llm))
    steps = len(llm.engine.events.of("step"))
    assert [len(o.outputs[0].token_ids) for o in outputs] == [8] * 4
    assert len(wakes) == steps == 8
