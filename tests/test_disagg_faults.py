"""Each stage of a split request fails once: it ends right all the same, and neither side holds anything afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest
import torch
from disagg_pair import GREEDY, PROMPT, SMALL, alone, save_words, splits, until

from minillm import AsyncLLM, MinillmError, SamplingParams
from minillm.cluster.disagg import layout_of
from minillm.cluster.importer import checksum
from minillm.cluster.in_process import snapshot
from minillm.cluster.in_process_transport import pair
from minillm.cluster.prefill_worker import PrefillWorker
from minillm.cluster.remote_prefill import RemotePrefill
from minillm.cluster.ticket import Ticket, token_hash
from minillm.cluster.transport import connect, listen

RESERVE, FIRST, DONE = 1, 2, 5  # what P sends: hello is 0, pieces are 2, 3 and 4
SUBMIT, RESERVED, ACK = 0, 1, 2  # what D sends


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return save_words(tiny_folder, tmp_path_factory)


@pytest.fixture(scope="module")
def want(folder):
    return alone(folder, [PROMPT], GREEDY)[0]


@pytest.fixture
def make(folder):
    with splits(folder) as build:
        yield build


def ended(split, *reasons):
    """One request, one outcome, nothing held. () is loaded; "lease" is allowed for, since a lease here is short."""
    split.settled()
    ((outcome, reason),) = split.outcomes
    assert outcome == ("recompute" if reasons else "loaded")
    assert reason in (reasons or ("",))


@pytest.mark.parametrize(
    ("at", "fault", "reasons"),
    [
        (RESERVE, "drop", ["lease"]), (RESERVE, "duplicate", []), (RESERVE, "corrupt", ["lease"]),
        (RESERVE, "delay", ["lease"]), (RESERVE, "close", ["peer_lost"]),
        (FIRST, "drop", ["gap"]), (FIRST, "duplicate", []), (FIRST, "corrupt", ["corrupt"]),
        (FIRST, "delay", ["lease"]), (FIRST, "close", ["peer_lost"]),
        (4, "drop", ["gap"]), (4, "duplicate", []), (4, "corrupt", ["corrupt"]), (4, "close", ["peer_lost"]),
        (DONE, "drop", ["lease"]), (DONE, "duplicate", []), (DONE, "corrupt", ["lease"]), (DONE, "delay", ["lease"]),
        (DONE, "close", ["peer_lost"]),
    ],
)  # fmt: skip
def test_a_fault_in_what_prefill_sends(make, want, at, fault, reasons):
    split = make(faults_p={at: fault})
    wire = split.wires[0][0]
    got = split.tokens_after(lambda: wire.struck) if "lease" in reasons else split.tokens()
    assert got == want
    assert [s.fault for s in wire.struck] == [fault]
    ended(split, *reasons)
    if fault == "delay":  # what was late comes after all, and is dropped
        wire.release()
        until(lambda: split.remote.stats.dropped["late"])
        split.settled()
    assert split.ready().tokens() == want
    assert split.outcomes["loaded", ""] == (2 if not reasons else 1), "the next request is served as ever"


@pytest.mark.parametrize(
    ("at", "fault", "reasons"),
    [
        (SUBMIT, "drop", ["lease"]), (SUBMIT, "duplicate", []), (SUBMIT, "corrupt", ["lease"]),
        (SUBMIT, "close", ["peer_lost"]), (RESERVED, "drop", ["lease"]), (RESERVED, "duplicate", []),
        (RESERVED, "close", ["peer_lost"]), (ACK, "drop", []), (ACK, "duplicate", []), (ACK, "close", []),
    ],
)  # fmt: skip
def test_a_fault_in_what_decode_sends(make, want, at, fault, reasons):
    split = make(faults_d={at: fault})
    wire = split.wires[0][1]
    got = split.tokens_after(lambda: wire.struck) if "lease" in reasons else split.tokens()
    assert got == want
    if (at, fault) == (ACK, "drop"):  # P holds its job for the lease
        until(lambda: wire.struck)
        assert split.worker.num_jobs == 1
        split.run_out()
    ended(split, *reasons)


@pytest.mark.parametrize("at", [SUBMIT, RESERVED])
def test_a_lost_cancel_ends_with_the_lease(make, want, at):
    """D gives up and says so, P never hears it."""
    split = make(faults_d={at: "drop", at + 1: "drop"})
    assert split.tokens_after(lambda: split.wires[0][1].struck) == want
    ended(split, "lease")


@pytest.mark.parametrize("at", [RESERVE, FIRST, DONE])
def test_a_client_leaves_while_its_request_is_under_way(make, at):
    """P falls silent at a stage, and the client leaves D then. P hears of it at once, not by its lease."""
    split = make(faults_p={at: "delay"})

    async def leave():
        task = asyncio.create_task(anext(split.d.generate(PROMPT, GREEDY)))
        await asyncio.sleep(0)
        while not split.wires[0][0].struck:
            await asyncio.sleep(0.005)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    split.settled()
    assert split.outcomes == {("cancelled", ""): 1}


def test_a_held_request_counts_as_waiting_and_is_no_stall(make):
    split = make(faults_p={RESERVE: "delay"})

    async def run():
        task = asyncio.create_task(asyncio.to_thread(split.tokens))
        while not split.wires[0][0].struck:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        now = snapshot(split.d, "d", stall_s=0.05)
        assert (now.waiting, now.running, now.ready) == (1, 0, True)
        split.wires[0][0].release()
        await task

    asyncio.run(run())
    ended(split)


def test_a_deadline_passes_while_a_request_is_held(make, monkeypatch):
    split = make(faults_p={RESERVE: "drop"}, lease_s=3000.0)
    clock = split.d.core.clock

    async def run():
        task = asyncio.create_task(asyncio.to_thread(split.generate, deadline_s=1000.0))
        while not split.wires[0][0].struck:
            await asyncio.sleep(0.005)
        monkeypatch.setattr(split.d.core, "clock", lambda: clock() + 2000.0)
        try:
            await asyncio.to_thread(until, task.done)
        finally:
            split.run_out()  # or who waits in vain waits for the lease
        return await task

    output = asyncio.run(run())
    assert output.outputs[0].finish_reason == "abort"
    assert "deadline" in output.outputs[0].stop_reason
    ended_as = {("cancelled", ""): 1}
    split.settled()
    assert split.outcomes == ended_as


def test_the_prefill_engine_dies_in_mid_transfer_and_comes_back(make, want):
    split = make(faults_p={FIRST + 1: "delay"})
    first = split.worker.epoch

    async def run():
        task = asyncio.create_task(asyncio.to_thread(split.tokens))
        while not split.wires[0][0].struck:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(split.down)
        return await task

    assert asyncio.run(run()) == want
    assert split.outcomes == {("recompute", "peer_lost"): 1}
    assert split.tokens() == want, "it goes on alone"
    assert sum(split.outcomes.values()) == 1
    split.up()
    assert split.ready().tokens() == want
    assert split.outcomes["loaded", ""] == 1
    assert split.remote.peers["p"].epoch == split.worker.epoch != first
    split.settled()


def test_no_room_at_decode(make, want):
    """Somebody runs there and needs nearly everything: half of it when the prompt comes, and has it for long enough."""
    split = make(d={"num_kv_blocks": 6, "max_model_len": 96})
    core, step = split.d.core, split.d.core.step

    def stands_still():
        if not split.outcomes and any(len(r.output_token_ids) > 20 for r in core.outputs):
            time.sleep(0.001)
            return []
        return step()

    core.step = stands_still

    async def run():
        long = split.d.generate([7] * 15, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        async for output in long:
            if len(output.outputs[0].token_ids) > 20:
                break
        (output,) = [o async for o in split.d.generate(PROMPT, GREEDY) if o.finished]
        await long.aclose()
        return output.outputs[0].token_ids

    assert asyncio.run(run()) == want
    assert split.outcomes == {("recompute", "no_room"): 1}
    split.settled()
    assert dict(split.worker.stats.outcomes) == {("cancelled", "no_room"): 1}


def test_a_reservation_gives_way_to_a_stream(make, want):
    split = make(d={"num_kv_blocks": 8, "max_model_len": 96}, faults_p={DONE: "delay"})

    async def run():
        other = asyncio.create_task(asyncio.to_thread(split.tokens))
        while not split.wires[0][0].struck:
            await asyncio.sleep(0.005)
        stream = split.d.generate([7] * 15, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        outputs = [o async for o in stream]
        return await other, outputs[-1]

    got, output = asyncio.run(run())
    assert got == want
    assert len(output.outputs[0].token_ids) == 60
    assert split.outcomes == {("recompute", "gave_way"): 1}
    assert not split.d.engine.events.of("preempted")
    split.settled()


def test_the_prefill_engine_keeps_only_so_much(make, want):
    split = make(max_kept_bytes=100)
    assert split.tokens() == want
    ended(split, "refused")
    assert dict(split.worker.stats.outcomes) == {("cancelled", "failed"): 1}


def test_a_prompt_that_the_prefill_engine_cannot_hold_is_refused_at_its_door(make, want):
    split = make(p={"max_model_len": 32})
    assert split.tokens() == want
    ended(split, "refused")


def test_a_step_that_fails_at_prefill(make, want):
    split = make()
    inner = split.worker.exporter.runner.attention.inner
    inner.forward = lambda *_: (_ for _ in ()).throw(RuntimeError("a kernel failed"))
    assert split.tokens() == want
    ended(split, "refused")


def test_kv_that_cannot_be_read_out_ends_that_export_alone(make, want, monkeypatch):
    split = make()
    monkeypatch.setattr(split.p.engine.cache.pool, "read_tokens", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
    assert split.tokens() == want
    ended(split, "refused")


def test_kv_that_cannot_be_written_is_computed_again(make, want, monkeypatch):
    split = make()
    monkeypatch.setattr(
        split.d.engine.cache.pool, "write_tokens", lambda *_: (_ for _ in ()).throw(MemoryError("full"))
    )
    assert split.tokens() == want
    ended(split, "fault")


def test_a_load_that_fails_is_computed_again_and_prefill_is_told(make, want, monkeypatch):
    split = make()
    monkeypatch.setattr(split.d.engine.cache, "loaded", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    assert split.tokens() == want
    ended(split, "fault")
    assert dict(split.worker.stats.outcomes) == {("cancelled", "cancelled"): 1}


@pytest.mark.parametrize("who", ["d", "p"])
def test_an_engine_ends_with_a_request_under_way(make, who):
    split = make(faults_p={RESERVE: "delay"})
    worker = split.worker

    async def run():
        stream = split.d.generate(PROMPT, GREEDY)
        task = asyncio.create_task(anext(stream))
        while not split.wires[0][0].struck:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(split.d.shutdown if who == "d" else split.down)
        if who == "d":
            with pytest.raises(MinillmError, match="shut down"):
                await task
        else:
            await task
        await stream.aclose()

    asyncio.run(run())
    until(lambda: not worker.num_jobs and not worker.kept_bytes)
    assert split.outcomes == {("cancelled", "") if who == "d" else ("recompute", "peer_lost"): 1}


# A prefill engine that a test plays by hand --------------------------------------------------------------------------


class ByHand:
    """D, and a P whose messages the test says."""

    def __init__(self, folder):
        self.d = AsyncLLM(folder, **SMALL)
        mine, self.wire = pair()
        self.remote = self.d.remote = RemotePrefill(self.d, {"p": lambda: mine}, lease_s=60.0)
        self.layout = layout_of(self.d.engine)
        self.wire.send({"kind": "hello", "epoch": "e1", "layout": self.layout.to_dict()})
        until(lambda: self.remote.states()["ready"] == 1)

    def submit(self):
        """D's submit of PROMPT, and the task that waits for its tokens."""

        async def run():
            return [o async for o in self.d.generate(PROMPT, GREEDY)][-1].outputs[0].token_ids

        self.task = asyncio.create_task(run())

    async def hear(self, kind):
        while (received := await asyncio.to_thread(self.wire.recv, 0.1)) is None:
            pass
        assert received[0]["kind"] == kind
        return received[0]

    def reserve(self, said, epoch="e1", tokens=None, **changes):
        ids = said["tokens"] if tokens is None else tokens
        ticket = Ticket(said["id"], said["attempt"], epoch, token_hash(ids), len(ids), self.layout, 60.0)
        self.wire.send({"kind": "reserve", "ticket": ticket.to_dict() | changes})

    def pieces(self, said, epoch="e1", shift=0, layers=3, **changes):
        for layer in range(layers):
            tensors = [torch.zeros(64, *shape, dtype=d) for d, shape in self.layout.piece]
            self.wire.send({
                "kind": "piece", "id": said["id"], "attempt": said["attempt"] + shift, "epoch": epoch, "layer": layer,
                "start": 0, "count": 64, "crc32": checksum(tensors), **changes,
            }, tensors)  # fmt: skip

    def done(self, said, epoch="e1"):
        self.wire.send({
            "kind": "done", "id": said["id"], "attempt": said["attempt"], "epoch": epoch, "cached": 0,
            "computed_s": 0.0,
        })  # fmt: skip

    def refused(self, said):
        self.wire.send({"kind": "refused", "id": said["id"], "attempt": said["attempt"], "why": "no more"})

    def close(self):
        self.wire.close()
        self.d.shutdown()


