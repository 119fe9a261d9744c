"""How a server ends: it drains, in words, and its exit code says whether every answer was finished."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from server_life import (
    WAIT_S,
    Wire,
    body,
    ended_well,
    expected,
    metric,
    serving,
    settled,
    text_of,
    tiny_model,
    under_way,
    wait_for,
)

LONG = 7900
TAKES = 4096  # bytes that the kernel holds for a reader that must not be done too early
LARGE = {"stream": True, "logprobs": 5}  # a stream with bytes for each token, also where an event has several tokens
ENGINE = {"max_model_len": 8000, "num_kv_blocks": 1000}
FLAGS = ["--max-model-len", "8000", "--num-kv-blocks", "1000", "--dtype", "float32", "--threads", "1", "--json"]


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return tiny_model(tiny_folder, tmp_path_factory.mktemp("drain") / "model")


@contextmanager
def process(folder, *flags, port=0, program=("-m", "minillm")):
    """`minillm serve` as an operator runs it. Gives (the process, its port) when it is ready."""
    command = [sys.executable, *program, "serve", "--model", str(folder), "--served-model-name", "tiny", "--port"]
    with subprocess.Popen(
        [*command, str(port), *FLAGS, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as p:  # fmt: skip
        try:
            assert p.stdout is not None
            line = p.stdout.readline()
            assert line, p.communicate()[1]
            facts = json.loads(line)
            assert facts["event"] == "ready"
            yield p, int(facts["url"].rpartition(":")[2])
        finally:
            p.kill()
            p.communicate()


def outcome(p):
    """(exit code, the last line, the log) of a process that must end by itself."""
    out, log = p.communicate(timeout=WAIT_S)
    assert "Traceback" not in log
    return p.returncode, json.loads(out.splitlines()[-1]), log


def refused(port):
    """Ask until the server says that it drains."""

    def ask():
        with Wire(port) as wire:
            status, headers, answer = wire.post(body(max_tokens=1)).answer()
        return (headers, answer) if status == 503 else None

    headers, answer = wait_for(ask, "new requests are refused")
    assert answer["error"]["code"] == "draining"
    assert answer["error"]["type"] == "overloaded_error"
    assert headers["retry-after"] == "1"


def test_sigterm_lets_a_stream_finish_and_refuses_new_ones(folder):
    with process(folder, "--grace-s", "600") as (p, port):
        idle, stream = Wire(port), Wire(port, TAKES)
        assert idle.get("/ready").answer()[0] == 200
        stream.post(body(max_tokens=600, **LARGE)).head()
        events = stream.events()
        first = [next(events) for _ in range(5)]  # the rest does not fit where it has to wait: it is not over
        p.send_signal(signal.SIGTERM)
        refused(port)
        assert idle.get("/health").answer()[0] == 200
        status, _, answer = idle.get("/ready").answer()
        assert (status, answer["error"]["code"]) == (503, "not_ready")
        got = first + list(events)
        assert ended_well(got)
        assert text_of(got) == expected(folder, [5, 6], 600)
        code, last, _ = outcome(p)  # the idle connection is open, and keeps nobody
        assert (code, last["event"], last["cut_short"]) == (0, "ended", 0)
        assert idle.closed()


@pytest.mark.parametrize(
    ("name", "grace", "again"), [(signal.SIGINT, "0.3", 0), (signal.SIGTERM, "600", 1)], ids=["over", "hurried"]
)
def test_what_does_not_finish_in_time_ends_in_words(folder, name, grace, again):
    with process(folder, "--grace-s", grace) as (p, port):
        stream, whole = Wire(port), Wire(port)
        whole.post(body(max_tokens=LONG))
        stream.post(body(max_tokens=LONG, stream=True)).head()
        events = stream.events()
        next(events)
        p.send_signal(name)
        for _ in range(again):
            refused(port)
            p.send_signal(name)
        got = list(events)
        assert got[-1]["error"]["code"] == "shutting_down"
        assert "[DONE]" not in got
        status, headers, answer = whole.answer()
        assert (status, answer["error"]["code"]) == (503, "shutting_down")
        assert headers["retry-after"]
        code, last, _ = outcome(p)
        assert (code, last["event"], last["cut_short"]) == (1, "ended", 2)


def test_a_signal_without_work_ends_it_at_once(folder):
    with process(folder, "--grace-s", "600") as (p, port):
        idle = [Wire(port) for _ in range(3)]  # one that never spoke, one in mid-sentence, one that was answered
        idle[1].post(body(), cut=30)
        assert idle[2].get("/health").answer()[0] == 200
        p.send_signal(signal.SIGINT)
        assert outcome(p)[0] == 0
        assert all(wire.closed() for wire in idle)


def test_drain_by_its_route(folder):
    with serving(folder, engine=ENGINE, admin_key="the-admin", api_key="some-user", grace_s=600.0) as server:
        key, boss = "Authorization: Bearer some-user\r\n", "Authorization: Bearer the-admin\r\n"
        with Wire(server.port, TAKES) as stream, Wire(server.port) as other:
            stream.post(body(max_tokens=600, **LARGE), headers=key).head()
            for headers, status in (("", 401), (key, 403), ("Authorization: Bearer x\r\n", 401)):
                assert other.post({}, "/drain", headers).answer()[0] == status
            assert other.get("/ready").answer()[0] == 200
            status, _, answer = other.post({}, "/drain", boss).answer()
            assert (status, answer) == (200, {"status": "draining", "running": 1, "grace_s": 600.0})
            assert other.get("/ready").answer()[0] == 503
            status, headers, answer = other.post(body(), headers=key).answer()
            assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "draining", "1")
            assert other.post({}, "/drain", boss).answer()[0] == 200  # a second time, nothing
            assert ended_well(list(stream.events()))
        settled(server)
        assert server.state.lifecycle.ended == 0
        assert metric(server, "http_requests_total", status="503", route="/v1/completions") == 1


def test_a_request_whose_body_comes_during_the_drain_is_told(folder):
    with (
        serving(folder, engine=ENGINE, grace_s=600.0) as server,
        Wire(server.port) as late,
        Wire(server.port, TAKES) as long,
    ):
        long.post(body(max_tokens=600, **LARGE)).head()
        raw = json.dumps(body()).encode()
        late.post(body(), cut=-len(raw))
        wait_for(lambda: under_way(server), "the long one runs")
        drain = threading.Thread(target=server.stop)
        drain.start()
        wait_for(lambda: server.state.lifecycle.draining, "it drains")
        late.socket.sendall(raw)
        status, _, answer = late.answer()
        assert (status, answer["error"]["code"]) == (503, "draining")
        assert ended_well(list(long.events()))
        drain.join(WAIT_S)
        assert not drain.is_alive()


def test_a_drain_ends_those_that_wait_and_those_whose_prompt_becomes_tokens(folder, monkeypatch):
    inside, go = threading.Event(), threading.Event()
    with serving(folder, engine=ENGINE | {"max_num_seqs": 1}, grace_s=0.05) as server:
        tokenizer = type(server.state.tokenizer)
        encode = tokenizer.encode

        def slow(self, *args, **kwargs):
            inside.set()
            assert go.wait(WAIT_S)
            return encode(self, *args, **kwargs)

        monkeypatch.setattr(tokenizer, "encode", slow)
        wires = [Wire(server.port, TAKES) for _ in range(3)]
        for wire in wires[:2]:
            wire.post(body(max_tokens=LONG, stream=True))
        wires[2].post(body("w5 " * 2000, stream=True))
        assert inside.wait(WAIT_S)
        wait_for(lambda: under_way(server) == 3, "all are under way")
        drain = threading.Thread(target=server.stop)
        drain.start()
        told = [wire.answer() for wire in wires]
        go.set()
        assert told[0][2][-1]["error"]["code"] == "shutting_down"
        assert [(status, answer["error"]["code"]) for status, _, answer in told[1:]] == [(503, "shutting_down")] * 2
        drain.join(WAIT_S)
        assert not drain.is_alive()
        assert server.state.lifecycle.ended == 3
