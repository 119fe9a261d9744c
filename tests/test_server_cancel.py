"""Cancel: a client that leaves frees what it held, wherever its request is. Over real sockets."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import server_life
from server_life import (
    Wire,
    body,
    ended_well,
    expected,
    metric,
    serving,
    settled,
    steps,
    tasks_of,
    text_of,
    tiny_model,
    under_way,
    wait_for,
)

LONG = 7900  # tokens of an answer that nobody waits for, and that no test is slow enough to see the end of
ENGINE = {"max_model_len": 8000, "num_kv_blocks": 1024}


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return tiny_model(tiny_folder, tmp_path_factory.mktemp("cancel") / "model")


@pytest.fixture(scope="module")
def shared(folder):
    """One sequence at a time, so that a second one waits."""
    with serving(folder, engine=ENGINE | {"max_num_seqs": 1}) as server:
        yield server


@pytest.fixture
def server(shared):
    yield shared
    settled(shared)


def held(server):
    return server.state.llm.engine.cache.num_live


def gone(server):
    return metric(server, "request_errors_total", kind="client_gone")


def whole(server):
    """Sequences that were computed to their end."""
    return sum(e.data["reason"] == "length" for e in server.state.llm.engine.events.of("finished"))


def leaves(server, *wires, step=None):
    """They close. Each is counted once, and the engine must be rid of them: none is computed to its end.

    step: what holds the steps, until their leaving is heard.
    """
    before, ended = gone(server), whole(server)
    for wire in wires:
        wire.close()
    wait_for(lambda: not under_way(server) and gone(server) >= before + len(wires), "their leaving is counted")
    if step is not None:
        step.close()
    wait_for(lambda: not server.state.llm.core.outputs, "the engine is rid of them")
    assert gone(server) == before + len(wires)
    assert whole(server) == ended


@pytest.mark.parametrize("stream", [True, False])
def test_while_it_decodes(server, stream):
    with Wire(server.port) as wire:
        wire.post(body(max_tokens=LONG, stream=stream))
        wait_for(lambda: held(server), "it runs")
        leaves(server, wire)
    assert held(server) == 0


@pytest.mark.parametrize("stream", [True, False])
def test_while_it_waits_in_the_queue(server, stream):
    core = server.state.llm.core
    with Wire(server.port) as first, Wire(server.port) as second:
        first.post(body(max_tokens=LONG, stream=True)).head()
        second.post(body((9, 9), stream=stream))
        wait_for(lambda: core.scheduler.num_waiting == 1, "the second waits")
        before = gone(server)
        second.close()
        wait_for(lambda: core.scheduler.num_waiting == 0, "the second left the queue")
        wait_for(lambda: gone(server) == before + 1, "it is counted")
        assert under_way(server) == 1  # the first goes on
        ran = [e for e in server.state.llm.engine.events.of("step") if len(e.data["rows"]) > 1]
        assert ran == []
        leaves(server, first)


def test_its_blocks_are_free_within_two_steps(server, monkeypatch):
    """Steps are held back until the loop has heard: then at most two may still have had it."""
    llm = server.state.llm
    with Wire(server.port) as wire:
        wire.post(body(max_tokens=LONG, stream=True)).head()
        step, gate, seen, there = llm.core.step, threading.Semaphore(0), [], threading.Event()

        def gated():
            there.set()  # whatever step was under way has ended, and its commands were obeyed
            gate.acquire()
            seen.append(steps(server))
            return step()

        monkeypatch.setattr(llm.core, "step", gated)
        wait_for(there.is_set, "the engine stands at the gate")
        before = gone(server)
        wire.close()
        wait_for(lambda: gone(server) == before + 1 and not llm._commands.empty(), "the loop has sent the abort")
        count = len(seen)
        for _ in range(2):
            gate.release()
        wait_for(lambda: not llm.core.outputs, "gone within two steps")
        assert len(seen) - count <= 2
        assert held(server) == 0
        monkeypatch.undo()
        gate.release(10)


def test_those_who_give_up_during_a_long_step_leave_nothing_in_it(server):
    """A step that hangs hears nobody. Whoever gives up and tries again, for hours, must not fill the memory."""
    llm = server.state.llm
    with Wire(server.port) as wire, server_life.held(server) as step:
        wire.post(body(max_tokens=LONG, stream=True))
        wait_for(lambda: step.waits, "a step is held")
        queued = len(llm.engine.events.of("queued"))
        for _ in range(20):
            with Wire(server.port) as other:
                other.post(body([7] * 200, stream=True))
                wait_for(lambda: not llm._commands.empty(), "it is on its way to the engine")
            wait_for(lambda: under_way(server) == 1, "it has left")
            assert llm._commands.empty()
        assert len(llm._ids) == 1
        step.close()
        wait_for(lambda: held(server), "the first goes on")
        assert len(llm.engine.events.of("queued")) == queued
        leaves(server, wire)


def test_while_its_long_prompt_is_computed(folder):
    """A prompt of 400 tokens in chunks of 16."""
    with (
        serving(folder, engine={"max_num_batched_tokens": 16}) as server,
        Wire(server.port) as wire,
        server_life.held(server) as step,
    ):
        wire.post(body([7] * 400, 8, stream=True))
        step.until(lambda: held(server) > 1, "its prefill has begun")
        leaves(server, wire, step=step)
        first = server.state.llm.engine.events.of("first_token")
        assert len(first) == 1  # the warm-up's
        settled(server)


def test_while_its_prompt_becomes_tokens(server, monkeypatch):
    tokenizer, inside, go = server.state.tokenizer, threading.Event(), threading.Event()
    encode = type(tokenizer).encode

    def slow(self, text, *args, **kwargs):
        inside.set()
        assert go.wait(server_life.WAIT_S)
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(type(tokenizer), "encode", slow)
    queued = len(server.state.llm.engine.events.of("queued"))
    with Wire(server.port) as wire:
        wire.post(body("w5 " * 2000, stream=True))
        assert inside.wait(server_life.WAIT_S)
        leaves(server, wire)
    assert not server.state.door.meter._requests  # its place is free before the thread is done
    go.set()
    assert len(server.state.llm.engine.events.of("queued")) == queued


def test_while_its_body_is_on_its_way(server):
    with Wire(server.port) as wire:
        wire.post(body(), cut=-5)
        wait_for(lambda: any("run_asgi" in name for name in tasks_of(server)), "the body is awaited")
        leaves(server, wire)


def test_while_it_is_preempted(folder):
    engine = {"num_kv_blocks": 8, "max_model_len": 96, "enable_prefix_caching": False}
    with serving(folder, engine=engine) as server, server_life.held(server) as step:
        llm = server.state.llm
        wires = [Wire(server.port).post(body((3, 3), 80, stream=True, priority=0))]
        wait_for(lambda: step.waits, "the first has come")
        wires += [Wire(server.port).post(body((i, i), 80, stream=True, priority=0)) for i in (4, 5)]
        step.hear(2)
        out = lambda: llm.engine.events.of("preempted")
        step.until(lambda: out() and llm.core.scheduler.num_waiting, "one was preempted and waits")
        leaves(server, *wires, step=step)
        settled(server)


@pytest.mark.parametrize("fields", [{"n": 3, "temperature": 1.0}, {"prompt": [[3, 4], [5], [6, 7, 8]]}])
@pytest.mark.parametrize("stream", [True, False])
def test_with_several_answers(folder, fields, stream):
    with serving(folder, engine=ENGINE) as server, Wire(server.port) as wire:
        wire.post(body(max_tokens=LONG) | fields | {"stream": stream})
        wait_for(lambda: len(server.state.llm.core.scheduler.running) == 3, "all three run")
        leaves(server, wire)
        assert held(server) == 0
        settled(server)


@pytest.mark.parametrize("stream", [True, False])
def test_bytes_of_a_next_request_are_no_goodbye(server, folder, stream):
    """Pipelined: the second is answered after the first, on the same connection."""
    want = expected(folder, [5, 6], 60), expected(folder, [7], 3)
    with Wire(server.port) as wire:
        before = gone(server)
        with server_life.held(server) as step:
            wire.post(body(max_tokens=60, stream=stream))
            wait_for(lambda: step.waits, "the first is under way")
            wire.post(body((7,), 3), cut=40)
            wire.socket.sendall(rest(body((7,), 3), 40))
        first, second = wire.answer()[2], wire.answer()[2]
        if stream:
            assert ended_well(first)
            assert text_of(first) == want[0]
        else:
            assert first["choices"][0]["text"] == want[0]
        assert second["choices"][0]["text"] == want[1]
        assert gone(server) == before


def rest(data, cut):
    raw = json.dumps(data).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode()[cut:] + raw


@pytest.mark.parametrize("stream", [True, False])
def test_a_goodbye_behind_a_pipelined_request_is_heard(server, stream):
    with Wire(server.port) as wire:
        wire.post(body(max_tokens=LONG, stream=stream))
        wait_for(lambda: held(server), "it runs")
        wire.post(body((7,), 3))
        before = gone(server)
        wire.close()
        wait_for(lambda: gone(server) == before + 1, "the client's leaving is heard")
    wait_for(lambda: not under_way(server) and not server.state.llm.core.outputs, "and ends the call")
    assert server.state.llm.engine.events.of("finished")[-1].data["output_tokens"] < LONG


def test_keep_alive_answers_many_and_counts_none_as_gone(server):
    before = gone(server)
    with Wire(server.port) as wire:
        for i in range(20):
            status, _, answer = wire.post(body((i + 2,), 2, stream=i % 2 == 0)).answer()
            assert status == 200, answer
    assert gone(server) == before


def test_a_thousand_cancels_at_random_moments_leave_nothing(folder, tmp_path):
    rng, traces = random.Random(13), tmp_path / "traces.jsonl"
    engine = {"num_kv_blocks": 24, "max_model_len": 128, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    kinds = [{}, {"n": 2, "temperature": 1.0}, {"prompt": [[3, 4], [5]]}, {"prompt": "w7 " * 40}, {"prompt": [9] * 90}]

    def one(port, seed):
        rng = random.Random(seed)
        fields = body(max_tokens=rng.randint(1, 30), stream=rng.random() < 0.6, user="u") | rng.choice(kinds)
        kind = rng.choices(("cut", "stays", "head", "pause"), (10, 10, 16, 64))[0]
        wire = Wire(port).post(fields, cut=rng.randint(100, 200) if kind == "cut" else None)
        if kind == "stays":
            wire.answer()
        elif kind == "head":
            wire.until(b"\r\n\r\n")
        else:
            time.sleep(rng.random() ** 3 * 0.05)  # any moment will do
        (wire.close if rng.random() < 0.5 else wire.reset)()
        return kind

    with serving(folder, engine=engine, max_queued_requests=10_000, max_queued_tokens=10**9, trace_file=traces) as s:
        with ThreadPoolExecutor(8) as pool:
            kinds_of_end = list(pool.map(lambda seed: one(s.port, seed), [rng.random() for _ in range(1000)]))
        settled(s)
        assert s.state.traces.flush(server_life.WAIT_S)
        records = [json.loads(line) for line in traces.read_text().splitlines()]
        told = {status: sum(r["status"] == status for r in records) for status in (200, 499, 400, 408)}
        assert sum(told.values()) == len(records)
        assert told[200] >= kinds_of_end.count("stays") > 50  # at both ends of a life, however fast the machine is
        assert told[499] > 50
        assert gone(s) == told[499]
        assert 0 < metric(s, "http_requests_total", status="499") < told[499]  # the others had been sent a status
        assert metric(s, "http_requests_total", route="/v1/completions") == len(records)
        assert all(sum(e - b for _, b, e in r["spans"]) == r["e2e_ns"] for r in records)
        with Wire(s.port) as wire:
            assert wire.post(body()).answer()[0] == 200
