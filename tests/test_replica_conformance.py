"""Lesson 14: one suite for all drivers of replicas. Identical tokens, whatever runs the engine.

The embedded model is loaded once here, for the drivers in this process, and once in a process. Deaths are in
test_replica_death.py.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest
from replica_cases import empty, greedy, held, ids_of, read, until, whole
from server_life import WAIT_S

pytest.importorskip("fastapi")

from minillm import AsyncLLM, SamplingParams
from minillm.cluster.data_parallel import DataParallel
from minillm.cluster.in_process import InProcessReplica
from minillm.cluster.local_process import ProcessReplica
from minillm.cluster.remote import HttpReplica
from minillm.cluster.replica import ReplicaBusy, ReplicaLost, ReplicaState
from minillm.errors import MinillmError, RequestError
from minillm.server.local import LocalServer

ENGINE = {"dtype": "float32", "max_model_len": 128, "num_kv_blocks": 48, "threads": 1, "scheduling_policy": "priority",
          "enable_prefix_caching": True}  # fmt: skip
DRIVERS = ("in-process", "process", "remote", "data-parallel")
SEEN = ("in-process", "remote", "data-parallel")  # whose engine a test can look into
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def run():
    """Runs a coroutine on the module's one loop."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def engine(embedded_folder):
    with AsyncLLM(embedded_folder, **ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(engine):
    with LocalServer(engine, served_model_name="smol") as server:
        yield server


@pytest.fixture(scope="module")
def replicas(run, engine, server, embedded_folder):
    made = {
        "in-process": InProcessReplica(engine),
        "process": ProcessReplica(embedded_folder, start_s=600.0, answer_s=WAIT_S, **ENGINE),
        "remote": HttpReplica(server.url + "/v1", "remote", answer_s=WAIT_S),
        "data-parallel": DataParallel([InProcessReplica(engine, "a"), HttpReplica(server.url, "b", answer_s=WAIT_S)]),
    }

    async def each(method):
        await asyncio.gather(*(getattr(r, method)() for r in made.values()))

    run(each("start"))
    yield made
    run(each("close"))
    assert empty(engine)


@pytest.fixture(params=DRIVERS)
def replica(request, replicas):
    return replicas[request.param]


@pytest.fixture(params=SEEN)
def seen(request, replicas):
    return replicas[request.param]


ASKED = [
    (PROMPT, greedy(4)),
    ([504, 3575, 282, 4649, 314], greedy(3, n=2)),
    ({"prompt": "ignored", "prompt_token_ids": [504, 3575]}, SamplingParams(max_tokens=4, seed=7, temperature=0.9)),
    ("naïve 你好", SamplingParams(
        max_tokens=4, seed=3, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.5,
        frequency_penalty=0.25, logit_bias={198: -5.0}, stop=("zzz", "\n\n"), stop_token_ids=(2,), min_tokens=2, n=2,
    )),
    (PROMPT, SamplingParams(temperature=0, max_tokens=12, stop="Paris", include_stop_str_in_output=True)),
    (PROMPT, SamplingParams(temperature=0, max_tokens=12, stop="Paris", skip_special_tokens=False)),
    (list(range(600, 725)), greedy(None)),  # what the context leaves
    ("word " * 123, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)),
]  # fmt: skip


@pytest.fixture(scope="module")
def wanted(run, engine):
    async def all_of_them():
        return [await whole(engine, prompt, params) for prompt, params in ASKED]

    return run(all_of_them())


@pytest.mark.parametrize("i", range(len(ASKED)))
def test_identical_tokens(run, replica, wanted, i):
    """Against the engine itself. Every sampling parameter arrives: each changes what is drawn or where it ends."""
    got, want = run(whole(replica, *ASKED[i])), wanted[i]
    assert ids_of(got) == ids_of(want)
    assert [o.text for o in got.outputs] == [o.text for o in want.outputs]
    ends = [(o.finish_reason, o.stop_reason, o.index) for o in got.outputs]
    assert ends == [(o.finish_reason, o.stop_reason, o.index) for o in want.outputs]
    assert (got.prompt, got.prompt_token_ids, got.finished) == (want.prompt, want.prompt_token_ids, True)


