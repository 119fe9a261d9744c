"""A peer that has the key and says what it likes: no value in any message makes an engine hang, leak or go wrong."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import disagg_pair
import pytest
import torch
from channels import Waiting, no_threads
from disagg_pair import GREEDY, PROMPT, SMALL, Split, alone, save_words, until

from minillm import AsyncLLM, MinillmError
from minillm.cluster import link, prefill_worker
from minillm.cluster.importer import checksum
from minillm.cluster.in_process_transport import pair
from minillm.cluster.link import Link
from minillm.cluster.prefill_peer import Peer
from minillm.cluster.remote_prefill import RemotePrefill
from minillm.cluster.transport import connect as connect_to

WRONG = ([], None, 1 << 70, -1)


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return save_words(tiny_folder, tmp_path_factory)


@pytest.fixture(scope="module")
def want(folder):
    return alone(folder, [PROMPT], GREEDY)[0]


class Liar:
    """A channel whose first message of a kind says something else: its value at `path`."""

    def __init__(self, channel, kind, path, value):
        self._channel, self._kind, self._path, self._value = channel, kind, path, value
        self.recv, self.close, self.lied = channel.recv, channel.close, False

    def send(self, message, tensors=()):
        if message["kind"] == self._kind and not self.lied:
            place = message = json.loads(json.dumps(message))
            for name in self._path[:-1]:
                place = place[name]
            assert self._path[-1] in place
            place[self._path[-1]], self.lied = self._value, True
        self._channel.send(message, tensors)


SAID = [
    ("p", "reserve", ("ticket",)), ("p", "reserve", ("ticket", "layout", "num_layers")), ("p", "piece", ("kind",)),
    ("p", "piece", ("layer",)), ("p", "piece", ("start",)), ("p", "piece", ("count",)), ("p", "done", ("cached",)),
    ("p", "done", ("computed_s",)), ("d", "submit", ("tokens",)), ("d", "submit", ("tenant",)),
    ("d", "submit", ("lease_s",)), ("d", "reserved", ("kind",)), ("d", "reserved", ("attempt",)),
]  # fmt: skip


@pytest.mark.parametrize(("who", "kind", "path"), SAID, ids=lambda x: ".".join(x) if isinstance(x, tuple) else str(x))
def test_a_message_with_another_value_in_it_harms_nobody(folder, want, monkeypatch, who, kind, path):
    """Each of the wrong values in turn, on a wire of its own, between the same two engines."""
    made = []

    def lying_pair():
        mine, theirs = pair()
        made.append(Liar(theirs if who == "p" else mine, kind, path, WRONG[len(made) % len(WRONG)]))
        return (mine, made[-1]) if who == "p" else (made[-1], theirs)

    died = []
    monkeypatch.setattr(threading, "excepthook", lambda args: died.append(args.exc_value))
    monkeypatch.setattr(disagg_pair, "pair", lying_pair)
    split = Split(folder)
    split.faults = [({}, {})] * len(WRONG)
    try:
        for n in range(len(WRONG)):
            split.ready()
            assert split.tokens_after(lambda n=n: made[n].lied) == want
            split.settled()
            assert made[n].lied
            made[n].close()  # and the next wire
            until(lambda n=n: len(made) > n + 1)
        assert not died
        if path[-1] in ("cached", "computed_s", "ticket"):
            assert split.remote.stats.dropped["malformed"] >= 3, "it is said, not swallowed"
    finally:
        split.close()


def test_who_fails_to_hear_a_message_ends_the_link_and_says_so():
    here, there = pair()
    lost = []

    def hear(message, tensors):
        raise TypeError("unhashable")

    wire = Link(here, hear, lost.append).start()
    there.send({"kind": []})
    until(lambda: lost)
    assert "TypeError: unhashable" in lost[0]
    assert there.closed
    wire.close()


def test_a_prefill_engine_that_says_more_than_the_engine_takes_waits(folder, monkeypatch):
    """Nobody asked for its pieces. They do not pile up while a step takes long, and the lease is still kept."""
    monkeypatch.setattr(link, "MOST_POSTED", 4)
    llm = AsyncLLM(folder, **SMALL)
    mine, wire = pair(1 << 14)
    gate, inside = threading.Event(), threading.Event()
    llm.remote = remote = RemotePrefill(llm, {"p": lambda: mine})
    try:
        wire.send({"kind": "hello", "epoch": "e", "layout": remote.layout.to_dict()})
        until(lambda: remote.states()["ready"] == 1)
        llm.call(lambda: (inside.set(), gate.wait(120)))
        assert inside.wait(120)
        peer, ticks = remote.peers["p"], []
        monkeypatch.setattr(peer._link, "_tick", lambda: ticks.append(1))
        tensors = [torch.zeros(16, *shape, dtype=d) for d, shape in remote.layout.piece]
        piece = {"kind": "piece", "id": "r", "attempt": 1, "epoch": "e", "layer": 0, "start": 0, "count": 16}
        piece["crc32"] = checksum(tensors)
        flood = Waiting(lambda: [wire.send(piece, tensors) for _ in range(50)])
        until(lambda: peer.posted.count == 4)
        before = len(ticks)
        until(lambda: len(ticks) > before + 1)
        assert peer.posted.count == 4
        assert llm._commands.qsize() <= 4
        assert flood.waits(0), "it is told to wait"
        gate.set()
        flood.ended()
        until(lambda: remote.stats.dropped["late"] == 50)
        assert (peer.posted.count, peer.posted.nbytes) == (0, 0)
    finally:
        gate.set()
        llm.shutdown()


def test_a_decode_engine_that_does_not_listen_is_not_listened_to(folder, monkeypatch):
    """What it would be told may not pile up without an end."""
    monkeypatch.setattr(prefill_worker, "MOST_QUEUED", 8)
    monkeypatch.setattr(link, "MOST_POSTED", 4)
    split = Split(folder).ready()
    try:
        mine, theirs = pair(1 << 10)
        split.worker.serve(theirs)
        flood = Waiting(lambda: [mine.send({"kind": "ping"}) for _ in range(200)])
        peer = next(p for p in split.worker.peers if p.link.channel is theirs)
        until(lambda: peer.link.queued >= 8)
        assert flood.waits()
        assert peer.link.queued <= 8 + 4
        heard = 0
        while heard < 201:
            heard += mine.recv(120) is not None
        flood.ended()
        mine.close()
    finally:
        split.close()


def test_a_decode_engine_that_says_more_than_the_engine_takes_waits(folder, monkeypatch):
    """Submitted and cancelled again and again, while a step takes long."""
    monkeypatch.setattr(link, "MOST_POSTED", 4)
    split = Split(folder).ready()
    gate, inside = threading.Event(), threading.Event()
    try:
        mine, theirs = pair(1 << 12)
        split.worker.serve(theirs)
        peer = next(p for p in split.worker.peers if p.link.channel is theirs)
        split.p.call(lambda: (inside.set(), gate.wait(120)))
        assert inside.wait(120)
        submit = {
            "kind": "submit", "id": "r", "tokens": [5] * 64, "tenant": "", "priority": 0, "lease_s": 60.0,
            "layout": split.worker.layout.to_dict(),
        }  # fmt: skip

        def say():
            for attempt in range(50):
                mine.send(submit | {"attempt": attempt})
                mine.send({"kind": "cancel", "id": "r", "attempt": attempt})

        flood = Waiting(say)
        until(lambda: peer.posted.count >= 4)
        assert flood.waits()
        assert split.p._commands.qsize() <= 5
        gate.set()
        flood.ended()
        until(lambda: split.worker.stats.outcomes["cancelled", "cancelled"] == 50)
        split.settled()
        mine.close()
    finally:
        gate.set()
        split.close()


def test_a_prefill_engine_that_has_ended_still_says_so(folder, monkeypatch):
    """What is left for its thread is never done. Its link listens all the same, and D need not wait for a lease."""
    monkeypatch.setattr(link, "MOST_POSTED", 4)
    split = Split(folder).ready()
    gate, inside = threading.Event(), threading.Event()
    try:
        mine, theirs = pair()
        split.worker.serve(theirs)
        peer = next(p for p in split.worker.peers if p.link.channel is theirs)
        split.p.call(lambda: (inside.set(), gate.wait(120)))
        assert inside.wait(120)
        submit = {
            "kind": "submit", "attempt": 1, "tokens": [5] * 64, "tenant": "", "priority": 0, "lease_s": 60.0,
            "layout": split.worker.layout.to_dict(),
        }  # fmt: skip
        for n in range(4):
            mine.send(submit | {"id": f"r{n}"})
        until(lambda: peer.posted.count == 4)
        split.p._end_soon(MinillmError("a rank is gone"))
        gate.set()
        split.p._thread.join(120)
        for _ in range(4):
            mine.send({"kind": "ping"})
        mine.send(submit | {"id": "late"})
        heard = {"id": None}
        while heard.get("id") != "late":
            heard = mine.recv(120)[0]
        assert (heard["kind"], heard["why"]) == ("refused", "the prefill engine has ended")
        assert not peer.busy()
    finally:
        gate.set()
        split.close()


def test_who_could_not_be_let_in_is_not_the_last(folder, monkeypatch):
    """No thread for its link, or a listener that fails: the next one is let in."""
    split = Split(folder).ready()
    try:
        worker, faults = split.worker, [OSError("no descriptor is left")]
        accept = worker.listener.accept
        monkeypatch.setattr(worker.listener, "accept", lambda s: accept(s) if not faults else _raise(faults.pop()))
        until(lambda: not faults)
        no_threads(monkeypatch, "minillm-kv-receive", 1)
        first = connect_to(worker.listener.address, b"key")
        until(lambda: first.closed)
        second = connect_to(worker.listener.address, b"key")
        assert second.recv(120)[0]["kind"] == "hello"
        assert len(worker.peers) == 2, "D's own, and this one"
        second.close()
    finally:
        split.close()


def _raise(error):
    raise error


def test_a_decode_engine_has_only_so_many_prompts_under_way(folder, want, monkeypatch):
    monkeypatch.setattr(prefill_worker, "MOST_JOBS", 0)
    split = Split(folder).ready()
    try:
        assert split.tokens() == want
        split.settled()
        assert split.outcomes == {("recompute", "refused"): 1}
        assert dict(split.worker.stats.outcomes) == {("refused", "door"): 1}
    finally:
        split.close()


def test_an_address_that_fails_in_its_own_way_is_tried_again():
    """What connects is anybody's: no exception of it ends the only thread that would try again."""
    tries, here = [], pair()[0]

    def connect():
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("no port")
        return here

    remote = SimpleNamespace(llm=SimpleNamespace(call=lambda work: None, dead=None), layout=None, under_way={})
    peer = Peer(remote, "p", connect)
    until(lambda: peer._link is not None)
    peer.close()
    assert here.closed


