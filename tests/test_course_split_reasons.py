"""Why a mounted machine of exercise 15 has recomputed, in the words that the engine has for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from minillm.cluster import transfer as t
from minillm.course import notebook as nbk
from minillm.course.adapters.split import mounted_transfer

SOLUTION = Path(__file__).parents[1] / "solutions" / "15_pd_split.ipynb"


def machines():
    """The exercise's machine, as an answer is mounted, and the engine's own; each has its room."""
    scope: dict = {}
    exec(nbk.source(next(c for c in nbk.read(SOLUTION)["cells"] if c["id"] == "task-15-3")), scope)
    given = {"attempt": 1, "token_hash": "h", "num_tokens": 8, "num_layers": 2, "expires": 20.0}
    made = [mounted_transfer(scope["DecodeTransfer"])(**given), t.DecodeTransfer(**given)]
    ticket = SimpleNamespace(attempt=1, epoch="e", token_hash="h", num_tokens=8)
    for machine in made:
        machine.feed(t.ReserveAsked(ticket, None), 1.0)
        machine.feed(t.Room(True), 1.0)
    return made


def piece(start, intact=True):
    return t.PieceCame(t.Part(attempt=1, epoch="e", layer=0, start=start, count=4, intact=intact))


@pytest.mark.parametrize(
    ("event", "now", "reason"),
    [
        (t.Tick(), 20.0, "lease"),
        (piece(0), 20.0, "lease"),
        (piece(0, intact=False), 2.0, "corrupt"),
        (piece(4), 2.0, "gap"),
        (t.DoneCame(1, "e"), 2.0, "gap"),
        (t.PeerLost(), 2.0, "peer_lost"),
        (t.GaveWay(), 2.0, "gave_way"),
    ],
)
def test_a_mounted_answer_recomputes_for_the_engine_s_reason(event, now, reason):
    for machine in machines():
        assert not machine.ended
        machine.feed(event, now)
        assert str(machine.state) == "recompute"
        assert machine.reason == reason
