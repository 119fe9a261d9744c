"""Back-pressure: a reader that stalls is paused, nobody else notices, and nothing hangs because of it."""

from __future__ import annotations

import gc
import json
import socket

import pytest
from server_life import (
    Clock,
    Wire,
    body,
    ended_well,
    expected,
    held,
    metric,
    serving,
    settled,
    stuck,
    text_of,
    tiny_model,
    under_way,
    wait_for,
)

from minillm.server import connection
from minillm.server.config import ServerConfig

MANY = 900
ENGINE = {"max_model_len": 8000, "num_kv_blocks": 1000}
TAKES = 4096  # bytes that the client's kernel is asked to hold; it doubles them too
PATHS = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return tiny_model(tiny_folder, tmp_path_factory.mktemp("stall") / "model")


@pytest.fixture(scope="module")
def story(folder):
    return expected(folder, [5, 6], MANY)


def stalled(server, path=PATHS[0], **fields):
    """A stream whose reader has stopped to read, and which is paused for good.

    Each token has bytes of its own, those of its logprobs: where the loop is far behind the engine an event holds many
    tokens, and all their text would fit into the buffers.
    """
    wire, asked = Wire(server.port, TAKES), body(max_tokens=MANY, stream=True, logprobs=5) | fields
    if path == PATHS[1]:
        asked = asked | {"messages": [{"role": "user", "content": "w5 w6"}], "logprobs": True, "top_logprobs": 5}
        del asked["prompt"]
    before = set(server.state.llm._paused)
    wire.post(asked, path)
    wait_for(lambda: server.state.llm._paused - before, "it is paused")
    stuck(server)
    return wire


def text(events):
    return "".join(
        c["text"] if "text" in c else c["delta"].get("content") or "" for e in events[:-1] for c in e["choices"]
    )


def first_tokens(events, size):
    """Tokens of the first events of so many bytes on the wire. An event may hold several: each is a "w" in its text."""
    tokens = 0
    for e in events[:-1]:
        tokens += text([e, "[DONE]"]).count("w")
        size -= len(f"data: {json.dumps(e, ensure_ascii=False, separators=(',', ':'))}\n\n")
        if size < 0:
            break
    return tokens


def ahead(server, wire):
    """Tokens that were computed for a stalled reader, and how many its buffers can hold. Reads it to its end."""
    (request,) = [r for r in server.state.llm.core.outputs if r.paused]
    tokens = len(request.output_token_ids)
    events = wire.answer()[2]
    assert ended_well(events)
    buffers = connection.WRITE_BUFFER + 2 * server.config.send_buffer_bytes + 2 * TAKES
    return tokens, server.state.llm.max_buffered + first_tokens(events, buffers) + 2, text(events)


@pytest.mark.parametrize("path", PATHS)
def test_it_is_paused_when_its_buffers_are_full_and_goes_on_with_the_right_text(folder, story, path):
    with serving(folder, engine=ENGINE) as server:
        tokens, bound, got = ahead(server, stalled(server, path))
        assert tokens <= bound
        assert got == story
        settled(server)


def test_the_bound_is_missed_when_asyncio_holds_as_much_as_it_likes(folder, monkeypatch):
    monkeypatch.setattr(connection, "WRITE_BUFFER", 64 << 10)
    with serving(folder, engine=ENGINE) as server:
        wire = stalled(server)
        monkeypatch.undo()
        tokens, bound, _ = ahead(server, wire)
        assert tokens > bound


def test_others_get_a_token_in_every_step(folder, story):
    with serving(folder, engine=ENGINE) as server:
        waits = stalled(server)
        (request,) = [r for r in server.state.llm.core.outputs if r.paused]
        with Wire(server.port) as wire:
            events = wire.post(body((7, 8), 200, stream=True), headers="X-Request-Id: other\r\n").answer()[2]
        assert text_of(events) == expected(folder, [7, 8], 200)
        steps = [["other" in name for name, *_ in e.data["rows"]] for e in server.state.llm.engine.events.of("step")]
        first = next(i for i, others in enumerate(steps) if any(others))
        assert steps[first : first + 200] == [[True]] * 200  # no step without it, and the stalled one in none
        assert request.paused
        assert text_of(waits.answer()[2]) == story
        settled(server)


