"""Exercise 15's machine beside the engine's own, and in a live split."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from disagg_pair import GREEDY, PROMPT, Split, alone, save_words

from minillm.cluster import transfer as t
from minillm.course import notebook as nbk
from minillm.course.adapters.split import mounted_transfer

ROOT = Path(__file__).parents[1]


def solution():
    """The class of the solution notebook, and what it needs."""
    scope: dict = {}
    nb = nbk.read(ROOT / "solutions" / "15_pd_split.ipynb")
    exec(nbk.source(next(c for c in nb["cells"] if c["id"] == "task-15-3")), scope)
    return scope["DecodeTransfer"]


class Ticket:
    attempt, epoch, token_hash, num_tokens = 1, "e", "h", 8

    def __init__(self, **other):
        self.__dict__.update(other)


def storm(rng):
    """Events of a good transfer, some lost, doubled, corrupt, or of another life, and some ends between them."""
    part = lambda layer, start, **o: t.PieceCame(t.Part(**{"attempt": 1, "epoch": "e", "layer": layer, "start": start,
                                                           "count": 4, **o}))  # fmt: skip
    events = [t.ReserveAsked(Ticket()), *(part(n, s) for n in (0, 1) for s in (0, 4)), t.DoneCame(1, "e")]
    odd = [
        t.ReserveAsked(Ticket(token_hash="other")), t.ReserveAsked(Ticket(num_tokens=4)),
        t.ReserveAsked(Ticket(attempt=0)), t.ReserveAsked(Ticket(), "another dtype"), part(0, 0, epoch="x"),
        part(1, 4, attempt=0), part(1, 0, intact=False), t.DoneCame(1, "x"), t.Refused(1, "no"), t.Refused(0, "no"),
        t.PeerLost(), t.Aborted(), t.Tick(), t.GaveWay(),
    ]  # fmt: skip
    for _ in range(rng.randrange(4)):
        kind = rng.randrange(3)
        i = rng.randrange(len(events))
        if kind == 0:
            events.insert(i, rng.choice(odd))
        elif kind == 1:
            events.insert(rng.randint(i, len(events)), events[i])
        elif len(events) > 1:
            del events[i]
    return events


def life(machine, events, rng):
    """What a driver would do: (kinds of actions at each event, where it ends). It answers `Reserve` at once."""
    done, now = [], 0.0

    def feed(event):
        for action in machine.feed(event, now):
            if isinstance(action, t.Reserve):
                feed(t.Room(found=rng.random() < 0.9))
            else:
                done.append(type(action).__name__ + (action.kind if isinstance(action, t.Send) else ""))

    for event in events:
        now += 1.0 if rng.random() < 0.97 else 30.0
        if isinstance(event, t.GaveWay) and not machine.holds_blocks:
            continue  # nobody says so to who holds nothing
        feed(event)
        done.append("|")
    now += 100.0
    feed(t.Tick())
    return done, str(machine.state)


def test_the_exercise_does_what_the_engine_does():
    """Up to whom a no is told: the exercise says "cancel" where the engine says "no_room", or nothing."""
    make = {"own": t.DecodeTransfer, "exercise": mounted_transfer(solution())}
    given = {"attempt": 1, "token_hash": "h", "num_tokens": 8, "num_layers": 2, "expires": 25.0}
    ends = set()
    for seed in range(600):
        events = storm(random.Random(seed))
        seen = {name: life(kind(**given), events, random.Random(seed)) for name, kind in make.items()}
        quiet = {
            name: ([[a for a in step.split() if not a.startswith("Send") or a in ("Sendreserved", "Sendack")]
                    for step in " ".join(done).split("|")], end)
            for name, (done, end) in seen.items()
        }  # fmt: skip
        for name, (steps, end) in quiet.items():
            quiet[name] = [sorted(step) for step in steps], end
        assert quiet["exercise"] == quiet["own"], (seed, events)
        ends.add(quiet["own"][1])
    assert ends == {"loaded", "recompute", "cancelled"}


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return save_words(tiny_folder, tmp_path_factory)


@pytest.fixture
def make(folder):
    made = []

    def build(kind, **options):
        made.append(split := Split(folder, **options))
        split.remote.machine = mounted_transfer(kind)
        return split.ready()

    yield build
    for split in made:
        split.close()


def test_it_runs_in_a_live_split(make, folder):
    split = make(solution())
    assert split.tokens() == alone(folder, [PROMPT], GREEDY)[0]
    assert split.outcomes == {("loaded", ""): 1}
    split.settled()


def test_an_answer_that_raises_is_a_transfer_that_failed(make, folder):
    class Raises(solution()):
        def piece(self, event):
            raise RuntimeError("a slip")

    split = make(Raises)
    assert split.tokens() == alone(folder, [PROMPT], GREEDY)[0]
    assert split.outcomes == {("recompute", "fault"): 1}
    split.settled()