def test_a_connection_that_no_thread_could_serve_is_made_again(monkeypatch):
    wires = []

    def connect():
        wires.append(pair()[0])
        return wires[-1]

    remote = SimpleNamespace(llm=SimpleNamespace(call=lambda work: None, dead=None), layout=None, under_way={})
    no_threads(monkeypatch, "minillm-kv-receive", 1)
    peer = Peer(remote, "p", connect)
    until(lambda: len(wires) == 2)
    assert wires[0].closed
    peer.close()
    assert not peer._thread.is_alive()
    assert wires[1].closed


def test_a_peer_that_is_closed_while_it_connects_is_closed():
    inside, go_on, here = threading.Event(), threading.Event(), pair()[0]

    def connect():
        inside.set()
        assert go_on.wait(120)
        return here

    remote = SimpleNamespace(llm=SimpleNamespace(call=lambda work: None, dead=None), layout=None, under_way={})
    peer = Peer(remote, "p", connect)
    assert inside.wait(120)
    closing = threading.Thread(target=peer.close)
    closing.start()
    until(peer._closed.is_set)
    go_on.set()
    until(lambda: not peer._thread.is_alive())
    closing.join(120)
    assert here.closed


def test_a_prompt_that_is_submitted_while_the_link_falls_is_let_go_of(folder):
    """The thread that sends finds the end while the one that receives is taking the prompt on."""
    split = Split(folder).ready()
    try:
        peer = next(iter(split.worker.peers))
        submit = peer.submit

        def late(name, message):
            peer.link._fall("the wire broke")
            submit(name, message)

        peer.submit = late
        split.tokens()
        until(lambda: not peer.jobs)
        split.settled()
        assert peer.kept_bytes == 0
    finally:
        split.close()