@pytest.fixture
def by_hand(folder):
    made = ByHand(folder)
    yield made
    made.close()


def played(by_hand, play):
    """Tokens after `play(by_hand, submit)` has talked to D."""

    async def run():
        by_hand.submit()
        await play(by_hand, await by_hand.hear("submit"))
        return await by_hand.task

    return asyncio.run(run())


def test_a_prefill_engine_that_says_nothing_costs_one_lease_and_not_one_a_prompt(by_hand, want):
    by_hand.remote.lease_s = 0.3

    async def run():
        by_hand.submit()
        await by_hand.hear("submit")
        assert await by_hand.task == want
        assert by_hand.remote.states()["silent"] == 1
        by_hand.submit()  # nobody asks it, and nobody waits
        assert await by_hand.task == want
        await by_hand.hear("cancel")
        await by_hand.hear("ping")
        by_hand.wire.send({"kind": "pong"})
        await asyncio.to_thread(until, lambda: by_hand.remote.states()["ready"] == 1)
        by_hand.remote.lease_s = 60.0
        by_hand.submit()
        by_hand.refused(await by_hand.hear("submit"))
        return await by_hand.task

    assert asyncio.run(run()) == want
    assert dict(by_hand.remote.stats.outcomes) == {("recompute", "lease"): 1, ("recompute", "refused"): 1}


