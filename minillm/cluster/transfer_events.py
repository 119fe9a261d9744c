"""What the two machines of a transfer are told, and what they answer: plain data. Lesson 15; see transfer.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Promise(Protocol):
    """What a machine reads of a `ticket.Ticket`."""

    @property
    def attempt(self) -> int: ...
    @property
    def epoch(self) -> str: ...
    @property
    def token_hash(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Part:
    """A piece without its tensors: tokens start to start + count of one layer. intact: its checksum was right."""

    attempt: int
    epoch: str
    layer: int
    start: int
    count: int
    intact: bool = True


# Events of D --------------------------------------------------------------------------------------------------------


class ReserveAsked(NamedTuple):
    """P has begun to compute, and asks for room. why_not: what is wrong with the ticket's layout, in words."""

    ticket: Promise
    why_not: str | None = None


class Room(NamedTuple):
    """The answer to `Reserve`."""

    found: bool


class PieceCame(NamedTuple):
    part: Part


class DoneCame(NamedTuple):
    attempt: int
    epoch: str


class Refused(NamedTuple):
    """P will not, or no longer."""

    attempt: int
    why: str


class GaveWay(NamedTuple):
    """A running request needed the reserved blocks."""


# Events of both, and of P -------------------------------------------------------------------------------------------


class PeerLost(NamedTuple):
    why: str = ""


class Aborted(NamedTuple):
    """The request is over here: the client left, or its deadline passed."""


class Tick(NamedTuple):
    """Time has passed."""


class Started(NamedTuple):
    """The first step with the request begins."""


class Produced(NamedTuple):
    """A piece was copied out. It is P's to hold until it is sent or dropped."""

    piece: Any


class Computed(NamedTuple):
    """All pieces have been produced."""


class RoomGiven(NamedTuple):
    attempt: int


class NoRoom(NamedTuple):
    attempt: int


class Acked(NamedTuple):
    attempt: int


class Cancelled(NamedTuple):
    attempt: int


class Failed(NamedTuple):
    """P cannot compute it, or cannot hold it."""

    why: str


# Actions ------------------------------------------------------------------------------------------------------------


class Send(NamedTuple):
    """A message to the other side; the driver adds the request's id and what else it holds."""

    kind: str
    why: str = ""


class Reserve(NamedTuple):
    """D: take blocks, and feed `Room` before anything else."""


class Write(NamedTuple):
    """D: the piece that was just fed belongs into the reserved blocks."""


class Load(NamedTuple):
    """D: tokens up to num_tokens are there. The request resumes with them."""

    num_tokens: int


class GiveBack(NamedTuple):
    """D: the reserved blocks are free."""


class Recompute(NamedTuple):
    """D: the request resumes without them."""

    reason: str
    why: str = ""


class SendPieces(NamedTuple):
    """P: these go out, in this order, and are no longer held."""

    pieces: Sequence[Any]


class Drop(NamedTuple):
    """P: what was kept is no longer held."""


class Stop(NamedTuple):
    """P: do not go on computing the request."""


Action = Send | Reserve | Write | Load | GiveBack | Recompute | SendPieces | Drop | Stop
