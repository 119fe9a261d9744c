"""Prefill and decode engines on a virtual clock: the very transfer machines over a paced link. Lesson 15.

The rules are those of real processes: decode engines are the front. A prompt of more than a block goes to a prefill
engine, which asks for room when it begins and sends each layer's KV as soon as that is computed; blocks are reserved
between two steps; where there is no room, or the lease has ended, the prompt is computed where it is decoded. The
machines are transfer.py's, the reservations the cache's own.

A piece occupies the port of the engine that sends it and of the one that gets it, and then travels for the latency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from minillm.cluster import transfer as t
from minillm.cluster.migration import Engine, Wire, migration
from minillm.cluster.paced import Colocated, FleetRun, PacedEngine, Sample
from minillm.request import Request

LEASE_S = 60.0
EPOCH = "paced"


class _Ticket(NamedTuple):
    attempt: int
    epoch: str
    token_hash: str
    num_tokens: int


class _Piece(NamedTuple):
    """KV of tokens start to start + tokens of one layer; slots: what the shadow keeps, once for all layers."""

    layer: int
    start: int
    tokens: int
    slots: Sequence[int]
    nbytes: float


@dataclass
class _Handoff:
    """One request under way from p to d: a request at either side, a machine at either side."""

    p: PacedEngine
    d: PacedEngine
    source: Request
    target: Request
    ticket: _Ticket
    prefill: t.PrefillTransfer
    decode: t.DecodeTransfer
    exported: int = 0  # tokens


class Split(Colocated):
    """p engines that compute prompts and d that decode; a newcomer goes to the one of each kind with least to do.

    budget, decode_budget: tokens a step of either kind. lease_s: virtual seconds after which neither side waits for the
    other. `ends` counts how handoffs ended: "loaded", the reasons of a recompute, "short" (a prompt within a block).
    """

    def __init__(
        self, engine: Engine, prefill: int, decode: int, wire: Wire, budget: int, decode_budget: int | None = None,
        lease_s: float = LEASE_S,
    ):  # fmt: skip
        super().__init__(engine, decode, decode_budget or budget)
        clock = self.engines[0].clock
        self.prefill = [PacedEngine(self.timeline, engine, budget, f"prefill {i}", clock) for i in range(prefill)]
        for i, e in enumerate(self.engines):
            e.name = f"decode {i}"
        for p in self.prefill:
            p.before = lambda rows, begun, seconds, p=p: self._computing(p, rows, begun, seconds)  # type: ignore[misc]
        self.engine, self.wire, self.lease_s = engine, wire, lease_s
        self.layers = engine.config.num_layers
        self.port_free: dict[PacedEngine, float] = dict.fromkeys([*self.prefill, *self.engines], 0.0)
        self.handoffs: dict[Request, _Handoff] = {}  # by the request at the prefill engine
        self.ends: Counter[str] = Counter()
        self.attempts = 0

    def send(self, prompt: Sequence[int], new: int) -> None:
        now, moved = self.timeline.now, self.engine.moved(len(prompt))
        d = self.least_loaded()
        target = d.request(prompt, new, now)
        self.made.append((d, target))
        if moved == 0:
            self.ends["short"] += 1
            d.add(target)
        else:
            d.hold(target)
            p = min(self.prefill, key=lambda e: e.left)
            self.attempts += 1
            ticket, expires = _Ticket(self.attempts, EPOCH, str(self.attempts), moved), now + self.lease_s
            source = p.request(prompt, 1, now)
            h = self.handoffs[source] = _Handoff(
                p, d, source, target, ticket, t.PrefillTransfer(self.attempts, expires),
                t.DecodeTransfer(self.attempts, ticket.token_hash, moved, self.layers, expires),
            )  # fmt: skip
            p.hold(source)  # it counts as p's from now on; the message takes its time
            self._later(lambda: p.call(lambda: p.core.resume(source)))
            self.timeline.at(expires, lambda: self._tick(h))
        self.samples.append(self.sample())

    def sample(self) -> Sample:
        waiting = sum(e.core.scheduler.num_waiting + len(e.core.held) for e in self.prefill)
        decode = sum(e.core.scheduler.num_waiting for e in self.engines)
        share = sum(e.kv_share for e in self.engines) / len(self.engines)
        return Sample(self.timeline.now, waiting, decode, share)

    def result(self) -> FleetRun:
        run = super().result()
        for p in self.prefill:
            p.core.kv.check()
            run.busy[p.name] = p.busy_s
        run.handoffs = dict(self.ends)
        return run

    def _later(self, work: Callable[[], None], after: float = 0.0) -> None:
        """A message: the wire's latency from now, or from `after` if that is later."""
        self.timeline.at(max(self.timeline.now, after) + self.wire.latency_s, work)

    def _tick(self, h: _Handoff) -> None:
        if not h.prefill.ended:
            self._at_prefill(h, t.Tick())
        if not h.decode.ended:
            self._at_decode(h, t.Tick())

    # The prefill side -------------------------------------------------------------------------------------------------

    def _computing(self, p: PacedEngine, rows: Sequence[tuple[Request, int]], begun: float, seconds: float) -> None:
        """A step of p begins: what it computes leaves layer by layer. The shadow's slots are written already.

        Of several devices no one has all heads of a layer: what they computed leaves after the step. Without overlap
        all of it leaves after the last step.
        """
        layerwise = self.wire.overlap and self.engine.tp == 1
        bs, shares = self.engine.block_size, range(1, self.layers + 1)
        for source, n in rows:
            h = self.handoffs[source]
            if source.num_computed_tokens == n:
                self.timeline.at(begun, lambda h=h: self._at_prefill(h, t.Started()))  # type: ignore[misc]
            start, end = h.exported, min(source.num_computed_tokens, h.ticket.num_tokens)
            if end <= start or (end < h.ticket.num_tokens and not self.wire.overlap):
                continue
            h.exported = end
            pool: Any = p.core.kv.pool
            slots = [pool.slots[source.block_ids[i // bs]][i % bs] for i in range(start, end)]
            size = (end - start) * self.engine.kv_token_bytes / self.layers
            for layer, share in enumerate(shares):
                piece = _Piece(layer, start, end - start, slots, size)
                done = begun + seconds * (share / self.layers if layerwise else 1.0)
                self.timeline.at(done, lambda h=h, piece=piece: self._at_prefill(h, t.Produced(piece)))  # type: ignore[misc]
            if end == h.ticket.num_tokens:
                self.timeline.at(begun + seconds, lambda h=h: self._at_prefill(h, t.Computed()))  # type: ignore[misc]

    def _at_prefill(self, h: _Handoff, event: Any) -> None:
        if h.prefill.ended:  # what a step still produces for somebody who has gone
            return
        for action in h.prefill.feed(event, self.timeline.now):
            match action:
                case t.Send("reserve"):
                    self._later(lambda: h.d.call(lambda: self._at_decode(h, t.ReserveAsked(h.ticket))))
                case t.Send("done"):
                    done = t.DoneCame(h.ticket.attempt, EPOCH)
                    self._later(lambda done=done: self._at_decode(h, done), self.port_free[h.p])  # type: ignore[misc]
                case t.Send("refused", why):
                    refused = t.Refused(h.ticket.attempt, why)
                    self._later(lambda refused=refused: self._at_decode(h, refused))  # type: ignore[misc]
                case t.SendPieces(pieces):
                    for piece in pieces:
                        self._transmit(h, piece)
                case t.Stop():
                    h.p.call(lambda: h.p.abort(h.source))

    def _transmit(self, h: _Handoff, piece: _Piece) -> None:
        start = max(self.timeline.now, self.port_free[h.p], self.port_free[h.d])
        end = self.port_free[h.p] = self.port_free[h.d] = start + piece.nbytes / self.wire.bandwidth
        part = t.Part(h.ticket.attempt, EPOCH, piece.layer, piece.start, piece.tokens)
        self._later(lambda: self._at_decode(h, t.PieceCame(part), piece), end)

    # The decode side --------------------------------------------------------------------------------------------------

    def _at_decode(self, h: _Handoff, event: Any, piece: _Piece | None = None) -> None:
        kv, attempt = h.d.core.kv, h.ticket.attempt
        for action in h.decode.feed(event, self.timeline.now):
            match action:
                case t.Reserve():
                    found = kv.reserve(h.target, gave_way=lambda _: self._at_decode(h, t.GaveWay()))
                    self._at_decode(h, t.Room(found))
                case t.Send(kind):
                    answer = {"reserved": t.RoomGiven, "no_room": t.NoRoom, "ack": t.Acked, "cancel": t.Cancelled}[kind]
                    self._later(lambda answer=answer: self._at_prefill(h, answer(attempt)))  # type: ignore[misc]
                case t.Write():
                    if piece is not None and piece.layer == 0:
                        self._write(h, piece)
                case t.Load(tokens):
                    self.ends["loaded"] += 1
                    copies = migration(self.engine, h.target.num_prompt_tokens, self.wire).layout_s
                    self.timeline.at(
                        self.timeline.now + copies, lambda n=tokens: h.d.call(lambda: self._join(h, n))  # type: ignore[misc]
                    )  # fmt: skip
                case t.GiveBack():
                    kv.release(h.target)
                case t.Recompute(reason):
                    self.ends[reason] += 1
                    h.d.call(lambda: h.d.core.resume(h.target))

    def _write(self, h: _Handoff, piece: _Piece) -> None:
        ids, bs = h.d.core.kv.reservations.ids(h.target), self.engine.block_size
        pool: Any = h.d.core.kv.pool
        for i, slot in enumerate(piece.slots, piece.start):
            pool.slots[ids[i // bs]][i % bs] = slot

    def _join(self, h: _Handoff, tokens: int) -> None:
        if h.target in h.d.core.kv.reservations:  # it may have given way since
            h.d.core.kv.loaded(h.target, tokens)
        h.d.core.resume(h.target)