def test_outputs_grow_by_what_is_new(run, replica):
    async def go():
        return [output async for output in replica.generate(PROMPT, greedy(4), "mine")]

    outputs = run(go())
    assert {o.request_id for o in outputs} == {"mine"}
    counts = [len(o.outputs[0].token_ids) for o in outputs]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    for before, after in itertools.pairwise(outputs):
        a, b = before.outputs[0], after.outputs[0]
        assert (b.token_ids[: len(a.token_ids)], b.text[: len(a.text)]) == (a.token_ids, a.text)
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].metrics["time_to_first_token"] <= outputs[-1].metrics["e2e_latency"]


def test_many_at_once(run, replica):
    prompts = [[100 + i, 200 + i, 300 + i] for i in range(4)]

    async def go():
        return await asyncio.gather(*(whole(replica, p, greedy(3)) for p in prompts))

    outputs = run(go())
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [3] * 4
    assert replica.state().requests == replica.state().outstanding_tokens == 0


BAD = [
    ("", greedy(4), {}, "prompt"),
    ([], greedy(4), {}, "prompt"),
    ([1, -1], greedy(4), {}, "prompt"),
    ([1, 10**6], greedy(4), {}, "prompt"),
    ([1.5], greedy(4), {}, "prompt"),
    ({"text": "x"}, greedy(4), {}, "prompt"),
    (7, greedy(4), {}, "prompt"),
    ([5] * 128, greedy(4), {}, "prompt"),
    (PROMPT, greedy(4, logit_bias={10**7: 1.0}), {}, "logit_bias"),
    (PROMPT, {"max_tokens": 4}, {}, "sampling_params"),
    (PROMPT, greedy(4), {"priority": 5000}, "priority"),
    (PROMPT, greedy(4), {"priority": "high"}, "priority"),
    (PROMPT, greedy(4), {"deadline_s": -1.0}, "deadline_s"),
    (PROMPT, greedy(4), {"deadline_s": float("nan")}, "deadline_s"),
    (PROMPT, greedy(4), {"request_id": 7}, "request_id"),
]  # fmt: skip


@pytest.mark.parametrize("i", range(len(BAD)))
def test_bad_input_names_its_field_and_costs_nothing(run, replica, i):
    prompt, params, whose, field = BAD[i]
    with pytest.raises(RequestError) as caught:
        run(whole(replica, prompt, params, **whose))
    assert caught.value.field == field
    state = run(replica.refresh())
    assert (state.alive, state.ready, state.requests, state.outstanding_tokens) == (True, True, 0, 0)


def test_what_a_wire_cannot_carry_is_refused(run, replicas):
    for name in ("process", "remote"):
        with pytest.raises(RequestError, match="logprobs"):
            run(whole(replicas[name], PROMPT, greedy(4, logprobs=1)))
        with pytest.raises(RequestError, match=r"tenant: 'eve' has no API key for replica"):
            run(whole(replicas[name], PROMPT, greedy(4), tenant="eve"))
        with pytest.raises(RequestError, match="request_id"):
            run(whole(replicas[name], PROMPT, greedy(4), "an id with spaces"))


def test_priority_and_id_arrive(run, seen, engine):
    queued = []
    stop = engine.engine.events.subscribe(lambda e: queued.append(e) if e.kind == "queued" else None)
    run(whole(seen, PROMPT, greedy(2), "who-7", priority=5))
    stop()
    (event,) = queued
    assert event.data["priority"] == 5
    assert event.request_id.partition("~")[0] == "who-7"