def test_who_was_thought_silent_answers_and_is_used_again(make):
    split = make()
    (peer,) = split.remote.peers.values()
    peer.fell_silent()  # as after a lease in vain
    until(lambda: split.remote.states()["ready"] == 1)


def test_a_prefill_engine_that_hangs_is_silent_though_its_link_is_not(make, want):
    """Its link's threads hear, and say that a lease has ended. That is no sign of a step."""
    split, gate, inside = make(), threading.Event(), threading.Event()
    try:
        split.p.call(lambda: (inside.set(), gate.wait(120)))
        assert inside.wait(120)
        assert split.tokens_after(lambda: split.worker.num_jobs) == want
        until(lambda: not split.worker.num_jobs and not split.remote.under_way)
        split.wires[0][0].send({"kind": "refused", "id": "x", "attempt": 0, "why": "its lease has ended"})
        until(lambda: split.remote.stats.dropped["late"])
        assert split.remote.states()["silent"] == 1
        assert split.tokens() == want, "nobody waits for it"
        assert sum(split.outcomes.values()) == 1
    finally:
        gate.set()
    assert split.ready().tokens() == want
    assert split.outcomes["loaded", ""] == 1
    split.settled()


def test_a_stale_epoch_is_not_believed(by_hand, want):
    """P died and came back within one connection, or somebody replays."""

    async def play(p, said):
        p.reserve(said, epoch="e0")  # not the one that said hello
        p.reserve(said, epoch="e1")
        await p.hear("reserved")
        p.reserve(said, epoch="e0")
        p.pieces(said, epoch="e0")
        p.done(said, epoch="e0")
        p.pieces(said, shift=1)
        p.refused(said)

    assert played(by_hand, play) == want
    assert dict(by_hand.remote.stats.outcomes) == {("recompute", "refused"): 1}
    assert by_hand.remote.stats.dropped["stale"] == 6
    assert by_hand.remote.stats.dropped["late"] == 3, "another attempt is nobody's"
    assert by_hand.d.engine.cache.num_live == 0


