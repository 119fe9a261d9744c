"""Prefill on one engine, decode on another: what both sides share. Lesson 15 builds it.

The decode engine D is the front, which clients talk to. `remote_prefill.py` is its side, `prefill_worker.py` the other,
`transfer.py` the two machines that they drive. A request takes this way:

submit    D sends the tokens of a prompt's whole blocks, all but the last token, and holds the request
prefill   P computes them as a request of its own
reserve   when it begins, P shows a ticket; D sets blocks aside, or says that it has no room
transfer  each layer's KV goes out as soon as it is computed (`exporter.py`), and into the blocks (`importer.py`)
resume    all is there: the request joins D's scheduler, which computes the rest and draws the first token
stream    as always

Whatever fails before resume, the request is computed by D, as if there were no P.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from minillm.cache.build import make_namespace, weights_id
from minillm.cache.pool import KVPool
from minillm.cluster.exporter import Tap
from minillm.cluster.importer import checksum, fits
from minillm.cluster.layout import KVLayout, why_not
from minillm.cluster.ticket import MAX_LEASE_S, Ticket
from minillm.cluster.transfer_events import DoneCame, Part, PieceCame, Refused, ReserveAsked
from minillm.config import dtype_name
from minillm.errors import MinillmError

LEASE_S = 30.0
MAX_KEPT_BYTES = 1 << 30  # of pieces that wait at P, of all requests


def layout_of(engine: Any) -> KVLayout:
    """How an engine's KV lies. Raises MinillmError for an engine without a paged cache."""
    if engine.cache is None or engine.core is None:
        raise MinillmError("only the KV of an engine with kv_cache='paged' and no static batching can be handed over")
    config, pool = engine.config, engine.cache.pool
    whole = engine.model.config if isinstance(pool, KVPool) else pool.config
    attention = engine.runner.attention
    while isinstance(attention, Tap):
        attention = attention.inner
    name = make_namespace(
        engine.model, engine.tokenizer, config, attention, weights_id(engine.tokenizer.folder, exact=False), whole
    )
    return KVLayout(
        num_layers=whole.num_layers, num_kv_heads=whole.num_kv_heads, head_dim=whole.head_dim,
        dtype=dtype_name(engine.model.dtype), kv_dtype=config.kv_cache_dtype, block_size=config.block_size,
        tp_size=config.tensor_parallel_size, model=name,
    )  # fmt: skip


class Stats:
    """What has been handed over: counts by (outcome, reason), bytes, seconds. Any thread may count and read.

    seconds          from the first piece to the last word of a transfer that was loaded
    exposed_seconds  of these, what came after P had computed everything: what the transfer cost the request. The rest
                     overlapped with the prefill
    dropped          messages that were not believed, by why
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.dropped: Counter[str] = Counter()
        self.transfers = self.bytes = 0
        self.seconds = self.exposed_seconds = 0.0

    def ended(self, outcome: str, reason: str = "") -> None:
        with self._lock:
            self.outcomes[outcome, reason] += 1

    def moved(self, nbytes: int) -> None:
        with self._lock:
            self.bytes += nbytes

    def took(self, seconds: float, exposed: float) -> None:
        with self._lock:
            self.transfers += 1
            self.seconds += seconds
            self.exposed_seconds += min(seconds, max(0.0, exposed))

    def refused(self, why: Mapping[str, int]) -> None:
        with self._lock:
            self.dropped.update(why)

    @property
    def overlap(self) -> float | None:
        """Part of the transfers' time that the prefill hid, 0 to 1; None before the first."""
        return 1.0 - self.exposed_seconds / self.seconds if self.seconds else None

    def copy(self) -> dict[str, Any]:
        with self._lock:
            return {
                "outcomes": dict(self.outcomes), "dropped": dict(self.dropped), "transfers": self.transfers,
                "bytes": self.bytes, "seconds": self.seconds, "exposed_seconds": self.exposed_seconds,
            }  # fmt: skip


def number(message: Mapping[str, Any], name: str) -> int:
    """A whole number of a message. Raises MinillmError."""
    value = message.get(name)
    if type(value) is not int:
        raise MinillmError(f"a {message.get('kind')!r:.40} message needs a whole number {name}, got {value!r:.80}")
    return value


def text(message: Mapping[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str):
        raise MinillmError(f"a {message.get('kind')!r:.40} message needs a text {name}, got {value!r:.80}")
    return value


class Said(NamedTuple):
    """A message of P that makes sense. name: D's request id and attempt. cached, computed_s: of a `DoneCame`."""

    name: tuple[str, int]
    event: ReserveAsked | PieceCame | DoneCame | Refused
    tensors: list[Tensor]
    cached: int = 0
    computed_s: float = 0.0


def read(message: Mapping[str, Any], tensors: list[Tensor], layout: KVLayout) -> Said:
    """What P says to a D of this layout, checksums judged. Raises MinillmError for what is no such message."""
    kind = text(message, "kind")
    if kind == "reserve":
        ticket = Ticket.from_dict(message.get("ticket"))
        return Said((ticket.request_id, ticket.attempt), ReserveAsked(ticket, why_not(ticket.layout, layout)), [])
    name = text(message, "id"), (attempt := number(message, "attempt"))
    match kind:
        case "piece":
            layer, start, count = (number(message, n) for n in ("layer", "start", "count"))
            intact = fits(tensors, count, layout) and checksum(tensors) == message.get("crc32")
            part = Part(attempt, text(message, "epoch"), layer, start, count, intact)
            return Said(name, PieceCame(part), tensors)
        case "done":
            if (cached := number(message, "cached")) < 0:
                raise MinillmError(f"a 'done' message needs cached, tokens, got {cached}")
            seconds = message.get("computed_s")
            if type(seconds) not in (int, float) or not 0 <= seconds < MAX_LEASE_S:  # type: ignore[operator]
                raise MinillmError(f"a 'done' message needs computed_s, seconds, got {seconds!r:.80}")
            return Said(name, DoneCame(attempt, text(message, "epoch")), [], cached, float(seconds))  # type: ignore[arg-type]
        case "refused":
            return Said(name, Refused(attempt, text(message, "why")), [])
    raise MinillmError(f"kind {kind!r:.40} is not known")
