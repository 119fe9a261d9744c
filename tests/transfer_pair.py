"""Both machines of a transfer over a wire that does what it likes, and the laws that hold all the same.

The wire keeps the order, and may lose, double, spoil or hold back any message, or break; P may start anew. What D wrote
is kept word by word, so a transfer that loads anything but P's own words of this attempt is seen.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from minillm.cluster import transfer as t

LAYERS, TOKENS, LEASE_S = 2, 6, 10.0
FAULTS = ("lose", "double", "spoil")


class Ticket(NamedTuple):
    attempt: int
    epoch: str
    token_hash: str
    num_tokens: int


@dataclass(frozen=True)
class Piece:
    part: t.Part
    words: tuple[str, ...]
    nbytes: int = 1


class Fault(AssertionError):
    """A law that does not hold."""


def law(holds: bool, text: str) -> None:
    if not holds:
        raise Fault(text)


@dataclass
class Prefill:
    """P as a process: machines by attempt, and the steps it still has to compute."""

    epoch: str
    make: Any
    machines: dict[int, t.PrefillTransfer] = field(default_factory=dict)
    todo: dict[int, list[Piece]] = field(default_factory=dict)
    broken: bool = False


class Pair:
    """One request at D, and one P at a time."""

    def __init__(
        self, make_d: Any = t.DecodeTransfer, make_p: Any = t.PrefillTransfer, chunk: int = 3, room: bool = True
    ):
        self.make_d, self.make_p, self.chunk, self.room = make_d, make_p, chunk, room
        self.now = 0.0
        self._epochs = itertools.count()
        self.p = self._start()
        self.old: list[Prefill] = []
        self.to_p: deque[tuple[Any, ...]] = deque()
        self.to_d: deque[tuple[Any, ...]] = deque()
        self.blocks = 0  # reserved at D
        self.memory: dict[tuple[int, int], str] = {}
        self.outcomes: list[str] = []
        self.aborted = False
        self.d = make_d(attempt=7, token_hash="h", num_tokens=TOKENS, num_layers=LAYERS, expires=self.now + LEASE_S)
        self.to_p.append(("submit", 7))

    def _start(self) -> Prefill:
        return Prefill(f"epoch-{next(self._epochs)}", self.make_p)

    # D

    def at_d(self, event: Any, words: tuple[str, ...] = ()) -> None:
        for action in self.d.feed(event, self.now):
            match action:
                case t.Send():
                    self.to_p.append((action.kind, self.d.attempt))
                case t.Reserve():
                    if self.room:
                        self.blocks += 1
                    self.at_d(t.Room(self.room))
                case t.Write():
                    law(self.blocks > 0, "a piece is written into blocks that are not reserved")
                    for i, word in enumerate(words):
                        law(
                            word.startswith(f"{self.d.epoch}/"), f"{word!r} is written, and {self.d.epoch} was accepted"
                        )
                        self.memory[event.part.layer, event.part.start + i] = word
                case t.GiveBack():
                    law(self.blocks > 0, "blocks were given back that nobody had reserved")
                    self.blocks -= 1
                    self.memory.clear()
                case t.Load():
                    self._loaded(action.num_tokens)
                    self.outcomes.append("loaded")
                case t.Recompute():
                    law(not self.aborted, "a request that was aborted is computed")
                    self.outcomes.append("recompute")

    def _loaded(self, n: int) -> None:
        law(n == TOKENS, f"{n} tokens loaded, {TOKENS} were asked for")
        for layer, token in itertools.product(range(LAYERS), range(n)):
            held = self.memory.get((layer, token))
            law(held == f"{self.d.epoch}/{layer}/{token}", f"layer {layer}, token {token} holds {held}")
        law(not self.aborted, "a request that was aborted is loaded")

    # P

    def at_p(self, p: Prefill, attempt: int, event: Any) -> None:
        machine = p.machines.get(attempt)
        if machine is None:
            return
        for action in machine.feed(event, self.now):
            match action:
                case t.Send():
                    ticket = Ticket(attempt, p.epoch, "h", TOKENS)
                    said = {"reserve": ("reserve", ticket), "done": ("done", attempt, p.epoch)}
                    self._post(p, said.get(action.kind, (action.kind, attempt, action.why)))
                case t.SendPieces():
                    for piece in action.pieces:
                        self._post(p, ("piece", piece))
                case t.Stop():
                    p.todo.pop(attempt, None)

    def _post(self, p: Prefill, message: tuple[Any, ...]) -> None:
        if not p.broken:
            self.to_d.append(message)

    def compute(self) -> None:
        """P's next step: one chunk of every layer."""
        for attempt in list(self.p.todo):
            self.at_p(self.p, attempt, t.Started())
            for _ in range(LAYERS):
                if self.p.todo.get(attempt):
                    self.at_p(self.p, attempt, t.Produced(self.p.todo[attempt].pop(0)))
            if self.p.todo.get(attempt) == []:
                del self.p.todo[attempt]
                self.at_p(self.p, attempt, t.Computed())

    def pieces(self, attempt: int, epoch: str) -> list[Piece]:
        out = []
        for start in range(0, TOKENS, self.chunk):
            for layer in range(LAYERS):
                count = min(self.chunk, TOKENS - start)
                words = tuple(f"{epoch}/{layer}/{start + i}" for i in range(count))
                out.append(Piece(t.Part(attempt, epoch, layer, start, count), words))
        return out

    # The wire

    def deliver_to_p(self, fault: str | None = None) -> None:
        if not self.to_p or self.p.broken:
            return
        kind, attempt = self.to_p.popleft()
        for _ in range({"lose": 0, "double": 2}.get(fault or "", 1)):
            if kind == "submit":
                if attempt not in self.p.machines:
                    self.p.machines[attempt] = self.p.make(attempt=attempt, expires=self.now + LEASE_S)
                    self.p.todo[attempt] = self.pieces(attempt, self.p.epoch)
                continue
            make = {"reserved": t.RoomGiven, "no_room": t.NoRoom, "ack": t.Acked, "cancel": t.Cancelled}
            self.at_p(self.p, attempt, make[kind](attempt))

    def deliver_to_d(self, fault: str | None = None) -> None:
        if not self.to_d:
            return
        kind, *rest = self.to_d.popleft()
        for _ in range({"lose": 0, "double": 2}.get(fault or "", 1)):
            match kind:
                case "reserve":
                    self.at_d(t.ReserveAsked(rest[0]))
                case "piece":
                    piece = rest[0]
                    if fault == "spoil":
                        piece = replace(piece, part=replace(piece.part, intact=False), words=("?",) * piece.part.count)
                    self.at_d(t.PieceCame(piece.part), piece.words)
                case "done":
                    self.at_d(t.DoneCame(*rest))
                case "refused":
                    self.at_d(t.Refused(*rest))

    def abort(self) -> None:
        if not self.d.ended:
            self.aborted = True
            self.outcomes.append("cancelled")
            self.at_d(t.Aborted())

    def give_way(self) -> None:
        if self.blocks:
            self.at_d(t.GaveWay())

    def restart(self, noticed: bool, again: bool) -> None:
        """P dies; what it had sent may still come. Its successor has another epoch, and hears of the same submit if
        `again`, as from a driver that sends twice."""
        self.p.broken = True
        self.old.append(self.p)
        self.p = self._start()
        self.to_p.clear()
        if noticed:
            self.at_d(t.PeerLost("it died"))
        if again:
            self.to_p.append(("submit", self.d.attempt))

    def advance(self, seconds: float) -> None:
        self.now += seconds
        if not self.d.ended:
            self.at_d(t.Tick())
        for attempt in list(self.p.machines):
            self.at_p(self.p, attempt, t.Tick())

    # Laws

    def look(self) -> None:
        law(len(self.outcomes) <= 1, f"more than one outcome: {self.outcomes}")
        law(self.d.ended == bool(self.outcomes), f"{self.d.state} and {self.outcomes}")
        law(self.d.holds_blocks == (self.blocks > 0 and not self.d.ended), f"{self.d.state}, {self.blocks} blocks")
        law(
            self.blocks == (self.d.state in ("reserved", "receiving", "loaded")),
            f"{self.d.state}, {self.blocks} blocks",
        )
        for machine in self.p.machines.values():
            law(machine.kept_bytes == len(machine.kept), "bytes that are kept are miscounted")
            law(not machine.kept or machine.state == "waiting_for_room", f"pieces are kept as {machine.state}")

    def end(self) -> None:
        """Nobody hears anything any more, and the leases end."""
        self.advance(2 * LEASE_S)
        self.look()
        law(len(self.outcomes) == 1, f"no outcome: {self.d.state}")
        law(self.blocks == (self.outcomes == ["loaded"]), f"{self.outcomes} and {self.blocks} blocks")
        for machine in self.p.machines.values():
            law(machine.ended and not machine.kept, f"P keeps {len(machine.kept)} pieces as {machine.state}")
        law(not self.p.todo, "P goes on computing for nobody")