def test_zeros_of_the_right_attempt_would_change_the_tokens(by_hand, want):
    """What the tests above would see if a piece were believed that should not be."""

    async def play(p, said):
        p.reserve(said)
        await p.hear("reserved")
        p.pieces(said)
        p.done(said)
        await p.hear("ack")

    assert played(by_hand, play) != want
    assert dict(by_hand.remote.stats.outcomes) == {("loaded", ""): 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer": 3}, "malformed"), ({"start": 16}, "gap"), ({"start": -1}, "malformed"), ({"count": 63}, "corrupt"),
        ({"crc32": 1}, "corrupt"), ({"layer": "0"}, None), ({"epoch": None}, None), ({"kind": "peace"}, None),
    ],
)  # fmt: skip
def test_a_piece_that_cannot_be_is_not_believed(by_hand, want, changes, reason):
    async def play(p, said):
        p.reserve(said)
        await p.hear("reserved")
        p.pieces(said, layers=1, **changes)
        p.refused(said)

    assert played(by_hand, play) == want
    assert dict(by_hand.remote.stats.outcomes) == {("recompute", reason or "refused"): 1}
    assert reason is not None or by_hand.remote.stats.dropped["malformed"] == 1
    assert by_hand.d.engine.cache.num_live == 0


def test_a_ticket_for_other_tokens_or_another_layout(by_hand, want):
    async def other_tokens(p, said):
        p.reserve(said, tokens=[1] * 64)
        await p.hear("cancel")

    async def other_layout(p, said):
        p.reserve(said, layout=p.layout.to_dict() | {"model": "another"})
        await p.hear("cancel")

    async def no_ticket(p, said):
        p.reserve(said, attempt="x")
        p.refused(said)

    for play in (other_tokens, other_layout, no_ticket):
        assert played(by_hand, play) == want
    assert dict(by_hand.remote.stats.outcomes) == {
        ("recompute", "wrong_tokens"): 1, ("recompute", "layout"): 1, ("recompute", "refused"): 1,
    }  # fmt: skip


