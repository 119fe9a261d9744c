"""Reference of exercise 15 for a transfer: the decode engine's side as a state machine, and scripts to play to it.

Events in, actions out, the clock comes with the event. Mistakes are in transfer_slips.py, random lives in storms.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minillm.course.tasks import Wrong

Event = dict[str, Any]
Action = tuple[Any, ...]
ATTEMPT, EPOCH, HASH, LAYERS, TOKENS, LEASE = 2, "a7", "9f2c", 2, 8, 20.0
ENDS = ("loaded", "recompute", "cancelled")


class DecodeTransfer:
    """The flags make the wrong ones."""

    attempts = epochs = hashes = lengths = rooms = gives_back = gives_back_on_cancel = judges = counts = leases = True
    knows_twice = once_held = ends_on_loss = gives_way = inclusive = tells = all_layers = gaps = True
    stays_loaded = stays_ended = leases_first = early = accepts_epoch = cancels = judges_first = True
    renews = False

    def __init__(self, attempt: int, token_hash: str, num_tokens: int, num_layers: int, expires: float):
        self.attempt, self.token_hash, self.num_tokens, self.num_layers = attempt, token_hash, num_tokens, num_layers
        self.expires, self.state, self.epoch = expires, "submitted", None
        self.there = [0] * num_layers

    @property
    def held(self) -> bool:
        return self.state in ("reserved", "receiving")

    def feed(self, event: Event, now: float) -> list[Action]:
        what = event["what"]
        if self.state in ENDS:
            return self.ended(what)
        if what == "aborted" and self.cancels:
            return self.end("cancelled", ("send", "cancel"))
        late = now >= self.expires if self.inclusive else now > self.expires
        if self.leases and late and (self.leases_first or what == "tick"):
            return self.fail()
        if self.renews and event.get("attempt", self.attempt) == self.attempt:
            self.expires = now + LEASE
        lost = (what == "peer_lost" and self.ends_on_loss) or (what == "gave_way" and self.gives_way)
        if lost or what == "aborted":
            return self.fail()
        if what in ("tick", "peer_lost", "gave_way") or (self.attempts and event["attempt"] != self.attempt):
            return []
        if what == "refused":
            return self.fail()
        if what == "reserve":
            return self.reserve(event)
        if self.early if self.epoch is None else self.epochs and event["epoch"] != self.epoch:
            return []
        return self.piece(event) if what == "piece" else self.done()

    def ended(self, what: str) -> list[Action]:
        if what == "done" and self.state == "loaded" and not self.stays_loaded:
            return [("send", "ack"), ("resume", self.num_tokens)]
        if what in ("peer_lost", "refused") and not self.stays_ended:
            self.state = "recompute"
            return [("send", "cancel"), ("recompute",)]
        return []

    def reserve(self, event: Event) -> list[Action]:
        if self.state != "submitted":
            return [] if self.once_held else [("hold",), ("send", "reserved")]
        if self.hashes and event["token_hash"] != self.token_hash:
            return self.fail()
        if self.lengths and event["num_tokens"] != self.num_tokens:
            return self.fail()
        if self.rooms and not event["room"]:
            return self.fail()
        self.state, self.epoch = "reserved", event["epoch"]
        return [("hold",), ("send", "reserved")]

    def piece(self, event: Event) -> list[Action]:
        layer, start, count = event["layer"], event["start"], event["count"]
        if start < self.there[layer] and not self.judges_first:
            return []
        if not event["ok"] and self.judges:
            return self.fail()
        if start > self.there[layer] and self.gaps:
            return self.fail()
        if start < self.there[layer] and self.knows_twice:
            return []
        self.there[layer] = start + count if self.knows_twice else self.there[layer] + count
        self.state = "receiving"
        return [("write", layer, start, count)]

    def done(self) -> list[Action]:
        there = self.there if self.all_layers else self.there[-1:]
        if self.counts and any(n != self.num_tokens for n in there):
            return self.fail()
        self.state = "loaded"
        return [("send", "ack"), ("resume", self.num_tokens)]

    def fail(self) -> list[Action]:
        told = [("send", "cancel")] if self.tells else []
        return self.end("recompute", *told, ("recompute",))

    def end(self, state: str, *actions: Action) -> list[Action]:
        back = self.held and (self.gives_back if state == "recompute" else self.gives_back_on_cancel)
        self.state = state
        return [*([("give_back",)] if back else []), *actions]


# Events


def reserve(
    room: bool = True, attempt: int = ATTEMPT, epoch: str = EPOCH, token_hash: str = HASH, num_tokens: int = TOKENS
) -> Event:
    return {"what": "reserve", "attempt": attempt, "epoch": epoch, "token_hash": token_hash, "num_tokens": num_tokens,
            "room": room}  # fmt: skip


def piece(
    layer: int, start: int = 0, count: int = TOKENS, ok: bool = True, attempt: int = ATTEMPT, epoch: str = EPOCH
) -> Event:
    return {"what": "piece", "attempt": attempt, "epoch": epoch, "layer": layer, "start": start, "count": count,
            "ok": ok}  # fmt: skip


def done(attempt: int = ATTEMPT, epoch: str = EPOCH) -> Event:
    return {"what": "done", "attempt": attempt, "epoch": epoch}


def refused(attempt: int = ATTEMPT) -> Event:
    return {"what": "refused", "attempt": attempt}


LOST, GAVE_WAY, ABORTED, TICK = ({"what": what} for what in ("peer_lost", "gave_way", "aborted", "tick"))
ALL = [reserve(), piece(0), piece(1), done()]


def quick(*events: Event, start: float = 1.0) -> list[tuple[float, Event]]:
    """One after the other, a second apart."""
    return [(start + i, e) for i, e in enumerate(events)]


def play(function: Any, scripts: Sequence[Sequence[tuple[float, Event]]]) -> Any:
    """What the machine did at each event, in any order within one, and where it stands at the end."""
    said: dict[str, Any] = {}
    for number, script in enumerate(scripts, 1):
        one = function(ATTEMPT, HASH, TOKENS, LAYERS, LEASE)
        held = 0
        for i, (now, event) in enumerate(script, 1):
            actions = actions_of(one.feed(dict(event), now))
            kinds = [a[0] for a in actions]
            held += kinds.count("hold") - kinds.count("give_back") - kinds.count("resume")
            said[f"script {number}, event {i}, {words(event)} at {now:g} s"] = sorted(map(list, actions), key=str)
        said[f"script {number}, at the end"] = {"state": str(one.state), "blocks held": held}
    return said


def words(e: Event) -> str:
    usual = {"attempt": ATTEMPT, "epoch": EPOCH, "token_hash": HASH, "num_tokens": TOKENS, "room": True, "ok": True}
    odd = [f"{k} {e[k]}" for k, value in usual.items() if k in e and e[k] != value]
    what = f"piece {e['layer']}:{e['start']}+{e['count']}" if e["what"] == "piece" else e["what"]
    return f"{what} ({', '.join(odd)})" if odd else what


def actions_of(got: Any) -> list[Action]:
    if not isinstance(got, tuple | list) or not all(isinstance(a, tuple | list) and a for a in got):
        raise Wrong(f"`feed` must return a list of tuples such as ('send', 'ack'), got {got!r:.80}")
    made = [tuple(a) for a in got]
    known = {"hold": 1, "give_back": 1, "send": 2, "write": 4, "resume": 2, "recompute": 1}
    if odd := [a for a in made if known.get(str(a[0])) != len(a)]:
        raise Wrong(f"{odd[0]!r:.60} is no action; they stand in the docstring")
    return made


def scripts(*those: Sequence[tuple[float, Event]]) -> Callable[[], Any]:
    return lambda: (list(those),)


def before_each(*events: Event) -> list[list[tuple[float, Event]]]:
    """A good life for each of `events` and each of its messages, with the event before the message."""
    return [quick(*ALL[:i], event, *ALL[i:]) for i in range(len(ALL) + 1) for event in events]