def test_a_tenants_key_says_whose_request_it_is(run, engine, tmp_path):
    alice, bob = "sk-alice-0123456789", "sk-bob-0123456789"
    file = tmp_path / "tenants.toml"
    file.write_text(f'[tenants.alice]\nkeys = ["{alice}"]\npriority = "batch"\n\n[tenants.bob]\nkeys = ["{bob}"]\n')
    queued = []
    stop = engine.engine.events.subscribe(lambda e: queued.append(e) if e.kind == "queued" else None)

    async def go(url):
        async with HttpReplica(url, api_key=bob, tenant_keys={"alice": alice}, answer_s=WAIT_S) as replica:
            await whole(replica, PROMPT, greedy(2), tenant="alice")
            await whole(replica, PROMPT, greedy(2))
            with pytest.raises(RequestError) as caught:  # better than her class
                await whole(replica, PROMPT, greedy(2), tenant="alice", priority=-1)
            assert caught.value.field == "priority"
        async with HttpReplica(url, model="smol", api_key="sk-nobody") as replica:
            with pytest.raises(MinillmError, match="API key"):
                await whole(replica, PROMPT, greedy(2))

    with LocalServer(engine, served_model_name="smol", tenants=file) as server:
        run(go(server.url))
    stop()
    assert [e.data["tenant"] for e in queued if "warm" not in e.request_id] == ["alice", "bob"]


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_deadline_that_passed_is_an_abort(run, replicas, driver):
    output = run(whole(replicas[driver], PROMPT, greedy(4, n=2), deadline_s=1e-7))
    assert [o.finish_reason for o in output.outputs] == ["abort", "abort"]
    assert ids_of(output) == [[], []]
    assert output.finished
    assert output.outputs[0].stop_reason


def test_cancel_frees_its_blocks_within_two_steps(run, seen, engine):
    """The request is cancelled while a step is held, as in a long one; beside it another goes on."""
    cancelled_within_two_steps(run, seen, engine)
    assert seen.state().requests == 0


def cancelled_within_two_steps(run, seen, engine):
    async def go():
        other = asyncio.create_task(whole(seen, [9, 8, 7], greedy(100)))
        try:
            await cancel()
        finally:
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
        await until(lambda: empty(engine), "all blocks are free")

    async def cancel():
        outputs = seen.generate([5] * 40, greedy(80))
        await read(outputs, 2)
        mine = {r for r in list(engine.core.outputs) if r.num_prompt_tokens == 40}
        assert len(mine) == 1
        with held(engine) as steps:
            await until(lambda: steps.waits, "a step is held")
            await outputs.aclose()
            await until(lambda: not engine._commands.empty(), "the engine is told")
            before = engine.engine.events.step
            await asyncio.to_thread(steps.until, lambda: not mine & set(engine.core.outputs), "it is out")
            assert engine.engine.events.step - before <= 2
            assert all(not r.block_ids for r in mine)
            assert len(engine.core.outputs) == 1

    run(go())


def test_the_count_of_steps_notices_an_engine_that_frees_late(run, replicas, engine, monkeypatch):
    """A mistake: what is cancelled stays for four steps more."""
    core, late = engine.core, {}
    abort, step = core.abort, core.step

    def later():
        out = step()
        for r in [r for r, since in late.items() if core.events.step - since > 3]:
            del late[r]
            abort(r)
        return out

    with monkeypatch.context() as patch:
        patch.setattr(core, "abort", lambda r, reason="": late.setdefault(r, core.events.step) and "")
        patch.setattr(core, "step", later)
        with pytest.raises(AssertionError):
            cancelled_within_two_steps(run, replicas["in-process"], engine)
    run(until(lambda: empty(engine), "it is free at last"))