def test_pieces_before_room_was_given_are_not_written(by_hand, want):
    async def play(p, said):
        p.pieces(said)
        p.done(said)
        p.refused(said)

    assert played(by_hand, play) == want
    assert by_hand.remote.stats.dropped["stale"] == 4, "no epoch was accepted"


# A decode engine that says what it should not --------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": []}, {"tokens": ["a"]}, {"tokens": [10**9]}, {"tokens": None}, {"lease_s": -1}, {"lease_s": None},
        {"layout": {}}, {"tenant": 3}, {"lease_s": 1e9}, {"tokens": [1 << 70]}, {"tokens": [[]]},
        {"id": "x" * 300}, {"id": ""}, {"attempt": -1},
    ],
)  # fmt: skip
def test_a_submit_that_makes_no_sense_is_refused_in_words(make, change):
    split = make()
    mine, theirs = pair()
    split.worker.serve(theirs)
    assert mine.recv(120.0)[0]["kind"] == "hello"
    said = {
        "kind": "submit", "id": "r", "attempt": 1, "tokens": [5] * 64, "tenant": "", "priority": 0, "lease_s": 600.0,
        "layout": split.worker.layout.to_dict(),
    }  # fmt: skip
    wrong = said | change
    mine.send(wrong)
    answer = mine.recv(120.0)[0]
    assert (answer["kind"], answer["id"], answer["attempt"]) == ("refused", wrong["id"], wrong["attempt"])
    assert answer["why"]
    assert dict(split.worker.stats.outcomes) == {("refused", "door"): 1}, "before anything is computed"
    for garbage in (
        {"kind": None},
        {},
        {"kind": "ack", "id": 1, "attempt": 1},
        {"kind": "ack", "id": "r", "attempt": 9},
    ):
        mine.send(garbage)
    mine.send(said | {"attempt": 2})
    assert mine.recv(120.0)[0]["kind"] == "reserve", "it goes on"
    mine.send({"kind": "cancel", "id": "r", "attempt": 2})
    split.settled()
    mine.close()


def test_who_has_no_room_costs_the_step_under_way_and_not_the_prompt(make, monkeypatch):
    split = make(p={"max_num_batched_tokens": 16})
    mine, theirs = pair()
    split.worker.serve(theirs)
    runner, steps = split.worker.exporter.runner, []

    def forward(requests, num_new):
        steps.append(num_new)
        until(lambda: not split.worker.num_jobs)
        return real(requests, num_new)

    real = runner.forward
    monkeypatch.setattr(runner, "forward", forward)
    mine.recv(120.0)
    mine.send({
        "kind": "submit", "id": "r", "attempt": 1, "tokens": [5] * 64, "tenant": "", "priority": 0, "lease_s": 60.0,
        "layout": split.worker.layout.to_dict(),
    })  # fmt: skip
    assert mine.recv(120.0)[0]["kind"] == "reserve"
    mine.send({"kind": "no_room", "id": "r", "attempt": 1})
    split.settled()
    assert steps == [[16]]
    mine.close()


def test_another_key_is_said_once_in_the_log(folder, caplog, want):
    d = AsyncLLM(folder, **SMALL)
    p = AsyncLLM(folder, **SMALL)
    worker = PrefillWorker(p, listen("shared-memory", b"one key"))
    d.remote = remote = RemotePrefill(d, {"p": lambda: connect(worker.listener.address, b"another")})
    try:
        until(lambda: "key" in caplog.text)

        async def run():
            return [o async for o in d.generate(PROMPT, GREEDY)][-1].outputs[0].token_ids

        assert asyncio.run(run()) == want
        assert remote.states()["unreachable"] == 1
        assert not remote.stats.outcomes
    finally:
        d.shutdown()
        worker.close()
        p.shutdown()
    assert caplog.text.count("is not there") == 1
