"""Exercise 15's state machine, as the decode side of a live split drives it.

The learner's `reserve` comes with the answer to whether there is room. The engine asks for room when the machine says
so, so the adapter tries the event on a copy first.

What the machine says is carried out on the engine's memory, where a wrong word would hold a request for ever, leak its
blocks, or load what is somebody else's. So each answer is judged here. One that raises or makes no sense is named in
the log, and the engine computes the request.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from minillm.cluster import transfer as t
from minillm.course.answers import Answers
from minillm.errors import MinillmError

log = logging.getLogger("minillm.kv")
NAME = "DecodeTransfer of exercise 15.3"
HELD = (t.DecodeState.RESERVED, t.DecodeState.RECEIVING)
SENT = ("reserved", "ack", "cancel", "no_room")
NAMES: dict[type, str] = {t.GaveWay: "gave_way", t.PeerLost: "peer_lost", t.Aborted: "aborted", t.Tick: "tick"}


def transfer(answers: Answers) -> Callable[..., TransferPart]:
    """The same of a notebook's answer."""
    return mounted_transfer(answers.take("15.3", 5, feed=2))


def mounted_transfer(kind: Any) -> Callable[..., TransferPart]:
    """What `RemotePrefill(machine=...)` takes, around 15.3's DecodeTransfer."""
    return lambda **given: TransferPart(kind, **given)