def test_cancel_at_a_process(run, replicas):
    """Where this process stands still, the other goes on and may come to the end by itself: then once more."""
    process = replicas["process"]

    async def go():
        outputs = process.generate([5] * 40, greedy(80))
        await read(outputs, 2)
        state = await process.refresh()
        assert state.requests == 1
        blocks = state.total_blocks - state.free_blocks - state.cached_blocks
        under_way, before = state.running == 1 and blocks > 0, state.steps
        await outputs.aclose()
        while (
            state := await process.refresh()
        ).running or state.free_blocks + state.cached_blocks < state.total_blocks:
            await asyncio.sleep(0.01)
        return under_way and state.steps - before < 60  # of the 77 and more that it had left

    assert any(run(go()) for _ in range(20))


def test_the_state_is_a_snapshot(run, replica):
    async def go():
        outputs = replica.generate([5] * 30, greedy(50))
        first = anext(outputs)
        task = asyncio.ensure_future(first)
        while not replica.state().requests:
            await asyncio.sleep(0)
        before = replica.state()
        output = await task
        during = await replica.refresh()
        await outputs.aclose()
        return before, output, during

    before, output, during = run(go())
    assert (before.requests, before.outstanding_tokens) == (1, 80)  # prompt and answer
    given = len(output.outputs[0].token_ids)
    assert during.outstanding_tokens == 50 - given
    assert during.name == replica.name
    assert (during.waiting, during.alive, during.ready) == (0, True, True)
    assert during.max_model_len == 128
    assert during.total_blocks % 48 == 0
    assert ReplicaState.from_dict(during.to_dict()) == during


def test_a_drain_ends_what_is_late_and_takes_nothing_new(run, engine, server, embedded_folder):
    async def go(replica):
        async with replica:
            with held(engine):
                late = asyncio.create_task(whole(replica, PROMPT, greedy(100)))
                while not replica.state().requests or engine.core.has_work is False:
                    await asyncio.sleep(0.001)
                drain = asyncio.create_task(replica.drain(0.05))
                await asyncio.sleep(0)
                assert not replica.state().ready
                with pytest.raises(ReplicaBusy):
                    await whole(replica, PROMPT, greedy(1))
                assert await drain == 1
                with pytest.raises(ReplicaLost, match="drained"):
                    await late
            assert replica.state().alive
        return replica

    for replica in (InProcessReplica(engine, "one"), HttpReplica(server.url, "two", answer_s=WAIT_S)):
        closed = run(go(replica))
        assert not closed.state().alive
        with pytest.raises(ReplicaLost, match="closed"):
            run(whole(closed, PROMPT, greedy(1)))
        assert run(go_again(closed)) == 3  # and may start again
    run(until(lambda: empty(engine), "all blocks are free"))


async def go_again(replica):
    async with replica:
        return len((await whole(replica, PROMPT, greedy(3))).outputs[0].token_ids)


def test_closed_while_somebody_reads(run, engine):
    async def go():
        replica = InProcessReplica(engine)
        await replica.start()
        outputs = replica.generate(PROMPT, greedy(100))
        await read(outputs, 1)
        closing = asyncio.create_task(replica.close())
        with pytest.raises(ReplicaLost, match="it was closed") as caught:
            await read(outputs, 101)
        await closing
        await replica.close()
        await until(lambda: empty(engine), "all blocks are free")
        return caught.value.tokens_sent

    assert run(go()) >= 1
    assert engine.dead is None, "it is the caller's"


def test_a_drain_lets_finish_what_runs(run, engine):
    async def go():
        async with InProcessReplica(engine) as replica:
            task = asyncio.create_task(whole(replica, PROMPT, greedy(3)))
            await asyncio.sleep(0)
            assert await replica.drain(WAIT_S) == 0
            return await task

    assert len(run(go()).outputs[0].token_ids) == 3


def test_started_twice(run, replicas):
    with pytest.raises(MinillmError, match="runs already"):
        run(replicas["in-process"].start())


@pytest.mark.parametrize("name", ["", 7, None])
def test_a_replica_needs_a_name(engine, name):
    with pytest.raises(MinillmError, match="needs a name"):
        InProcessReplica(engine, name)
