"""Bursts: what is beyond the bounds is told so at once, memory stays flat, and the counts agree.

And disks that are full, and connections that do nothing.
"""

from __future__ import annotations

import errno
import os
import random
import select
from collections import Counter
from pathlib import Path

import pytest
from measured_server import Measured
from server_life import (
    Wire,
    body,
    ended_well,
    expected,
    held,
    serving,
    settled,
    text_of,
    tiny_model,
    under_way,
    wait_for,
)

from minillm.cache import block_file

QUEUE, SEQS, BURST = 24, 8, 320  # a burst is ten times what may be inside
MB = 1_000_000
BODY = MB // 8
FLAT = 100 * MB  # what memory may grow by for connections that do nothing
# And for a burst, when those that were told no have gone: less than one copy of its bodies. What is inside has two.
BURST_FLAT = BURST * BODY


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return tiny_model(tiny_folder, tmp_path_factory.mktemp("burst") / "model")


@pytest.fixture(scope="module")
def measured(folder):
    engine = {"max_num_seqs": SEQS, "num_kv_blocks": 64}
    with Measured(folder, engine=engine, max_queued_requests=QUEUE, max_body_bytes=MB, idle_timeout_s=1e6) as server:
        with Wire(server.port) as wire:
            assert wire.post(body([5, 6], 8)).answer()[0] == 200
        yield server


def answered(wires):
    """Those that have something to read."""
    poll = select.poll()
    for wire in wires:
        poll.register(wire.socket, select.POLLIN)
    ready = {fd for fd, _ in poll.poll(0)}
    return [wire for wire in wires if wire.socket.fileno() in ready]


def burst(server, asks, accepted):
    """With all places taken and no step ending: send all, and wait until each was either let in or told no.

    The streams in the places, the answers of those that were told no, the others, and bytes of the server.
    """
    server("steps.hold()")
    first = [Wire(server.port).post(body((5,), 24, stream=True))]
    wait_for(lambda: server("steps.steps.waits"), "the first has come")
    first += [Wire(server.port).post(body((5,), 24, stream=True)) for _ in range(SEQS - 1)]
    wait_for(lambda: server("server.state.llm._commands.qsize()") == SEQS - 1, "the others have come")
    server(f"steps.run({SEQS})")
    wires = {Wire(server.port).post(asked): asked for asked in asks}
    wait_for(lambda: len(answered(wires)) == len(wires) - accepted, "those beyond the bounds are told")
    wait_for(lambda: server("under_way(server)") == SEQS + accepted, "the others wait")
    told = []
    for wire in answered(wires):
        with wire:
            told.append(wire.answer())
        del wires[wire]
    wait_for(lambda: server("len(connections)") <= 1 + SEQS + accepted, "those have gone")
    return first, told, wires, server("resident()")


def test_ten_times_too_many_are_told_and_the_rest_is_served(folder, measured):
    """Ten times what may be inside, while no step ends: what is let in is exact, and what it holds is bounded."""
    server = measured
    texts = {i: expected(folder, [i], 24) for i in range(2, 10)}
    long = " " * BODY  # no tokens, but memory for as long as its request is inside
    prompts = {f"w{i}{long}": text for i, text in texts.items()}
    asks = lambda rng: [
        body(rng.choice(list(prompts)), 24, stream=rng.random() < 0.3, user=str(i)) for i in range(BURST)
    ]
    with Wire(server.port) as wire:
        assert wire.post(asks(random.Random(0))[0]).answer()[0] == 200
    server("settled(server)")
    count = lambda name, **labels: server(f"metric(server, {name!r}, **{labels})")
    of = lambda status: count("http_requests_total", route="/v1/completions", status=str(status))
    counted, before = of(200), 0
    for turn in (1, 2):  # the first also pays for what happens once in a process
        asked = asks(random.Random(turn))
        first, told, wires, inside = burst(server, asked, QUEUE)
        server("steps.release()")
        for wire in first:
            with wire:
                assert ended_well(wire.answer()[2])
        for status, headers, answer in told:
            assert status == 429
            assert int(headers["retry-after"]) >= 1
            assert (answer["error"]["type"], answer["error"]["code"]) == ("rate_limit_error", "queue_full")
        for wire, one in wires.items():
            with wire:
                status, _, answer = wire.answer()
            text = text_of(answer) if one["stream"] else answer["choices"][0]["text"]
            assert (status, text) == (200, prompts[one["prompt"]])
        assert (len(told), len(wires)) == (BURST - QUEUE, QUEUE)
        server("settled(server)")
        assert not before or inside - before < BURST_FLAT
        before = server("resident()")
    assert of(429) == 2 * (BURST - QUEUE)
    assert of(200) == counted + 2 * (SEQS + QUEUE)
    assert count("requests_rejected_total", code="queue_full") == of(429)
    assert count("request_success_total", finished_reason="length") == of(200)
    assert count("requests_total") == of(200)
    server("setattr(server.state.door, 'admission', AdmitsAll())")
    first, _, wires, inside = burst(server, asked, BURST)
    for wire in [*first, *wires]:
        wire.reset()
    wait_for(lambda: not server("under_way(server)"), "they have left")
    server("steps.release()")
    server("settled(server)")
    assert inside - before > BURST_FLAT  # without bounds it is not flat, and that is seen