class TransferPart:
    """Fed as `transfer.DecodeTransfer` is. What the learner sees are dicts and tuples of the exercise.

    state: what the learner's was after the last answer that made sense, or how the engine has ended the transfer.
    """

    def __init__(
        self, kind: Any, *, attempt: int, token_hash: str, num_tokens: int, num_layers: int, expires: float
    ):  # fmt: skip
        """Raises MinillmError if the learner's cannot be made."""
        self.attempt, self.num_tokens, self.expires = attempt, num_tokens, expires
        self.dropped: Counter[str] = Counter()
        self.reason = ""
        self.state = t.DecodeState.SUBMITTED
        self._asked: dict[str, Any] | None = None
        self._there = [bytearray(num_tokens) for _ in range(num_layers)]  # of each layer, which tokens were written
        try:
            self.mine = kind(attempt, token_hash, num_tokens, num_layers, expires)
        except Exception as error:
            raise MinillmError(f"{NAME} cannot be made: {_words(error)}") from error

    @property
    def ended(self) -> bool:
        return self.state in t.DECODE_ENDS

    @property
    def holds_blocks(self) -> bool:
        return self.state in HELD

    def feed(self, event: Any, now: float) -> list[t.Action]:
        """As the engine's own."""
        try:
            return self._feed(event, now)
        except Exception as error:
            log.warning("%s: %s", NAME, _words(error))
            return self._give_up(event, str(error))

    def _give_up(self, event: Any, why: str) -> list[t.Action]:
        """The learner's is not asked again. Where nothing is held, nothing is given back."""
        if self.ended:
            return []
        if isinstance(event, t.Aborted):
            self.state = t.DecodeState.CANCELLED
            return [t.GiveBack(), t.Send("cancel")]
        self.reason, self.state = "fault", t.DecodeState.RECOMPUTE
        return [t.GiveBack(), t.Send("cancel"), t.Recompute("fault", why)]

    def _feed(self, event: Any, now: float) -> list[t.Action]:
        match event:
            case t.ReserveAsked(ticket, why_not):
                if why_not is not None and self.state == t.DecodeState.SUBMITTED:
                    return self._do({"what": "refused", "attempt": ticket.attempt}, now, "layout")
                said = {
                    "what": "reserve", "attempt": ticket.attempt, "epoch": ticket.epoch,
                    "token_hash": ticket.token_hash, "num_tokens": ticket.num_tokens, "room": True,
                }  # fmt: skip
                if ("hold",) in map(tuple, copy.deepcopy(self.mine).feed(dict(said), now)):
                    self._asked = said
                    return [t.Reserve()]
                return self._do(said, now, "wrong_tokens")
            case t.Room(found):
                said, self._asked = self._asked or {}, None
                return self._do(said | {"room": found}, now, "no_room", found) if said else []
            case t.PieceCame(part):
                said = {name: getattr(part, name) for name in ("attempt", "epoch", "layer", "start", "count")}
                return self._do(said | {"what": "piece", "ok": part.intact}, now, "gap" if part.intact else "corrupt")
            case t.DoneCame(attempt, epoch):
                return self._do({"what": "done", "attempt": attempt, "epoch": epoch}, now, "gap")
            case t.Refused(attempt, _):
                return self._do({"what": "refused", "attempt": attempt}, now, "refused")
        return self._do({"what": NAMES[type(event)]}, now, NAMES[type(event)])

    def _do(self, event: dict[str, Any], now: float, reason: str, given: bool = False) -> list[t.Action]:
        """given: blocks, with this event."""
        got = [tuple(action) for action in self.mine.feed(event, now)]
        state = self._state()
        self._judge(event, now, got, state, given)
        actions: list[t.Action] = []
        for action in got:
            match action:
                case ("hold",):
                    pass  # done already: the room was found
                case ("give_back",):
                    actions.append(t.GiveBack())
                case ("write", int(layer), int(start), int(count)):
                    self._there[layer][start : start + count] = b"\1" * count
                    actions.append(t.Write())
                case ("send", str(what)) if what in SENT:
                    actions.append(t.Send(what))
                case ("resume", int(tokens)):
                    actions.append(t.Load(tokens))
                case ("recompute",):
                    self.reason = "lease" if now >= self.expires else reason
                    actions.append(t.Recompute(self.reason))
                case _:
                    raise MinillmError(f"feed: {action!r:.60} is no action of the exercise")
        if not actions and state == self.state and event["what"] != "tick":
            self.dropped[t.STALE] += 1
        self.state = state
        return actions

    def _state(self) -> t.DecodeState:
        try:
            return t.DecodeState(self.mine.state)
        except ValueError:
            raise MinillmError(f"state is one of {', '.join(t.DecodeState)}, got {self.mine.state!r:.60}") from None

    def _judge(
        self, event: dict[str, Any], now: float, got: Sequence[tuple[Any, ...]], state: t.DecodeState, given: bool
    ) -> None:  # fmt: skip
        """Raise MinillmError for an answer that would do harm. state: the one after it."""
        names, ends, loads = [action[:1] for action in got], state in t.DECODE_ENDS, state == t.DecodeState.LOADED
        outcomes = names.count(("resume",)), names.count(("recompute",))
        if self.ended:
            wrong = "its end is behind it" if got or state != self.state else ""
        elif (state == t.DecodeState.CANCELLED) != (event["what"] == "aborted"):
            wrong = "'cancelled' is the end of who was aborted, and of nobody else"
        elif outcomes != (int(loads), int(state == t.DecodeState.RECOMPUTE)):
            wrong = "'loaded' comes with one resume, 'recompute' with one recompute, and no other state with either"
        elif now >= self.expires and not ends:
            wrong = "its lease is over, and it goes on"
        elif state in HELD and not (self.holds_blocks or given):
            wrong = "it holds blocks that it was not given"
        elif given and state == t.DecodeState.SUBMITTED:
            wrong = "it has asked for blocks, was given them, and does not hold them"
        elif ends and not loads and (self.holds_blocks or given) and ("give_back",) not in names:
            wrong = "it ends, and keeps its blocks"
        elif loads and (("resume", self.num_tokens) not in got or not self.holds_blocks):
            wrong = f"a resume says {self.num_tokens}, which is all of its tokens, and needs blocks"
        elif loads and not all(map(all, self._there)):
            wrong = "it resumes, and not every token of every layer was written"
        elif not all(self._may_write(event, action) for action in got if action[:1] == ("write",)):
            wrong = "what is written is the piece that has come, into blocks that it holds"
        else:
            wrong = ""
        if wrong:
            raise MinillmError(f"{wrong}: {event['what']!r} -> {list(got)!r:.160}, state {str(state)!r}")

    def _may_write(self, event: dict[str, Any], action: tuple[Any, ...]) -> bool:
        if event["what"] != "piece" or not self.holds_blocks:
            return False
        layer, start, count = (event[name] for name in ("layer", "start", "count"))
        inside = 0 <= layer < len(self._there) and start >= 0 < count and start + count <= self.num_tokens
        return bool(inside and action[1:] == (layer, start, count))


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, MinillmError) else f"{type(error).__name__}: {error}"
