"""The decode side: prompts that another engine computes, and requests that resume with its KV. Lesson 15.

>>> llm.remote = RemotePrefill(llm, {"p0": lambda: connect(address, key)})   # llm: an AsyncLLM

From then on `llm` sends each prompt that is worth it to the least loaded of its prefill engines, and computes the
others itself. So does it with all while no prefill engine is there: it goes on alone.

What touches the core, its cache or a machine runs in the engine's thread; the links' threads only post it there.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from minillm.async_llm import AsyncLLM
from minillm.cluster import transfer
from minillm.cluster.disagg import LEASE_S, Said, Stats, layout_of
from minillm.cluster.importer import Importer
from minillm.cluster.prefill_peer import Connect, Peer
from minillm.cluster.ticket import MAX_LEASE_S, token_hash
from minillm.cluster.transport import Message
from minillm.errors import MinillmError
from minillm.request import Request

log = logging.getLogger("minillm.kv")


class RemotePrefill:
    """peers: name -> how to get a channel to a prefill engine. More may be added, and removed, at any time.

    lease_s     seconds from submit until a request is computed here, if its KV has not come by then
    min_tokens  prompts of which fewer tokens are missing here are computed here; None: one block
    machine     makes what is fed, with the keywords of `transfer.DecodeTransfer`: a learner's (course/adapters)
    """

    def __init__(
        self, llm: AsyncLLM, peers: Mapping[str, Connect] | None = None, *, lease_s: float = LEASE_S,
        min_tokens: int | None = None, machine: Callable[..., Any] = transfer.DecodeTransfer,
    ):  # fmt: skip
        if not 0 < lease_s <= MAX_LEASE_S:
            raise MinillmError(f"lease_s is seconds, above 0 and at most {MAX_LEASE_S:g}, got {lease_s!r}")
        self.llm, self.core, self.lease_s, self.machine = llm, llm.core, lease_s, machine
        assert llm.engine.cache is not None
        self.cache = llm.engine.cache
        self.layout, self.stats = layout_of(llm.engine), Stats()
        self.min_tokens = self.layout.block_size if min_tokens is None else max(min_tokens, 1)
        self.peers: dict[str, Peer] = {}
        self.under_way: dict[Request, _Transfer] = {}  # engine's thread
        self._by_name: dict[tuple[str, int], _Transfer] = {}
        self._attempts = itertools.count(1)
        self._keep_free = getattr(getattr(self.core.scheduler, "limits", None), "keep_free", 0)
        for name, connect in (peers or {}).items():
            self.add_peer(name, connect)

    def add_peer(self, name: str, connect: Connect) -> None:
        if name in self.peers:
            raise MinillmError(f"there is a prefill engine {name!r} already")
        self.peers[name] = Peer(self, name, connect)

    def remove_peer(self, name: str) -> None:
        """What it was computing is computed here."""
        if (peer := self.peers.pop(name, None)) is not None:
            peer.close()

    def states(self) -> dict[str, int]:
        """How many prefill engines are ready, unreachable, silent, draining, and refused for their layout."""
        states = [peer.state for peer in list(self.peers.values())]
        return {state: states.count(state) for state in ("ready", "unreachable", "silent", "draining", "refused")}

    def close(self) -> None:
        for name in list(self.peers):
            self.remove_peer(name)

    # In the engine's thread ---------------------------------------------------------------------------------

    def take(self, request: Request) -> bool:
        """Submit a request that is not in the core yet, and hold it there. False: it is better computed here."""
        size = self.layout.block_size
        tokens = (request.num_tokens - 1) // size * size
        peer = self._choose()
        if (
            peer is None
            or tokens < size
            or self.cache.missing(request) <= max(self.min_tokens, request.num_tokens // 2)
        ):
            return False
        if (leader := self._leader(request)) is not None:
            self.core.hold(request)
            leader.followers.append(request)
            return True
        ids = request.prompt_token_ids[:tokens]
        try:
            machine = self.machine(
                attempt=next(self._attempts), token_hash=token_hash(ids), num_tokens=tokens,
                num_layers=self.layout.num_layers, expires=self.core.clock() + self.lease_s,
            )  # fmt: skip
        except MinillmError as error:  # a learner's
            log.warning("request %s is computed here: %s", request.request_id, error)
            self.stats.ended("recompute", "fault")
            return False
        importer = Importer(self.cache.pool, self.layout.num_layers)
        own = _Transfer(request, peer, machine, importer, self.core.clock(), heard=peer.heard)
        self.core.hold(request)
        self.core.watch(request, self._ended)
        self.under_way[request] = self._by_name[own.name] = own
        peer.tokens += tokens
        own.say({
            "kind": "submit", "tokens": ids, "tenant": request.tenant, "priority": request.priority,
            "layout": self.layout.to_dict(), "lease_s": self.lease_s,
        })  # fmt: skip
        return True

    def _leader(self, request: Request) -> _Transfer | None:
        """The transfer of another completion of the same prompt, whose KV both can share."""
        if self.cache.prefix is None:
            return None
        same = (own for own in self.under_way.values() if own.request.prompt_token_ids is request.prompt_token_ids)
        return next(same, None)

    def _choose(self) -> Peer | None:
        """The ready one with the fewest tokens under way."""
        ready = [peer for peer in list(self.peers.values()) if peer.state == "ready"]
        return min(ready, key=lambda peer: peer.tokens, default=None)

    def on_message(self, peer: Peer, said: Said) -> None:
        own = self._by_name.get(said.name)
        if own is None or own.peer is not peer:
            self.stats.refused({transfer.LATE: 1})
            return
        now, event = self.core.clock(), said.event
        if isinstance(event, transfer.ReserveAsked):
            if event.ticket.epoch != peer.epoch:  # of a process that has ended, or of another one's
                self.stats.refused({transfer.STALE: 1})
                return
            own.asked = now
        elif isinstance(event, transfer.PieceCame):
            own.first = own.first or now
            own.bytes += sum(t.nbytes for t in said.tensors)
            own.tensors = said.tensors
        elif isinstance(event, transfer.DoneCame):
            own.cached, own.computed_s = said.cached, said.computed_s
        self._feed(own, event)
        own.tensors = []

    def on_lost(self, peer: Peer, why: str) -> None:
        for own in [own for own in self.under_way.values() if own.peer is peer]:
            self._feed(own, transfer.PeerLost(why))

    def on_tick(self) -> None:
        for own in list(self.under_way.values()):
            self._feed(own, transfer.Tick())

    def _gave_way(self, request: Request) -> None:
        """From within a step: what follows waits for its end."""
        if (own := self.under_way.get(request)) is not None:
            self.llm.call(lambda: self._feed(own, transfer.GaveWay()))

    def _ended(self, request: Request) -> None:
        """However it ended: by an abort while it was held, or at its natural end, long after its transfer."""
        if (own := self.under_way.get(request)) is not None:
            self._feed(own, transfer.Aborted())

    def _feed(self, own: _Transfer, event: Any) -> None:
        if own.machine.ended:
            return
        lost = own.machine.holds_blocks and own.request not in self.cache.reservations
        if lost and not isinstance(event, transfer.Aborted):
            event = transfer.GaveWay()  # what came meanwhile has no place any more
        try:
            for action in own.machine.feed(event, self.core.clock()):
                self._perform(own, action, event)
        except Exception as error:  # a learner's part or machine, or a piece that does not fit after all
            words = error if isinstance(error, MinillmError) else type(error).__name__  # others' may hold a user's text
            log.warning("transfer of request %s failed here: %s", own.request.request_id, words)
            self._recover(own, error)
        if own.machine.ended:
            self._forget(own)

    def _perform(self, own: _Transfer, action: Any, event: Any) -> None:
        request = own.request
        match action:
            case transfer.Send():
                own.say({"kind": action.kind})
            case transfer.Reserve():
                found = False
                with contextlib.suppress(Exception):  # a learner's allocator: then there is no room
                    found = self.cache.reserve(request, self._keep_free, self._gave_way)
                own.reserved = self.core.clock()
                self._feed(own, transfer.Room(found))
            case transfer.Write():
                part, begun = event.part, self.core.clock()
                own.importer.write(self.cache.reservations.ids(request), part.layer, part.start, own.tensors)
                own.write_s += self.core.clock() - begun
            case transfer.GiveBack():
                self.cache.release(request)
            case transfer.Load():
                own.importer.finish(self.cache.reservations.ids(request))
                self.cache.loaded(request, action.num_tokens, min(own.cached, action.num_tokens))
                self.core.resume(request)
            case transfer.Recompute():
                own.why = action.why
                self.core.resume(request)

    def _recover(self, own: _Transfer, error: Exception) -> None:
        """Something here could not do its part: the request is computed here, and P is told."""
        if not own.machine.ended or own.machine.state == transfer.DecodeState.LOADED:
            own.machine.state, own.machine.reason = transfer.DecodeState.RECOMPUTE, "fault"
            own.say({"kind": "cancel"})
        own.why = str(error)
        with contextlib.suppress(Exception):
            self.cache.release(own.request)
        self.core.resume(own.request)

    def _forget(self, own: _Transfer) -> None:
        if self.under_way.pop(own.request, None) is None:
            return
        self._by_name.pop(own.name, None)
        for follower in own.followers:
            self.core.resume(follower)
        machine, now = own.machine, self.core.clock()
        own.peer.tokens -= machine.num_tokens
        if machine.reason == "lease" and own.heard == own.peer.heard:
            own.peer.fell_silent()
        self.stats.ended(str(machine.state), machine.reason)
        self.stats.moved(own.bytes)
        self.stats.refused(machine.dropped)
        exposed = now - own.asked - own.computed_s
        self.core.events.record(
            "transfer", own.request.request_id, outcome=str(machine.state), reason=machine.reason, bytes=own.bytes,
            tokens=machine.num_tokens, queue_s=own.asked and own.asked - own.submitted,
            allocate_s=own.reserved and own.reserved - own.asked, transfer_s=own.first and now - own.first,
            layout_s=own.write_s, exposed_s=max(0.0, exposed) if own.asked else 0.0,
        )  # fmt: skip
        if machine.state == transfer.DecodeState.LOADED:
            self.stats.took(now - (own.first or now), exposed)
        elif machine.state == transfer.DecodeState.RECOMPUTE:
            log.info("request %s is computed here: %s %s", own.request.request_id, machine.reason, own.why)


@dataclass(eq=False)
class _Transfer:
    """One attempt. On D's clock: when it was submitted, when P asked for room and got it, when the first piece came.

    followers: requests for the same prompt, which find its KV in the prefix cache then.
    """

    request: Request
    peer: Peer
    machine: transfer.DecodeTransfer
    importer: Importer
    submitted: float
    asked: float = 0.0
    reserved: float = 0.0
    first: float = 0.0
    write_s: float = 0.0
    computed_s: float = 0.0
    cached: int = 0
    bytes: int = 0
    why: str = ""
    heard: int = 0  # messages of its peer, at the submit
    tensors: list[Tensor] = field(default_factory=list)  # of the piece that is fed
    followers: list[Request] = field(default_factory=list)

    @property
    def name(self) -> tuple[str, int]:
        return self.request.request_id, self.machine.attempt

    def say(self, message: Message) -> None:
        rid, attempt = self.name
        self.peer.say({"id": rid, "attempt": attempt, **message})
