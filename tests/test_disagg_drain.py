"""A prefill engine that is told to end: it says so, finishes what is under way, and gives the rest back in words."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from disagg_pair import GREEDY, PROMPT, SMALL, alone, save_words, splits, until

from minillm import AsyncLLM
from minillm.cluster import prefill_worker
from minillm.cluster.in_process_transport import pair
from minillm.cluster.link import Link
from minillm.cluster.prefill_worker import PrefillWorker
from minillm.cluster.remote_prefill import RemotePrefill
from minillm.cluster.transport import ChannelClosed, connect, listen

pytest.importorskip("fastapi")
from minillm.server.lifecycle import Lifecycle
from minillm.server.local import LocalServer

OTHER = [*PROMPT[1:], 5]
RESERVED = 1  # of what D sends: a delay there holds its transfer at P, and D hears P all the same
HELLO, DRAINING = 0, 1  # of what P sends to who has not asked for anything


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return save_words(tiny_folder, tmp_path_factory)


@pytest.fixture(scope="module")
def want(folder):
    return alone(folder, [PROMPT, OTHER], GREEDY)


@pytest.fixture
def make(folder):
    with splits(folder) as build:
        yield build


def in_the_middle(split):
    """Its first prompt's tokens, to come; the transfer waits for D's word."""
    pool = ThreadPoolExecutor(1)
    tokens = pool.submit(split.tokens)
    until(lambda: split.wires[0][1].struck)
    pool.shutdown(wait=False)
    return tokens


def test_who_drains_finishes_what_is_under_way_and_gets_nothing_new(make, want):
    split = make(faults_d={RESERVED: "delay"})
    tokens = in_the_middle(split)
    split.worker.drain()
    until(lambda: split.remote.states()["draining"] == 1)
    assert split.tokens(OTHER) == want[1], "computed here at once"
    assert split.outcomes == {}
    assert split.worker.num_jobs == 1
    split.wires[0][1].release()
    assert tokens.result(20) == want[0]
    split.settled()
    assert split.outcomes == {("loaded", ""): 1}
    assert dict(split.worker.stats.outcomes) == {("acked", ""): 1}
    assert split.worker.give_back("too late") == 0


def test_what_has_not_ended_in_time_is_given_back_in_words(make, want, caplog):
    caplog.set_level("INFO", "minillm.kv")
    split = make(faults_d={RESERVED: "delay"})
    tokens = in_the_middle(split)
    split.worker.drain()
    assert split.worker.give_back("it was told to end") == 1
    assert tokens.result(20) == want[0]
    split.settled()
    assert split.outcomes == {("recompute", "refused"): 1}
    assert dict(split.worker.stats.outcomes) == {("cancelled", "failed"): 1}
    assert "is computed here: refused it was told to end" in caplog.text


def test_the_words_are_sent_before_the_channel_ends(make, want, monkeypatch):
    """Whoever closes at once must not cut off what was just said."""
    monkeypatch.setattr(prefill_worker, "FLUSH_S", 60.0)
    split = make(faults_d={RESERVED: "delay"})
    tokens, worker = in_the_middle(split), split.worker
    wire, gate = split.wires[0][0], threading.Event()
    send = wire.send

    def slow(*said):
        gate.wait(20)
        send(*said)

    monkeypatch.setattr(wire, "send", slow)
    ending = threading.Thread(target=lambda: (worker.drain(), worker.give_back("no time"), split.down()))
    ending.start()
    until(lambda: worker.num_jobs == 0)
    gate.set()
    ending.join(20)
    assert tokens.result(20) == want[0]
    split.settled()
    assert split.outcomes == {("recompute", "refused"): 1}


def test_a_prompt_that_crosses_the_word_is_refused_at_once(make, want):
    split = make(faults_p={DRAINING: "delay"})
    split.worker.drain()
    pool = ThreadPoolExecutor(1)
    tokens = pool.submit(split.tokens)  # D has not heard
    until(lambda: split.worker.stats.outcomes["refused", "door"])
    split.wires[0][0].release()
    assert tokens.result(20) == want[0]
    pool.shutdown()
    split.settled()
    assert split.outcomes == {("recompute", "refused"): 1}
    assert split.remote.states()["draining"] == 1


def test_another_prefill_engine_is_asked_meanwhile(make, folder, want):
    split = make()
    other = AsyncLLM(folder, **split.options_p)
    worker = PrefillWorker(other, listen("in-process", b"key"))
    try:
        split.worker.drain()
        until(lambda: split.remote.states()["draining"] == 1)
        split.remote.add_peer("q", lambda: connect(worker.listener.address, b"key"))
        until(lambda: split.remote.states()["ready"] == 1)
        assert split.tokens() == want[0]
        split.settled()
        assert dict(worker.stats.outcomes) == {("acked", ""): 1}
        assert dict(split.worker.stats.outcomes) == {}
    finally:
        worker.close()
        other.shutdown()


def test_who_takes_its_place_is_used(make, want):
    """While it drains nobody new is let in; when it is gone D finds the next one."""
    split = make()
    split.worker.drain()
    until(lambda: split.remote.states()["draining"] == 1)
    mine, theirs = pair()
    split.worker.serve(theirs)
    with pytest.raises(ChannelClosed):
        mine.recv(20)
    split.down()
    split.up()
    assert split.ready().tokens() == want[0]
    assert split.outcomes == {("loaded", ""): 1}
    split.settled()


def test_the_address_is_free_while_it_drains_and_not_taken_away_afterwards(folder, tmp_path):
    place = f"{tmp_path}/door"
    with AsyncLLM(folder, **SMALL) as llm:
        worker = PrefillWorker(llm, listen("shared-memory", b"key", place))
        worker.drain()
        successor = listen("shared-memory", b"key", place)
        worker.drain()
        worker.close()
        assert (tmp_path / "door").exists()
        successor.close()


def test_who_drains_does_not_come_back_by_what_else_it_says(folder):
    """Not by a pong after a silence, nor by a hello. By a new channel only."""
    d = AsyncLLM(folder, **SMALL)
    wires = []

    def by_hand():
        mine, theirs = pair()
        theirs.send({"kind": "hello", "epoch": "e", "layout": remote.layout.to_dict()})
        wires.append(theirs)
        return mine

    remote = d.remote = RemotePrefill(d)
    try:
        remote.add_peer("p", by_hand)
        until(lambda: remote.states()["ready"] == 1)
        peer = remote.peers["p"]
        for _ in range(2):
            wires[0].send({"kind": "draining"})
        until(lambda: peer.heard == 3 and peer.state == "draining")
        peer.fell_silent()
        assert peer.state == "draining"
        for kind in ("pong", "hello", "pong"):
            wires[0].send({"kind": kind, "epoch": "e", "layout": remote.layout.to_dict()})
        until(lambda: peer.heard == 6)  # and what came before the last of them is done
        assert peer.state == "draining"
        wires[0].close()
        until(lambda: remote.states()["ready"] == 1)
        assert len(wires) == 2
    finally:
        d.shutdown()


def test_what_is_said_soon_passes_what_waits_but_not_what_is_under_way():
    here, there = pair()
    wire = Link(here, lambda *_: None, lambda why: None)  # not started: all of it waits
    wire.say({"kind": "hello"})
    for n in range(3):
        wire.say({"kind": str(n)})
    wire.say({"kind": "soon"}, soon=True)
    wire.start()
    assert [there.recv(20)[0]["kind"] for _ in range(5)] == ["hello", "soon", "0", "1", "2"]
    wire.close()


# The server around it ----------------------------------------------------------------------------------------------


class Jobs:
    """What a lifecycle waits for beside its calls."""

    def __init__(self, count):
        self.num_jobs, self.said = count, []

    def drain(self):
        self.said.append("drain")

    def give_back(self, why):
        self.said.append(why)
        left, self.num_jobs = self.num_jobs, 0
        return left


def drained(jobs, grace_s, meanwhile=None, hurry=None):
    life = Lifecycle(None, 30.0)
    life.beside = jobs

    async def run():
        task = life.start_drain(grace_s, hurry)
        if meanwhile is not None:
            while not jobs.said:
                await asyncio.sleep(0)
            assert jobs.said == ["drain"]
            await meanwhile()
        assert await task == 0, "no answer was cut short"

    asyncio.run(run())
    return life.given_back


def test_a_drain_waits_for_the_prompts_of_others():
    jobs = Jobs(1)

    async def end():
        await asyncio.sleep(0)
        assert jobs.said == ["drain"]
        jobs.num_jobs = 0

    assert drained(jobs, 600.0, end) == 0
    assert len(jobs.said) == 2, "what was said last has been sent"


def test_a_drain_gives_back_what_takes_longer_than_its_grace():
    jobs = Jobs(3)
    assert drained(jobs, 0.2) == 3
    assert "more than the 0.2 s" in jobs.said[1]


def test_a_drain_that_is_hurried_gives_back_at_once():
    jobs, hurry = Jobs(2), asyncio.Event()

    async def again():
        hurry.set()

    assert drained(jobs, 600.0, again, hurry) == 2


def test_drain_by_http_says_how_many_prompts_are_under_way(make, want):
    split = make(faults_d={RESERVED: "delay"})
    with LocalServer(split.p, role="prefill", admin_key="admin-key", grace_s=60.0) as server:
        server.state.lifecycle.beside = split.worker
        tokens = in_the_middle(split)
        ask = urllib.request.Request(server.url + "/drain", b"", {"authorization": "Bearer admin-key"})
        with urllib.request.urlopen(ask) as reply:
            assert json.load(reply) == {"status": "draining", "running": 1, "grace_s": 60.0}
        until(lambda: split.remote.states()["draining"] == 1)
        split.wires[0][1].release()
        assert tokens.result(20) == want[0]
        split.settled()
    assert split.outcomes == {("loaded", ""): 1}
    assert server.state.lifecycle.given_back == 0
