"""KV from a prefill engine to a decode engine, as two state machines: events in, actions out. Lesson 15 builds them.

D: SUBMITTED -> RESERVED -> RECEIVING -> LOADED | RECOMPUTE | CANCELLED
P: QUEUED -> WAITING_FOR_ROOM -> SENDING -> ACKED | EXPIRED | CANCELLED

They compute nothing, wait for nothing and read no clock: `feed(event, now)` returns what is to be done. So every order
of faults can be tried in a test. Three laws: a request has exactly one outcome; whatever goes wrong before LOADED is
RECOMPUTE, which is always right, since no token has been sent to a client yet; and after the lease neither side holds
anything, even if it never hears from the other again.

Who is meant is said twice. `attempt` is D's: each submit has another one, so what an earlier one still had under way is
recognised. `epoch` is P's: drawn at its start, so that a ticket of a process that has died is worth nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from minillm.cluster.transfer_events import (  # noqa: F401, the vocabulary of this module
    Aborted,
    Acked,
    Action,
    Cancelled,
    Computed,
    DoneCame,
    Drop,
    Failed,
    GaveWay,
    GiveBack,
    Load,
    NoRoom,
    Part,
    PeerLost,
    PieceCame,
    Produced,
    Promise,
    Recompute,
    Refused,
    Reserve,
    ReserveAsked,
    Room,
    RoomGiven,
    Send,
    SendPieces,
    Started,
    Stop,
    Tick,
    Write,
)


class DecodeState(StrEnum):
    SUBMITTED = "submitted"
    RESERVED = "reserved"
    RECEIVING = "receiving"
    LOADED = "loaded"
    RECOMPUTE = "recompute"
    CANCELLED = "cancelled"


class PrefillState(StrEnum):
    QUEUED = "queued"
    WAITING_FOR_ROOM = "waiting_for_room"
    SENDING = "sending"
    ACKED = "acked"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


DECODE_ENDS = (DecodeState.LOADED, DecodeState.RECOMPUTE, DecodeState.CANCELLED)
PREFILL_ENDS = (PrefillState.ACKED, PrefillState.EXPIRED, PrefillState.CANCELLED)


LATE, STALE, DUPLICATE, UNEXPECTED = "late", "stale", "duplicate", "unexpected"


@dataclass
class DecodeTransfer:
    """D's side of one attempt: num_layers layers of num_tokens tokens, until `expires` on D's clock (seconds).

    `dropped` counts what came and was not believed: late (after the end), stale (of another attempt or epoch),
    duplicate (written already) or unexpected (before its time).
    """

    attempt: int
    token_hash: str
    num_tokens: int
    num_layers: int
    expires: float
    state: DecodeState = DecodeState.SUBMITTED
    epoch: str | None = None  # P's, once a ticket is accepted
    reason: str = ""  # of a recompute, one word
    dropped: Counter[str] = field(default_factory=Counter)
    _next: list[int] = field(default_factory=list)  # of each layer, the first token that is not there
    _asking: bool = False

    def __post_init__(self) -> None:
        self._next = [0] * self.num_layers

    @property
    def ended(self) -> bool:
        return self.state in DECODE_ENDS

    @property
    def holds_blocks(self) -> bool:
        """Whether blocks are reserved for this attempt, as far as it knows."""
        return self.state in (DecodeState.RESERVED, DecodeState.RECEIVING)

    def feed(self, event: Any, now: float) -> list[Action]:
        """What is to be done now, in this order. Never raises for what the other side says."""
        if self.ended:
            self.dropped[LATE] += 1
            return _unwanted(event)
        if isinstance(event, Aborted):
            return self._end(DecodeState.CANCELLED, [Send("cancel")])
        if now >= self.expires:
            return [*_unwanted(event), *self._recompute("lease", tell=True)]
        match event:
            case ReserveAsked():
                return self._reserve(event)
            case Room():
                return self._room(event.found)
            case PieceCame():
                return self._piece(event.part)
            case DoneCame():
                return self._done(event)
            case Refused():
                if event.attempt != self.attempt:
                    return self._drop(STALE)
                return self._recompute("refused", event.why)
            case PeerLost():
                return self._recompute("peer_lost", event.why)
            case GaveWay() if self.holds_blocks:
                return self._recompute("gave_way", tell=True)
        return []

    def _reserve(self, event: ReserveAsked) -> list[Action]:
        ticket = event.ticket
        if ticket.attempt != self.attempt:
            return self._drop(STALE)
        if self.state != DecodeState.SUBMITTED or self._asking:
            return self._drop(DUPLICATE if ticket.epoch == self.epoch else STALE)
        if event.why_not is not None:
            return self._recompute("layout", event.why_not, tell=True)
        if (ticket.token_hash, ticket.num_tokens) != (self.token_hash, self.num_tokens):
            return self._recompute("wrong_tokens", "the ticket is for other tokens", tell=True)
        self.epoch, self._asking = ticket.epoch, True
        return [Reserve()]

    def _room(self, found: bool) -> list[Action]:
        if not self._asking:
            return self._drop(UNEXPECTED)
        self._asking = False
        if not found:
            return [Send("no_room"), *self._recompute("no_room")]
        self.state = DecodeState.RESERVED
        return [Send("reserved")]

    def _piece(self, part: Part) -> list[Action]:
        if (part.attempt, part.epoch) != (self.attempt, self.epoch):
            return self._drop(STALE)
        if not self.holds_blocks:
            return self._drop(UNEXPECTED)
        if not part.intact:
            return self._recompute("corrupt", "a piece's checksum is wrong", tell=True)
        if not (0 <= part.layer < self.num_layers and part.count > 0 and part.start >= 0):
            return self._recompute("malformed", f"there is no such piece: {part}", tell=True)
        there = self._next[part.layer]
        if part.start + part.count <= there:
            return self._drop(DUPLICATE)
        if part.start != there or part.start + part.count > self.num_tokens:
            why = f"layer {part.layer}: tokens up to {there} are there, and the piece begins at {part.start}"
            return self._recompute("gap", why, tell=True)
        self._next[part.layer] += part.count
        self.state = DecodeState.RECEIVING
        return [Write()]

    def _done(self, event: DoneCame) -> list[Action]:
        if (event.attempt, event.epoch) != (self.attempt, self.epoch):
            return self._drop(STALE)
        if not self.holds_blocks:
            return self._drop(UNEXPECTED)
        if missing := [i for i, n in enumerate(self._next) if n != self.num_tokens]:
            return self._recompute("gap", f"{len(missing)} of {self.num_layers} layers are not complete", tell=True)
        return self._end(DecodeState.LOADED, [Load(self.num_tokens), Send("ack")])

    def _recompute(self, reason: str, why: str = "", tell: bool = False) -> list[Action]:
        """tell: P still works for this attempt."""
        self.reason = reason
        return self._end(DecodeState.RECOMPUTE, [*([Send("cancel")] if tell else []), Recompute(reason, why)])

    def _end(self, state: DecodeState, actions: list[Action]) -> list[Action]:
        held, self.state, self._asking = self.holds_blocks, state, False
        return [GiveBack(), *actions] if held and state != DecodeState.LOADED else actions

    def _drop(self, why: str) -> list[Action]:
        self.dropped[why] += 1
        return []


def _unwanted(event: Any) -> list[Action]:
    """Room that is found when nobody wants it any more goes back."""
    return [GiveBack()] if isinstance(event, Room) and event.found else []


@dataclass
class PrefillTransfer:
    """P's side of one attempt, until `expires` on P's clock (seconds). It keeps the pieces that D has no room for yet.

    max_kept_bytes: of those; a request that would keep more fails, for the engine does not wait for D. A piece says its
    size by `nbytes`.
    """

    attempt: int
    expires: float
    max_kept_bytes: float = float("inf")
    state: PrefillState = PrefillState.QUEUED
    kept: list[Any] = field(default_factory=list)
    kept_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    _computed: bool = False
    _told: bool = False  # that all was sent

    @property
    def ended(self) -> bool:
        return self.state in PREFILL_ENDS

    def feed(self, event: Any, now: float) -> list[Action]:
        """What is to be done now, in this order."""
        if self.ended:
            self.dropped[LATE] += 1
            return []
        if isinstance(event, PeerLost):
            return self._end(PrefillState.CANCELLED)
        if now >= self.expires:
            return [Send("refused", "its lease has ended"), *self._end(PrefillState.EXPIRED)]
        if isinstance(event, RoomGiven | NoRoom | Acked | Cancelled) and event.attempt != self.attempt:
            self.dropped[STALE] += 1
            return []
        match event:
            case Started() if self.state == PrefillState.QUEUED:
                self.state = PrefillState.WAITING_FOR_ROOM
                return [Send("reserve")]
            case RoomGiven() if self.state == PrefillState.WAITING_FOR_ROOM:
                self.state = PrefillState.SENDING
                pieces, self.kept, self.kept_bytes = self.kept, [], 0
                return [*([SendPieces(pieces)] if pieces else []), *self._done()]
            case NoRoom() | Cancelled() | Aborted():
                return self._end(PrefillState.CANCELLED)
            case Failed():
                return [Send("refused", event.why), *self._end(PrefillState.CANCELLED)]
            case Produced():
                return self._produced(event.piece)
            case Computed():
                self._computed = True
                return self._done()
            case Acked() if self._told:
                return self._end(PrefillState.ACKED)
        return []

    def _produced(self, piece: Any) -> list[Action]:
        if self.state == PrefillState.SENDING:
            return [SendPieces([piece])]
        self.kept_bytes += piece.nbytes
        self.kept.append(piece)
        if self.kept_bytes <= self.max_kept_bytes:
            return []
        why = f"more than {self.max_kept_bytes:,.0f} bytes would wait for room at the decode side"
        return [Send("refused", why), *self._end(PrefillState.CANCELLED)]

    def _done(self) -> list[Action]:
        if self.state != PrefillState.SENDING or not self._computed or self._told:
            return []
        self._told = True
        return [Send("done")]

    def _end(self, state: PrefillState) -> list[Action]:
        """A request that is over at P has nothing to stop; the driver knows."""
        self.state, self.kept, self.kept_bytes = state, [], 0
        return [Drop(), Stop()]
