"""The prefill side: prompts of other engines, computed here, and their KV sent while it is computed. Lesson 15.

>>> worker = PrefillWorker(llm, listen("shared-memory", key))   # llm: an AsyncLLM, whose own clients are not disturbed

A submitted prompt is a request of this engine like any other: it waits, is chunked, may be preempted, and finds its
beginning in the prefix cache. What it generates is thrown away.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, NamedTuple

from torch import Tensor

from minillm.async_llm import AsyncLLM
from minillm.cluster import transfer
from minillm.cluster.disagg import MAX_KEPT_BYTES, Stats, layout_of, number, text
from minillm.cluster.exporter import Exporter, Followed, Tokens
from minillm.cluster.importer import checksum
from minillm.cluster.layout import KVLayout, why_not
from minillm.cluster.link import Link, Posted
from minillm.cluster.ticket import Ticket, new_epoch, token_hash
from minillm.cluster.transport import Channel, ChannelClosed, Listener, Message
from minillm.errors import MinillmError
from minillm.request import Request, SamplingParams

log = logging.getLogger("minillm.kv")
ACCEPT_S = 0.2
FLUSH_S = 2.0  # for the last words to all decode engines, of which one may not listen
MOST_JOBS = 4096  # prompts of one decode engine at a time
MOST_QUEUED = 1 << 14  # messages for it that it has not read: it is not listened to meanwhile
Name = tuple[str, int]  # D's request id and attempt
ANSWERS = {
    "reserved": transfer.RoomGiven, "no_room": transfer.NoRoom, "ack": transfer.Acked, "cancel": transfer.Cancelled,
}  # fmt: skip
REASONS: dict[type, str] = {
    transfer.Acked: "", transfer.NoRoom: "no_room", transfer.Cancelled: "cancelled", transfer.PeerLost: "peer_lost",
    transfer.Failed: "failed", transfer.Produced: "failed",
}  # fmt: skip


class Piece(NamedTuple):
    """A message and its tensors, ready to be sent."""

    message: Message
    tensors: list[Tensor]
    nbytes: int


class PrefillWorker:
    """Serves all who connect to `listener`, until `close`. max_kept_bytes: of pieces that wait to be sent, of all.

    To end without losing what is under way: `drain`, wait until `num_jobs` is 0, `give_back` what is left, `close`.

    epoch: of this worker; a ticket of an earlier one is worth nothing. stats: what became of the transfers.
    """

    def __init__(self, llm: AsyncLLM, listener: Listener, *, max_kept_bytes: int = MAX_KEPT_BYTES):
        self.layout = layout_of(llm.engine)
        self.llm, self.listener, self.max_kept_bytes = llm, listener, max_kept_bytes
        self.epoch, self.stats = new_epoch(), Stats()
        self.exporter = Exporter(llm.engine)
        self.peers: set[_Peer] = set()
        self._closed = self._draining = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._accept, name="minillm-kv-accept", daemon=True)
        self._thread.start()

    @property
    def num_jobs(self) -> int:
        """Transfers that have not ended."""
        return sum(len(peer.jobs) for peer in list(self.peers))

    @property
    def kept_bytes(self) -> int:
        """Bytes of pieces that wait: for room at the other side, or for the wire."""
        return sum(peer.kept_bytes for peer in list(self.peers))

    def serve(self, channel: Channel) -> None:
        """Talk to a decode engine over this channel. RuntimeError if no thread can be had for it."""
        peer = _Peer(self, channel)
        with self._lock:
            if self._closed or self._draining:
                channel.close()
                return
            self.peers.add(peer)
            peer.link.say({"kind": "hello", "epoch": self.epoch, "layout": self.layout.to_dict()})
        try:
            peer.link.start()
        except RuntimeError:
            self.peers.discard(peer)
            raise

    def drain(self) -> None:
        """Take no new prompt and nobody new, and say so to all who are connected. What is under way goes on."""
        with self._lock:
            first, self._draining = not self._draining, True
            if first:
                for peer in list(self.peers):
                    peer.link.say({"kind": "draining"}, soon=True)
        if first:
            self.listener.close()  # whoever takes this one's place may listen there

    def give_back(self, why: str) -> int:
        """End what is under way: each decode engine is told why, and computes it. Returns how many prompts that was."""
        jobs = [job for peer in list(self.peers) for job in list(peer.jobs.values())]
        for job in jobs:
            job.feed(transfer.Failed(why))
        end = time.monotonic() + FLUSH_S
        for peer in list(self.peers):
            peer.link.flush(max(0.0, end - time.monotonic()))
        return len(jobs)

    def enter(self, peer: _Peer, job: _Job) -> None:
        """Raises MinillmError for a prompt that comes too late. One that has entered is waited for."""
        with self._lock:
            if self._draining:
                raise MinillmError("this prefill engine is draining")
            peer.jobs[job.name] = job

    def close(self) -> None:
        """Take nothing more, and let go of everything. Who is under way falls back to recompute."""
        with self._lock:
            self._closed, drained = True, self._draining
        if not drained:  # else it is closed, and somebody else may listen there by now
            self.listener.close()
        for peer in list(self.peers):
            peer.link.close()
            peer.lost("the prefill engine was closed")
        self.llm.call(self.exporter.close)
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _accept(self) -> None:
        while not self._closed:
            try:
                if (channel := self.listener.accept(ACCEPT_S)) is not None:
                    self.serve(channel)
            except ChannelClosed:
                return
            except Exception as error:  # this thread is the only one that would let the next one in
                log.warning("a decode engine could not be let in: %s: %s", type(error).__name__, error)
                time.sleep(ACCEPT_S)


class _Peer:
    """One decode engine."""

    def __init__(self, worker: PrefillWorker, channel: Channel):
        self.worker, self.jobs = worker, dict[Name, _Job]()
        self.link = Link(channel, self.hear, self.lost, self.tick, busy=self.busy)
        self.posted = Posted(worker.llm, self.link.look)

    @property
    def kept_bytes(self) -> int:
        return self.link.queued_bytes + sum(job.machine.kept_bytes for job in list(self.jobs.values()))

    def busy(self) -> bool:
        return self.posted.behind or self.link.queued >= MOST_QUEUED

    def hear(self, message: Message, tensors: list[Tensor]) -> None:
        if message.get("kind") == "ping":  # from who has heard nothing for a whole lease: does the engine live?
            self.posted.post(lambda: self.link.say({"kind": "pong"}))
            return
        try:
            kind, name = text(message, "kind"), (text(message, "id"), number(message, "attempt"))
            if kind == "submit":
                self.submit(name, message)
            elif (job := self.jobs.get(name)) is None:
                self.worker.stats.refused({transfer.LATE: 1})
            else:
                job.feed(ANSWERS[kind](name[1]))
        except (MinillmError, KeyError) as error:
            self.worker.stats.refused({"malformed": 1})
            log.warning("a decode engine sent what is no message: %s", error)

    def submit(self, name: Name, message: Message) -> None:
        if name in self.jobs:  # said twice
            self.worker.stats.refused({transfer.DUPLICATE: 1})
            return
        try:
            if len(self.jobs) >= MOST_JOBS:
                raise MinillmError(f"{MOST_JOBS} prompts of this decode engine are under way")
            job = _Job(self, name, message)
            self.worker.enter(self, job)
        except MinillmError as error:
            self.worker.stats.ended("refused", "door")
            refused = {"kind": "refused", "id": name[0], "attempt": name[1], "why": str(error)}
            self.link.say(refused, soon=True)  # nothing of this attempt waits, and what does may be much
            return
        if self.link.ended:  # meanwhile, and `lost` has not met this one
            job.feed(transfer.PeerLost("the channel has ended"))
            return
        self.posted.post(job.begin)

    def tick(self) -> None:
        for job in list(self.jobs.values()):
            job.feed(transfer.Tick())

    def lost(self, why: str) -> None:
        for job in list(self.jobs.values()):
            job.feed(transfer.PeerLost(why))
        self.worker.peers.discard(self)


class _Job:
    """One prompt. Its machine is fed by the engine's thread and by the link's."""

    def __init__(self, peer: _Peer, name: Name, message: Message):
        """Raises MinillmError with why this engine will not compute it."""
        self.peer, self.name, worker = peer, name, peer.worker
        llm, self.lock = worker.llm, threading.RLock()
        if llm.dead is not None:
            raise MinillmError("the prefill engine has ended")
        if (why := why_not(worker.layout, KVLayout.from_dict(message.get("layout")))) is not None:
            raise MinillmError(why)
        tokens = message.get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise MinillmError("tokens must be a list of token ids")
        lease: Any = message.get("lease_s")  # the ticket judges it, and the names
        self.ticket = Ticket(*name, worker.epoch, token_hash(tokens), len(tokens), worker.layout, lease)
        self.clock = llm.core.clock
        priority = number(message, "priority") if llm.engine.reads_priority else 0
        self.request = llm.make_request(
            tokens, SamplingParams(temperature=0.0, max_tokens=1), f"{name[0]}~{name[1]}", priority=priority,
            tenant=text(message, "tenant"), deadline_s=lease if llm.engine.expires else None,
        )  # fmt: skip
        self.machine = transfer.PrefillTransfer(
            attempt=name[1], expires=self.clock() + lease, max_kept_bytes=worker.max_kept_bytes
        )
        self.started = self.computed = 0.0

    # In the engine's thread

    def begin(self) -> None:
        worker, core = self.peer.worker, self.peer.worker.llm.core
        with self.lock:
            if self.machine.ended:
                return
        worker.exporter.follow(
            self.request,
            Followed(self.request.num_prompt_tokens, self.on_started, self.on_tokens, self.on_computed, self.on_fault),
        )
        core.watch(self.request, self.on_end)
        try:
            core.add(self.request)
        except Exception as error:  # a learner's scheduler
            self.feed(transfer.Failed(f"{type(error).__name__}: {error}"))

    def on_started(self) -> None:
        self.started = self.clock()
        self.feed(transfer.Started())

    def on_tokens(self, tokens: Tokens) -> None:
        (rid, attempt), epoch = self.name, self.peer.worker.epoch
        if self.peer.worker.kept_bytes + tokens.nbytes > self.peer.worker.max_kept_bytes:
            self.feed(transfer.Failed(f"more than {self.peer.worker.max_kept_bytes:,} bytes would wait to be sent"))
            return
        message = {
            "kind": "piece", "id": rid, "attempt": attempt, "epoch": epoch, "layer": tokens.layer,
            "start": tokens.start, "count": tokens.count_tokens, "crc32": checksum(tokens.tensors),
        }  # fmt: skip
        self.feed(transfer.Produced(Piece(message, tokens.tensors, tokens.nbytes)))

    def on_computed(self) -> None:
        self.computed = self.clock()
        self.feed(transfer.Computed())

    def on_fault(self, error: Exception) -> None:
        self.feed(transfer.Failed(f"its KV could not be read: {type(error).__name__}: {error}"))

    def on_end(self, request: Request) -> None:
        self.peer.worker.llm.core.failures.pop(request, None)  # nobody else asks for it
        self.peer.worker.exporter.forget(request)
        if not self.computed:
            self.feed(transfer.Failed(str(request.stop_reason or "it ended before it was computed")))

    def stop(self) -> None:
        self.peer.worker.exporter.forget(self.request)
        self.peer.worker.llm.core.abort(self.request)

    # In any thread

    def feed(self, event: Any) -> None:
        with self.lock:
            if self.machine.ended:
                return
            for action in self.machine.feed(event, self.clock()):
                self.perform(action)
            if self.machine.ended:
                self.peer.jobs.pop(self.name, None)
                lease = self.machine.state == transfer.PrefillState.EXPIRED
                self.peer.worker.stats.ended(str(self.machine.state), "lease" if lease else REASONS[type(event)])
                self.peer.worker.stats.refused(self.machine.dropped)

    def perform(self, action: Any) -> None:
        (rid, attempt), worker, link = self.name, self.peer.worker, self.peer.link
        match action:
            case transfer.Send(kind="reserve"):
                link.say({"kind": "reserve", "ticket": self.ticket.to_dict()})
            case transfer.Send(kind="done"):
                link.say({
                    "kind": "done", "id": rid, "attempt": attempt, "epoch": worker.epoch,
                    "cached": self.request.num_cached_tokens, "computed_s": self.computed - self.started,
                }, key=self.name)  # fmt: skip
            case transfer.Send():
                link.say({"kind": action.kind, "id": rid, "attempt": attempt, "why": action.why})
            case transfer.SendPieces():
                for piece in action.pieces:
                    link.say(piece.message, piece.tensors, key=self.name)
                    worker.stats.moved(piece.nbytes)
            case transfer.Drop():
                link.drop(self.name)
            case transfer.Stop():
                self.peer.posted.post(self.stop)