def test_a_bound_in_tokens(folder):
    with serving(folder, engine={"max_num_seqs": 2}, max_queued_tokens=400) as server:
        with held(server) as steps:
            first = [Wire(server.port).post(body((5,), 24, stream=True))]
            wait_for(lambda: steps.waits, "the first has come")
            first.append(Wire(server.port).post(body((5,), 24, stream=True)))
            steps.hear()
            steps.until(lambda: len(server.state.llm.core.scheduler.running) == 2, "both run")
            wires = [Wire(server.port).post(body([5] * 80, 20)) for _ in range(60)]
            wait_for(lambda: len(answered(wires)) == 56, "those beyond the bound are told")
            wait_for(lambda: under_way(server) == 2 + 4, "the others wait")
        answers = [wire.answer() for wire in wires]
        assert Counter(status for status, *_ in answers) == {200: 4, 429: 56}
        assert {a["error"]["code"] for status, _, a in answers if status == 429} == {"queue_tokens_full"}
        assert all(headers["retry-after"] for status, headers, _ in answers if status == 429)
        assert all(ended_well(wire.answer()[2]) for wire in first)
        settled(server)


class FullDisk:
    """The os module over a disk on which half of a file finds room: now and then at first, and then no more."""

    def __init__(self):
        self.writes = 0

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, fd, data):
        self.writes += 1
        if self.writes > 10 or self.writes % 2:
            os.write(fd, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(fd, data)


def test_a_full_disk_under_the_cache_hurts_nobody(folder, tmp_path, monkeypatch):
    engine = {"num_kv_blocks": 12, "max_model_len": 96, "kv_disk_path": str(tmp_path), "kv_disk_bytes": 64 * MB}
    prompts = [[i] * 48 for i in range(2, 12)]
    want = [expected(folder, p, 6) for p in prompts]
    disk = FullDisk()
    with serving(folder, engine=engine) as server, Wire(server.port) as wire:
        monkeypatch.setattr(block_file, "os", disk)
        for _ in range(3):
            for prompt, text in zip(prompts, want, strict=True):
                status, _, answer = wire.post(body(prompt, 6)).answer()
                assert (status, answer["choices"][0]["text"]) == (200, text)
        assert disk.writes > 20
        stats = server.state.llm.engine.cache.tiers.stats["disk"]
        assert stats["puts"] == 5
        assert stats["write_errors"] == disk.writes - 5
        settled(server)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_under_the_traces_hurts_nobody(folder):
    with serving(folder, trace_file="/dev/full") as server, Wire(server.port) as wire:
        want = expected(folder, [5, 6], 8)
        for _ in range(20):
            assert text_of(wire.post(body(stream=True)).answer()[2]) == want
            assert wire.get("/health").answer()[0] == 200
        settled(server)
        wait_for(lambda: server.state.traces.lost == 20, "each lost record is counted")
        assert server.state.traces.written == 0


def idle_connections(server, count):
    """Connections that asked once and then do nothing, and the bytes that they take."""
    before, wires = server("resident()"), []
    for _ in range(count):
        wires.append(Wire(server.port).get("/health"))
        assert wires[-1].answer()[0] == 200
    return wires, server("resident()") - before


def test_connections_that_do_nothing(measured):
    wires, taken = idle_connections(measured, 500)
    assert taken < FLAT
    with Wire(measured.port) as wire:
        assert wire.get("/health").answer()[0] == 200
    for wire in wires:
        wire.close()
    measured(f"hoard({2 * FLAT // 500})")
    wires, taken = idle_connections(measured, 500)
    assert taken > FLAT  # what each holds is seen
    for wire in wires:
        wire.close()
    measured("settled(server)")
