"""When the engine ends, stalls, or the whole process is killed: everybody is told at once, and nothing hangs."""

from __future__ import annotations

import gc
import threading
import urllib.request
import weakref

import pytest
from server_life import (
    SMALL,
    WAIT_S,
    Wire,
    body,
    expected,
    lasting_port,
    metric,
    serving,
    settled,
    text_of,
    tiny_model,
    under_way,
    wait_for,
)
from test_server_drain import LONG, outcome, process

from minillm import AsyncLLM
from minillm.server.local import LocalServer

ENGINE = {"max_model_len": 8000, "num_kv_blocks": 1000}
DIES = """
import sys, threading
from minillm.cli import main
from minillm.core import EngineCore
from minillm.server.http import EventStream
compute, steps, write, begun = EngineCore._compute, [], EventStream.write, threading.Event()
async def noted(self, data):
    await write(self, data)
    begun.set()
EventStream.write = noted
def dies(self, *args):
    steps.append(1)
    if len(steps) > 60:
        begun.wait(600)  # a stream that has not begun would be told by its status
        raise SystemExit("the device has fallen off the bus")
    return compute(self, *args)
EngineCore._compute = dies
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return tiny_model(tiny_folder, tmp_path_factory.mktemp("dead") / "model")


def break_engine(server, monkeypatch, error):
    def forward(*args, **kwargs):
        raise error

    monkeypatch.setattr(server.state.llm.engine.runner, "forward", forward)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), BaseException("odd")], ids=repr)
def test_everybody_is_told_when_the_engine_has_ended(folder, monkeypatch, error):
    monkeypatch.setattr("minillm.server.run.LOOK_S", 3600.0)  # the server stays, so that one can ask it
    with serving(folder, engine=ENGINE | {"max_num_seqs": 2}) as server:
        wires = [Wire(server.port) for _ in range(5)]
        streams = [w.post(body(max_tokens=LONG, stream=True)) for w in wires[:2]]
        waits = [w.post(body(max_tokens=9, stream=i == 0)) for i, w in enumerate(wires[2:4])]
        several = wires[4].post(body([[3], [4]], max_tokens=9))
        heads = [w.head()[0] for w in streams]
        wait_for(lambda: under_way(server) == 5, "all are under way")
        break_engine(server, monkeypatch, error)
        for status, wire in zip(heads, streams, strict=True):
            events = list(wire.events())
            assert status == 200
            assert events[-1]["error"]["code"] == "engine_dead"
            assert "[DONE]" not in events
        for wire in (*waits, several):
            status, _, answer = wire.answer()
            assert (status, answer["error"]["code"]) == (503, "engine_dead")
        with Wire(server.port) as wire:
            for path in ("/health", "/ready"):
                assert wire.get(path).answer()[0] == 503
            status, _, answer = wire.post(body()).answer()
            assert (status, answer["error"]["code"]) == (503, "engine_dead")
            assert answer["error"]["type"] == "overloaded_error"
            assert wire.get("/metrics").answer()[0] == 200
            server.state.lifecycle.draining = True  # as it does when the server sees it
            assert wire.post(body()).answer()[2]["error"]["code"] == "engine_dead"
        assert metric(server, "request_errors_total", kind="engine") == 7
        assert not server.state.llm.core.outputs
        assert not server.state.door.meter._requests


def test_a_server_ends_with_its_engine(folder):
    with process(folder, program=("-c", DIES)) as (p, port):
        wire = Wire(port)
        wire.post(body(max_tokens=LONG, stream=True))
        events = wire.answer()[2]
        assert events[-1]["error"]["code"] == "engine_dead"
        code, last, _ = outcome(p)
        assert (code, last["event"]) == (1, "ended")


def test_a_step_that_fails_ends_its_requests_and_not_the_server(folder, monkeypatch):
    with serving(folder, engine=ENGINE) as server, Wire(server.port) as stream, Wire(server.port) as whole:
        stream.post(body(max_tokens=LONG, stream=True)).head()
        whole.post(body((7,), LONG))
        wait_for(lambda: len(server.state.llm.core.scheduler.running) == 2, "both run")
        break_engine(server, monkeypatch, RuntimeError("a secret of the device"))
        events = list(stream.events())
        status, _, answer = whole.answer()
        monkeypatch.undo()
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert events[-1]["error"]["type"] == "server_error"
        assert "[DONE]" not in events
        assert "secret" not in str(answer) + str(events)
        assert text_of(stream.post(body(stream=True)).answer()[2]) == expected(folder, [5, 6], 8)
        settled(server)
        assert metric(server, "request_errors_total", kind="engine") == 2


def test_a_step_that_stalls_shows_in_ready_and_not_in_health(folder, monkeypatch):
    with serving(folder, engine=ENGINE, stall_s=0.2) as server, Wire(server.port) as wire, Wire(server.port) as ask:
        runner, go = server.state.llm.engine.runner, threading.Event()
        forward = runner.forward

        def stalls(*args, **kwargs):
            assert go.wait(WAIT_S)
            return forward(*args, **kwargs)

        monkeypatch.setattr(runner, "forward", stalls)
        wire.post(body(max_tokens=20, stream=True))
        answer = wait_for(lambda: (a := ask.get("/ready").answer())[0] == 503 and a[2], "it is not ready")
        assert "no step has progressed" in answer["error"]["message"]
        assert ask.get("/health").answer()[0] == 200
        with Wire(server.port) as leaves:  # whoever leaves now is rid of at the next step
            leaves.post(body((9,), stream=True))
            wait_for(lambda: under_way(server) == 2, "it is under way")
        wait_for(lambda: under_way(server) == 1, "its call has ended while the step stalls")
        go.set()
        assert text_of(wire.answer()[2]) == expected(folder, [5, 6], 20)
        wait_for(lambda: ask.get("/ready").answer()[0] == 200, "it is ready again")
        settled(server)


def test_a_server_that_is_killed_is_noticed_at_once_and_can_be_started_again(folder):
    openai = pytest.importorskip("openai")
    with process(folder, port=lasting_port()) as (p, port):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0, timeout=600)
        asked = {"model": "tiny", "prompt": [5, 6], "max_tokens": LONG, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(**asked, stream=True)
        next(iter(stream))
        failures = []

        def whole():
            try:
                client.completions.create(**asked)
            except Exception as error:
                failures.append(error)

        waits = threading.Thread(target=whole)
        waits.start()
        with Wire(port) as wire:
            inside = lambda: wire.get("/metrics").answer()[2].split("num_requests_running{")[1].split("\n")[0]
            wait_for(lambda: inside().endswith(" 2.0"), "both run")
        p.kill()
        with pytest.raises(Exception, match="peer closed|onnection|reset"):  # a stream that breaks off is no whole one
            list(stream)
        waits.join(WAIT_S)
        assert [type(e) for e in failures] == [openai.APIConnectionError]
        with pytest.raises(openai.APIConnectionError):
            client.completions.create(**asked)
    with process(folder, port=port) as (_, again):
        assert again == port
        answer = client.completions.create(**asked | {"max_tokens": 8}, temperature=0)
        assert answer.choices[0].text == expected(folder, [5, 6], 8)
        client.close()


def test_a_server_that_has_ended_keeps_no_model(folder):
    """FastAPI remembers routes for good; an engine must not be among what they remember."""
    gone = []

    def once():
        llm = AsyncLLM(folder, **SMALL)
        gone.append(weakref.ref(llm.engine.model))
        with llm, LocalServer(llm) as server:
            urllib.request.urlopen(f"{server.url}/metrics", timeout=WAIT_S).read()

    once()
    gc.collect()
    assert gone[0]() is None