def test_a_slow_reader_gets_everything_while_a_fast_one_comes_and_goes(folder, story):
    with serving(folder, engine=ENGINE) as server:
        slow, got = stalled(server), []
        slow.head()
        for i, event in enumerate(slow.events()):
            got.append(event)
            if i % 300 == 0:
                with Wire(server.port) as wire:
                    assert ended_well(wire.post(body((i % 200 + 2,), 5, stream=True)).answer()[2])
        assert text_of(got) == story
        settled(server)


@pytest.mark.parametrize("fields", [{}, {"n": 2, "temperature": 1.0}, {"prompt": [[3, 4], [5], [6]]}])
@pytest.mark.parametrize("end", ["close", "reset"])
def test_one_that_leaves_while_it_stalls_leaves_nothing(folder, fields, end):
    with serving(folder, engine=ENGINE) as server:
        gc.disable()  # what is freed must not wait for a collection
        try:
            getattr(stalled(server, **fields), end)()
            settled(server)
        finally:
            gc.enable()
        assert metric(server, "request_errors_total", kind="client_gone") == 1


def test_when_its_call_is_over_its_requests_are_out_of_the_engine(folder, monkeypatch):
    """Its task was stopped while it waited to write. What it read from is closed with it, and not some time later."""
    with serving(folder, engine=ENGINE) as server:
        lifecycle, left = server.state.lifecycle, []
        leave = lifecycle.leave

        def look(call):
            left.append(set(server.state.llm._ids))
            leave(call)

        monkeypatch.setattr(lifecycle, "leave", look)
        for fields in ({}, {"prompt": [[3, 4], [5]]}):
            stalled(server, **fields).reset()
            settled(server)
        assert left == [set(), set()]


def test_many_that_stall_and_leave(folder):
    with serving(folder, engine=ENGINE) as server:
        wires = [stalled(server, prompt=[[i + 2], [i + 3]]) for i in range(6)]
        assert len(server.state.llm._paused) >= 6
        for wire in wires:
            wire.reset()
        settled(server)
        assert metric(server, "request_errors_total", kind="client_gone") == 6


@pytest.mark.parametrize("fields", [{}, {"prompt": [[3, 4], [5], [6]]}])
def test_a_shutdown_does_not_wait_for_it(folder, fields):
    with serving(folder, engine=ENGINE, grace_s=0.05) as server:
        wire = stalled(server, **fields)
    assert server.state.lifecycle.ended == 1
    assert not server.state.lifecycle.calls
    assert wire.closed()
    assert b"[DONE]" not in wire.bytes


def test_an_engine_that_is_shut_down_does_not_wait_for_it(folder, monkeypatch):
    monkeypatch.setattr("minillm.server.run.LOOK_S", 3600.0)  # or the server would see it and end too
    with serving(folder, engine=ENGINE) as server:
        wire = stalled(server)
        server.state.llm.shutdown()
        assert not server.state.llm._thread.is_alive()
        events = wire.answer()[2]
        assert events[-1]["error"]["code"] == "engine_dead"
        assert under_way(server) == 0


def test_a_stall_is_no_stall_of_the_engine(folder, monkeypatch):
    """A server whose only readers stall is ready for others; one whose steps do not come back is not."""
    with serving(folder, engine=ENGINE, request_timeout_s=1e6) as server:
        clock, lifecycle = Clock(server, monkeypatch), server.state.lifecycle
        wire = stalled(server)
        with held(server) as steps:
            for _ in range(3):
                wait_for(lambda: steps.waits, "a step is held")
                clock.advance(2 * lifecycle.stall_s)
                assert "no step has progressed" in lifecycle.not_ready()
                steps.until(lambda: lifecycle.not_ready() is None, "a step sees that nobody waits for it")
        wire.close()
        settled(server)


def test_tokens_are_sent_at_once(folder, monkeypatch):
    """Without TCP_NODELAY the kernel would keep each until the one before is acknowledged."""
    seen, made = [], connection.Connection.connection_made

    def look(self, transport):
        made(self, transport)
        own = transport.get_extra_info("socket")
        seen.append(
            (
                own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY),
                own.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF),
            )
        )

    monkeypatch.setattr(connection.Connection, "connection_made", look)
    with serving(folder) as server, Wire(server.port) as wire:
        assert wire.get("/health").answer()[0] == 200
    assert seen == [(1, 2 * ServerConfig().send_buffer_bytes)]
