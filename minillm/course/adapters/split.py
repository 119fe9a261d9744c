"""Exercise 15's state machine, as the decode side of a live split drives it.

The learner's `reserve` comes with the answer to whether there is room. The engine asks for room when the machine says
so, so the adapter tries the event on a copy first.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from minillm.cluster import transfer as t
from minillm.errors import MinillmError

log = logging.getLogger("minillm.kv")
ENDS = tuple(str(state) for state in t.DECODE_ENDS)
HELD = (str(t.DecodeState.RESERVED), str(t.DecodeState.RECEIVING))
NAMES: dict[type, str] = {t.GaveWay: "gave_way", t.PeerLost: "peer_lost", t.Aborted: "aborted", t.Tick: "tick"}


def mounted_transfer(kind: Any) -> Callable[..., TransferPart]:
    """What `RemotePrefill(machine=...)` takes, around 15.3's DecodeTransfer."""
    return lambda **given: TransferPart(kind, **given)


class TransferPart:
    """Fed as `transfer.DecodeTransfer` is. What the learner sees are dicts and tuples of the exercise."""

    def __init__(
        self, kind: Any, *, attempt: int, token_hash: str, num_tokens: int, num_layers: int, expires: float
    ):  # fmt: skip
        self.attempt, self.num_tokens = attempt, num_tokens
        self.mine = kind(attempt, token_hash, num_tokens, num_layers, expires)
        self.dropped: Counter[str] = Counter()
        self.reason = ""
        self._asked: dict[str, Any] | None = None

    @property
    def state(self) -> t.DecodeState:
        try:
            return t.DecodeState(self.mine.state)
        except ValueError:
            states = ", ".join(t.DecodeState)
            raise MinillmError(f"DecodeTransfer.state is one of {states}, got {self.mine.state!r:.60}") from None

    @state.setter
    def state(self, state: t.DecodeState) -> None:
        self.mine.state = str(state)

    @property
    def ended(self) -> bool:
        return self.mine.state in ENDS

    @property
    def holds_blocks(self) -> bool:
        return self.mine.state in HELD

    def feed(self, event: Any, now: float) -> list[t.Action]:
        """As the engine's own. An answer that raises has failed: the request is computed here, and the log says why."""
        try:
            return self._feed(event, now)
        except Exception as error:
            log.warning("DecodeTransfer of exercise 15.3: %s: %s", type(error).__name__, error)
            held, self.reason, self.state = self.holds_blocks, "fault", t.DecodeState.RECOMPUTE
            return [*([t.GiveBack()] if held else []), t.Send("cancel"), t.Recompute("fault", str(error))]

    def _feed(self, event: Any, now: float) -> list[t.Action]:
        match event:
            case t.ReserveAsked(ticket, why_not):
                if why_not is not None and self.mine.state == str(t.DecodeState.SUBMITTED):
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
                return self._do(said | {"room": found}, now, "no_room") if said else []
            case t.PieceCame(part):
                said = {name: getattr(part, name) for name in ("attempt", "epoch", "layer", "start", "count")}
                return self._do(said | {"what": "piece", "ok": part.intact}, now, "piece")
            case t.DoneCame(attempt, epoch):
                return self._do({"what": "done", "attempt": attempt, "epoch": epoch}, now, "gap")
            case t.Refused(attempt, _):
                return self._do({"what": "refused", "attempt": attempt}, now, "refused")
        return self._do({"what": NAMES[type(event)]}, now, NAMES[type(event)])

    def _do(self, event: dict[str, Any], now: float, reason: str) -> list[t.Action]:
        before, got = self.mine.state, self.mine.feed(event, now)
        actions: list[t.Action] = []
        for action in got:
            match tuple(action):
                case ("hold",):
                    pass  # done already: the room was found
                case ("give_back",):
                    actions.append(t.GiveBack())
                case ("write", _, _, _):
                    actions.append(t.Write())
                case ("send", str(what)):
                    actions.append(t.Send(what))
                case ("resume", int(tokens)):
                    actions.append(t.Load(tokens))
                case ("recompute",):
                    self.reason = reason
                    actions.append(t.Recompute(reason))
                case _:
                    raise MinillmError(f"DecodeTransfer.feed: {action!r:.60} is no action of exercise 15.3")
        if not actions and self.mine.state == before and event["what"] != "tick":
            self.dropped[t.STALE] += 1
        return actions
