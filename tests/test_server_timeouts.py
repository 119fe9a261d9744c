"""Deadlines and time limits, of answers, bodies, heads and idle connections; and how many may connect."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from math import inf

import pytest
from server_life import (
    WAIT_S,
    Clock,
    Wire,
    body,
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

from minillm.errors import MinillmError
from minillm.server import connection, open_files
from minillm.server.connection import CLOSING_S, DRAIN_S, Connection
from minillm.server.open_files import EXTRA, FEWEST, ROOM, SPARE, bounded, most_connections

SOON = 0.3  # of limits that nothing in a test hurries to keep


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return tiny_model(tiny_folder, tmp_path_factory.mktemp("timeouts") / "model")


@pytest.fixture
def lost(monkeypatch):
    """Connections that the server has let go of."""
    lost, connection_lost = [], Connection.connection_lost

    def record(self, error):
        connection_lost(self, error)
        lost.append(self)

    monkeypatch.setattr(Connection, "connection_lost", record)
    monkeypatch.setattr(connection, "LOOK_S", 0.02)
    return lost


def computed(server, name):
    """Tokens that steps computed for a request."""
    rows = [row for e in server.state.llm.engine.events.of("step") for row in e.data["rows"]]
    return sum(new for who, new, _ in rows if name in who)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fields", [{}, {"n": 2, "temperature": 1.0}, {"prompt": [[3, 4], [5]]}])
def test_an_expired_request_never_runs(folder, monkeypatch, stream, fields):
    with serving(folder, engine={"max_num_seqs": 1}, request_timeout_s=1e6) as server:
        clock, core = Clock(server, monkeypatch), server.state.llm.core
        with Wire(server.port) as first, Wire(server.port) as second, held(server) as steps:
            first.post(body(max_tokens=400, stream=True))
            steps.until(lambda: len(core.scheduler.running) == 1, "the first runs")
            late = body((9, 9)) | fields | {"stream": stream, "deadline_s": 1e4}
            second.post(late, headers="X-Request-Id: late\r\n")
            steps.hear(len(fields.get("prompt", "1")))
            assert core.scheduler.num_waiting == (2 if fields else 1)
            clock.advance(2e4)
            steps.until(lambda: core.scheduler.num_waiting == 0, "it is ended")
            status, _, answer = second.answer()
            assert status == 504, answer
            assert answer["error"]["code"] == "deadline_exceeded"
            assert answer["error"]["param"] == "deadline_s"
            assert answer["error"]["type"] == "timeout_error"
            assert computed(server, "late") == 0
            assert under_way(server) == 1
            late.pop("deadline_s")
        with Wire(server.port) as again:
            assert again.post(late, headers="X-Request-Id: late\r\n").answer()[0] == 200
            assert computed(server, "late") > 0  # it is seen when it runs
        wait_for(lambda: not under_way(server), "the first has left")
        settled(server)
        assert metric(server, "request_errors_total", kind="timeout") == 1


def test_a_deadline_is_for_the_beginning_and_not_for_the_end(folder, monkeypatch):
    with serving(folder, request_timeout_s=1e6) as server, Wire(server.port) as wire:
        clock = Clock(server, monkeypatch)
        with held(server) as steps:
            wire.post(body(max_tokens=20, deadline_s=1e4))
            steps.until(lambda: computed(server, "") > 3, "it has begun")  # the warm-up computed 2
            clock.advance(2e4)
        status, _, answer = wire.answer()
        assert (status, answer["usage"]["completion_tokens"]) == (200, 20)


@pytest.mark.parametrize("fields", [{}, {"n": 2, "temperature": 1.0}, {"prompt": [[3, 4], [5]]}])
def test_an_answer_that_takes_too_long_ends_with_an_error_and_without_done(folder, monkeypatch, fields):
    with serving(folder, request_timeout_s=1000.0) as server, Wire(server.port) as wire:
        clock, core = Clock(server, monkeypatch), server.state.llm.core
        with held(server) as steps:
            wire.post(body(max_tokens=400, stream=True) | fields)
            steps.until(lambda: any(r.output_token_ids for r in list(core.outputs)), "it has begun")
            status, _ = wire.head()
            clock.advance(500.0)
            assert under_way(server) == 1  # half of its time is not all of it
            clock.advance(501.0)
            events = list(wire.events())
            assert status == 200
            assert events[-1]["error"]["code"] == "request_timeout"
            assert "[DONE]" not in events
            assert not any("error" in e for e in events[:-1])
            steps.until(lambda: not core.outputs, "the engine is rid of it")
            wire.post(body(max_tokens=400) | fields)  # on the same connection
            steps.until(lambda: core.outputs, "the engine has it")
            clock.advance(1001.0)
            status, _, answer = wire.answer()
        assert (status, answer["error"]["code"]) == (504, "request_timeout")
        settled(server)
        assert metric(server, "request_errors_total", kind="timeout") == 2
        sent = [metric(server, "http_requests_total", method="POST", status=status) for status in ("200", "504")]
        assert sent == [1, 1]  # a stream that has begun has its status


def test_a_body_that_comes_too_slowly(folder):
    with serving(folder, body_timeout_s=SOON) as server, Wire(server.port) as wire:
        wire.post(body(), cut=-3)
        status, _, answer = wire.answer()
        assert status == 408
        assert answer["error"]["type"] == "timeout_error"
        assert metric(server, "request_errors_total", kind="timeout") == 1
        settled(server)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comple", b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: "])
def test_a_connection_without_a_whole_head_is_closed(folder, lost, sent):
    with serving(folder, idle_timeout_s=SOON) as server, Wire(server.port) as wire:
        wire.socket.sendall(sent)
        assert wire.closed()
        assert wire.bytes == b""
        wait_for(lambda: len(lost) == 1, "it is gone")


def sends(wire, pieces, pause_s=0.0):
    """How many pieces could be sent before the server closed."""
    for i, piece in enumerate(pieces):
        try:
            wire.socket.sendall(piece)
        except ConnectionError:
            return i
        time.sleep(pause_s)
    return None


def test_a_head_that_drips_gains_no_time(folder, lost):
    with serving(folder, idle_timeout_s=SOON) as server, Wire(server.port) as wire:
        head = [b"GET /health HTTP/1.1\r\n", *(b"X-%d: 1\r\n" % i for i in range(5000))]
        assert sends(wire, head, 0.01) is not None
        assert len(lost) == 1


def test_a_head_that_never_ends_is_refused(folder):
    with serving(folder) as server:
        with Wire(server.port) as wire:
            assert sends(wire, [b"GET /health HTTP/1.1\r\nX-A: ", *[b"a" * 10_000] * 2000]) is not None
        with Wire(server.port) as wire:
            assert wire.get("/health").answer()[0] == 200


def test_an_idle_connection_is_closed_after_its_answer_and_not_before(folder, lost, monkeypatch):
    with (
        serving(folder, engine={"max_num_seqs": 1}, idle_timeout_s=100.0) as server,
    ):
        clock, core = Clock(server, monkeypatch), server.state.llm.core
        stream, queued = Wire(server.port), Wire(server.port)
        with held(server) as steps:
            stream.post(body(max_tokens=20, stream=True))
            steps.until(lambda: len(core.scheduler.running) == 1, "it runs")
            queued.post(body())
            steps.hear()
            assert core.scheduler.num_waiting == 1
            for _ in range(3):  # nothing is sent either way for so long
                clock.advance(101.0)
            assert lost == []
        assert stream.answer()[2][-1] == "[DONE]"
        assert queued.answer()[0] == 200
        assert lost == []
        clock.advance(101.0)
        assert stream.closed()
        assert queued.closed()
        wait_for(lambda: len(lost) == 2, "both are gone")


def test_a_reader_that_stalls_for_good_is_cut_off_when_its_time_is_up(folder, lost, monkeypatch):
    """Its socket cannot be closed politely: what waits for it would never be read."""
    monkeypatch.setattr("minillm.server.http.LAST_WORDS_S", 0.05)
    engine = {"max_model_len": 8000, "num_kv_blocks": 1000}
    with serving(folder, engine=engine, send_buffer_bytes=4096) as server:
        clock = Clock(server, monkeypatch)
        with Wire(server.port, 4096) as wire:
            wire.post(body(max_tokens=7900, stream=True, logprobs=5))
            stuck(server)
            clock.advance(server.config.request_timeout_s + 1)
            wait_for(lambda: not under_way(server), "its time is up")
            settled(server)
            (connection,) = clock.connections
            wait_for(lambda: connection.transport.is_closing(), "it is being closed")
            clock.advance(CLOSING_S - 1)
            assert lost == []
            clock.advance(CLOSING_S + 1)
            wait_for(lambda: lost == [connection], "it is cut off while it stalls")
        assert metric(server, "request_errors_total", kind="timeout") == 1


def test_a_slow_reader_of_an_answer_that_is_complete_is_not_cut_off(folder, lost, monkeypatch):
    with serving(folder, send_buffer_bytes=4096) as server:
        clock, moved = Clock(server, monkeypatch), 0
        with Wire(server.port, 4096) as wire:
            wire.post(body(max_tokens=400, logprobs=5), headers="Connection: close\r\n")
            size = int(wire.head()[1]["content-length"])
            (connection,) = clock.connections
            left = connection.transport.get_write_buffer_size
            while len(wire.bytes) < size:
                before = left()
                while len(wire.bytes) < size and left() == before:
                    wire.bytes += wire.socket.recv(1500)
                if left():
                    clock.advance(CLOSING_S - 1)
                    moved += 1
            assert size == len(wire.bytes)
            assert moved >= 3  # it took more than twice what a reader may stall


def test_those_beyond_the_bound_of_connections_are_told(folder, lost, monkeypatch):
    monkeypatch.setattr(connection, "DRAIN_S", WAIT_S)  # however long this client takes to send
    with serving(folder, max_connections=3) as server:
        inside = [Wire(server.port) for _ in range(3)]
        for wire in inside:
            assert wire.get("/health").answer()[0] == 200
        for _ in range(5):
            with Wire(server.port) as wire:
                data = body(" ".join(["w5"] * 20_000))
                raw = json.dumps(data).encode()
                wire.post(data, cut=-len(raw))  # a client sends its head first; it may not look before all is sent
                assert sends(wire, [raw[:100], raw[100:50_000], raw[50_000:]], 0.05) is None
                status, headers, answer = wire.answer()
                assert status == 503
                assert headers["retry-after"] == "1"
                assert answer["error"]["code"] == "too_many_connections"
                assert wire.closed()
        with Wire(server.port) as probe:
            assert probe.get("/health").answer()[0] == 200
        want = expected(folder, [5, 6], 8)
        for wire in inside:
            assert text_of(wire.post(body(stream=True)).answer()[2]) == want
        gone = len(lost)
        inside.pop().close()
        wait_for(lambda: len(lost) == gone + 1, "a place is free")
        with Wire(server.port) as wire:
            assert wire.post(body()).answer()[0] == 200
        for wire in inside:
            wire.close()


def test_those_that_ask_nothing_hold_no_places_beyond_the_bound(folder, lost, monkeypatch):
    """Connections are files, and files are bounded: so many at once would keep a probe of /health out."""
    monkeypatch.setattr(connection, "cut_off_beyond", lambda most: most + 3)
    with serving(folder, max_connections=2) as server:
        clock = Clock(server, monkeypatch)
        silent = [Wire(server.port) for _ in range(2 + 3)]
        wait_for(lambda: len(clock.connections) == 5, "all have come")
        with Wire(server.port) as wire:
            assert wire.closed()
        assert metric(server, "requests_rejected_total", code="too_many_connections") == 1
        assert [c.transport.is_closing() for c in clock.connections] == [False] * 5
        clock.advance(DRAIN_S + 1)
        wait_for(lambda: len(lost) == 1 + 3, "those beyond have gone")
        assert all(wire.closed() for wire in silent[2:])
        with Wire(server.port) as probe:
            assert probe.get("/health").answer()[0] == 200
        assert [wire.get("/health").answer()[0] for wire in silent[:2]] == [200, 200]
        for wire in silent:
            wire.close()


def test_a_probe_is_answered_beside_any_number_of_silent_connections_that_files_allow(folder):
    with serving(folder, max_connections=2) as server, ExitStack() as stack:
        for _ in range(2 + EXTRA + 5):
            stack.enter_context(Wire(server.port))
        with Wire(server.port) as probe:
            assert probe.get("/health").answer()[0] == 200


@pytest.mark.parametrize(("most", "limit", "want"), [(1024, None, inf), (2, 1 << 20, (1 << 20) - SPARE + EXTRA),
                                                     (576, 1024, 576 + EXTRA), (64, 256, 64 + EXTRA)])  # fmt: skip
def test_connections_are_cut_off_where_files_run_out_and_not_before(most, limit, want, monkeypatch):
    monkeypatch.setattr(open_files, "_raised", lambda *wanted: limit)
    assert open_files.cut_off_beyond(most) == want


def test_the_limit_is_raised_for_probes_too_but_a_bound_that_files_allow_is_never_given_up_for_them(monkeypatch):
    resource, hard = pytest.importorskip("resource"), 1 << 20
    limit, allowed = [1024], [0]

    def setrlimit(kind, limits):
        if limits[0] > allowed[0]:  # as on a Mac, where the hard limit says that there is none
            raise ValueError
        limit[0] = limits[0]

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit[0], hard))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    for allowed[0], want in ((1 << 20, 2000 + SPARE + ROOM), (3000, 2000 + SPARE)):
        limit[0] = 1024
        assert most_connections(2000) == 2000
        assert limit == [want]


@pytest.mark.parametrize(
    ("asked", "limit", "want"),
    [(None, None, 1024), (5000, None, 5000), (None, 1 << 20, 1024), (None, 1024, 1024 - SPARE), (None, 256, FEWEST),
     (576, 1024, 1024 - SPARE), (10, 256, 10)],
)  # fmt: skip
def test_connections_stay_below_the_limit_of_open_files(asked, limit, want):
    assert bounded(asked, limit) == want


def test_more_connections_than_open_files_are_refused():
    with pytest.raises(MinillmError, match="max_connections 577 needs 1025 open files.* may have 1024 .*at most 576"):
        bounded(577, 1024)


def test_a_deadline_runs_from_the_first_byte_and_not_from_the_engine(folder, monkeypatch):
    asks = []

    class Sees:
        def admit(self, ask, queue):
            asks.append(ask)

    with serving(folder, admission=Sees()) as server:
        tokenizer, slow = server.state.tokenizer, [0.0]
        encode = tokenizer.encode
        monkeypatch.setattr(tokenizer, "encode", lambda *a, **k: (time.sleep(slow[0]), encode(*a, **k))[1])
        with Wire(server.port) as wire:
            slow[0] = 0.05
            late = body("w5 w6", deadline_s=30.0)
            assert wire.post(late).answer()[0] == 200
            first, second = (ask.deadline_s for ask in asks)
            assert 30.0 > first >= second + slow[0]  # what tokenisation takes is not given again
            slow[0] = 0.4
            status, _, answer = wire.post(late | {"deadline_s": 0.3}, headers="X-Request-Id: late\r\n").answer()
            assert (status, answer["error"]["code"], answer["error"]["param"]) == (
                504,
                "deadline_exceeded",
                "deadline_s",
            )
            assert computed(server, "late") == 0
        settled(server)
