"""The two machines of a transfer: the plain way, every fault at every stage, and the mistakes that must be noticed."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scheduler_mutants import rewritten
from transfer_pair import FAULTS, LAYERS, LEASE_S, TOKENS, Fault, Pair, Ticket

from minillm.cluster import transfer as t


def quiet(pair: Pair) -> None:
    """No more faults: everything is delivered, and computed."""
    for _ in range(200):
        if not (pair.to_p or pair.to_d or pair.p.todo):
            return
        pair.deliver_to_p()
        pair.compute()
        while pair.to_d:
            pair.deliver_to_d()


def test_without_a_fault_everything_is_loaded_and_acknowledged():
    pair = Pair()
    states = [pair.d.state]
    for _ in range(20):
        pair.deliver_to_p()
        pair.compute()
        while pair.to_d:
            pair.deliver_to_d()
            pair.look()
            if pair.d.state != states[-1]:
                states.append(pair.d.state)
    assert states == ["submitted", "reserved", "receiving", "loaded"]
    assert pair.p.machines[7].state == "acked"
    assert len(pair.memory) == LAYERS * TOKENS
    assert not pair.d.dropped
    pair.end()


def test_pieces_are_kept_until_there_is_room_and_then_go_out_in_order():
    pair = Pair()
    pair.deliver_to_p()
    pair.compute()
    pair.compute()
    machine = pair.p.machines[7]
    assert (machine.state, machine.kept_bytes) == ("waiting_for_room", LAYERS * 2)
    pair.deliver_to_d()
    assert pair.blocks == 1
    pair.deliver_to_p()
    assert (machine.state, machine.kept) == ("sending", [])
    assert [m[0] for m in pair.to_d] == ["piece"] * 4 + ["done"]


def test_room_that_is_found_too_late_goes_back():
    """As the lease ends, or after the request was aborted."""
    for late in (True, False):
        machine = t.DecodeTransfer(attempt=1, token_hash="h", num_tokens=16, num_layers=2, expires=1.0)
        ticket = Ticket(1, "e", "h", 16)
        assert machine.feed(t.ReserveAsked(ticket, None), 0.9) == [t.Reserve()]
        if not late:
            machine.feed(t.Aborted(), 0.95)
        assert t.GiveBack() in machine.feed(t.Room(True), 1.0)
        assert machine.state == ("recompute" if late else "cancelled")
        assert machine.feed(t.Room(False), 1.0) == []


def test_no_room_at_decode_stops_the_prefill():
    pair = Pair(room=False)
    quiet(pair)
    assert (pair.outcomes, pair.d.reason) == (["recompute"], "no_room")
    assert pair.p.machines[7].state == "cancelled"
    assert not pair.p.todo
    pair.end()


def test_too_much_to_keep_is_refused_in_words():
    pair = Pair(make_p=lambda **options: t.PrefillTransfer(max_kept_bytes=1, **options))
    pair.deliver_to_p()
    pair.compute()
    assert pair.to_d[-1][0] == "refused"
    assert "more than 1 bytes" in pair.to_d[-1][2]
    quiet(pair)
    assert (pair.outcomes, pair.d.reason) == (["recompute"], "refused")
    pair.end()


def test_a_layout_that_does_not_fit_is_recomputed_with_the_reason():
    d = t.DecodeTransfer(1, "h", TOKENS, LAYERS, expires=9.0)
    sent, actions = d.feed(t.ReserveAsked(Ticket(1, "e", "h", TOKENS), why_not="other heads"), 0.0)
    assert (sent, actions) == (t.Send("cancel"), t.Recompute("layout", "other heads"))


def test_a_ticket_for_other_tokens_reserves_nothing():
    for wrong in (Ticket(1, "e", "other", TOKENS), Ticket(1, "e", "h", TOKENS + 1)):
        d = t.DecodeTransfer(1, "h", TOKENS, LAYERS, expires=9.0)
        assert t.Reserve() not in d.feed(t.ReserveAsked(wrong), 0.0)
        assert d.reason == "wrong_tokens"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("at", range(7))
def test_one_fault_in_one_message_to_decode(fault, at):
    """Messages to D: reserve, four pieces, done; the seventh is none."""
    pair = Pair()
    number = 0
    for _ in range(30):
        pair.deliver_to_p()
        pair.compute()
        while pair.to_d:
            pair.deliver_to_d(fault if number == at else None)
            number += 1
            pair.look()
    harmless = fault == "double" or at == 6 or (fault == "spoil" and at in (0, 5))
    if not harmless and at in (0, 5):  # a lost reserve or done: only time tells
        assert pair.outcomes == []
    else:
        assert pair.outcomes == ["loaded" if harmless else "recompute"]
    pair.end()
    assert pair.outcomes == ["loaded" if harmless else "recompute"]
    assert pair.d.reason == (
        "" if harmless else {0: "lease", 5: "lease"}.get(at, {"spoil": "corrupt"}.get(fault, "gap"))
    )


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("when", range(12))
def test_p_restarts_at_any_moment(when, noticed, again):
    pair = Pair()
    for i in range(12):
        if i == when:
            pair.restart(noticed, again)
        pair.deliver_to_p()
        pair.compute()
        pair.deliver_to_d()
        pair.look()
    quiet(pair)
    pair.end()


@pytest.mark.parametrize("when", range(12))
@pytest.mark.parametrize("what", ["abort", "give_way"])
def test_an_abort_or_a_lost_reservation_at_any_moment(what, when):
    pair = Pair()
    for i in range(12):
        if i == when:
            getattr(pair, what)()
            pair.look()
        pair.deliver_to_p()
        pair.compute()
        pair.deliver_to_d()
    quiet(pair)
    machine = pair.p.machines.get(7)
    assert machine is None or machine.ended, "P is told at once, not by its lease"
    pair.end()


def test_what_comes_after_the_end_is_counted_and_changes_nothing():
    pair = Pair()
    pair.deliver_to_p()
    pair.compute()
    pair.advance(LEASE_S)
    assert pair.outcomes == ["recompute"]
    pair.to_d.extend(("piece", piece) for piece in pair.pieces(7, "epoch-0"))
    while pair.to_d:
        pair.deliver_to_d()
    assert pair.d.dropped["late"] >= 4
    assert pair.blocks == 0
    pair.end()


MOVES = ("deliver_to_p", "deliver_to_d", "compute")


def play(seed: int, make_d=t.DecodeTransfer, make_p=t.PrefillTransfer) -> Pair:
    """A random run with its faults. Raises Fault."""
    rng = random.Random(seed)
    pair = Pair(make_d, make_p, chunk=rng.choice([2, 3, 6]), room=rng.random() < 0.9)
    calm = rng.random()
    for _ in range(rng.randint(5, 60)):
        roll = rng.random()
        if roll < 0.8 + 0.19 * calm:
            move = rng.choice(MOVES)
            fault = rng.choice(FAULTS) if rng.random() > 0.7 + 0.3 * calm else None
            getattr(pair, move)(*([fault] if move != "compute" else []))
        else:
            rng.choice([
                pair.abort, pair.give_way, lambda: pair.restart(rng.random() < 0.5, rng.random() < 0.7),
                lambda: pair.advance(rng.choice([0.5, LEASE_S])),
            ])()  # fmt: skip
        pair.look()
    if rng.random() < 0.7:
        quiet(pair)
    pair.end()
    return pair


def test_random_runs():
    outcomes = [play(seed).outcomes[0] for seed in range(1500)]
    assert min(outcomes.count(kind) for kind in ("loaded", "recompute", "cancelled")) > 100, "one of them is hardly met"


D, P = t.DecodeTransfer, t.PrefillTransfer
HELD = "held and state != DecodeState.LOADED"
SAME = "(part.attempt, part.epoch) != (self.attempt, self.epoch)"
KEEP = "pieces, self.kept, self.kept_bytes = self.kept, [], 0"
SLIPS = {
    "a stale epoch's pieces are taken": (D, "_piece", (SAME, "part.attempt != self.attempt")),
    "a stale ticket is accepted": (D, "_reserve", ("self.state != DecodeState.SUBMITTED or self._asking", "False")),
    "the reservation is leaked": (D, "_end", (HELD, "held and state == DecodeState.CANCELLED")),
    "the reservation is leaked by an abort": (D, "_end", (HELD, "held and state == DecodeState.RECOMPUTE")),
    "blocks are given back after a load": (D, "_end", (HELD, "held")),
    "checksums are not read": (D, "_piece", ("not part.intact", "False")),
    "a gap is not seen": (
        D, "_piece", ("part.start != there or ", ""), ("+= part.count", "= part.start + part.count"),
    ),
    "done is believed": (D, "_done", ("[i for i, n in enumerate(self._next) if n != self.num_tokens]", "[]")),
    "a second end": (D, "feed", ("if self.ended:", "if self.state == DecodeState.LOADED:")),
    "no lease at decode": (D, "feed", ("now >= self.expires", "False")),
    "no lease at prefill": (P, "feed", ("now >= self.expires", "False")),
    "kept pieces outlive the end": (P, "_end", ("state, [], 0", "state, self.kept, self.kept_bytes")),
    "kept pieces are sent and kept": (P, "feed", (KEEP, "pieces = self.kept")),
    "computing goes on after the end": (P, "_end", ("[Drop(), Stop()]", "[Drop()]")),
}  # fmt: skip


@pytest.mark.parametrize("slipped", list(SLIPS))
def test_the_random_runs_notice(slipped):
    owner, method, *changes = SLIPS[slipped]
    mutant = type("Mutant", (owner,), {method: rewritten(owner, method, *changes)})
    parts = {"make_d": mutant} if owner is D else {"make_p": mutant}
    assert any(fails(seed, parts) for seed in range(600))


def fails(seed, parts):
    try:
        play(seed, **parts)
    except Fault:
        return True
    return False


class Machine(RuleBasedStateMachine):
    """Anything in any order; after each move every law of `Pair.look`, and at the end nothing is held."""

    def __init__(self):
        super().__init__()
        self.pair = Pair()

    @initialize(chunk=st.integers(1, TOKENS), room=st.booleans())
    def begin(self, chunk, room):
        self.pair = Pair(chunk=chunk, room=room)

    @rule(fault=st.none() | st.sampled_from(FAULTS))
    def to_d(self, fault):
        self.pair.deliver_to_d(fault)

    @rule(fault=st.none() | st.sampled_from(FAULTS))
    def to_p(self, fault):
        self.pair.deliver_to_p(fault)

    @rule()
    def compute(self):
        self.pair.compute()

    @rule()
    def abort(self):
        self.pair.abort()

    @rule()
    def give_way(self):
        self.pair.give_way()

    @rule(noticed=st.booleans(), again=st.booleans())
    def restart(self, noticed, again):
        self.pair.restart(noticed, again)

    @rule(seconds=st.floats(0, 2 * LEASE_S))
    def wait(self, seconds):
        self.pair.advance(seconds)

    @rule()
    def calm(self):
        quiet(self.pair)

    @invariant()
    def the_laws_hold(self):
        self.pair.look()

    def teardown(self):
        self.pair.end()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=30)
