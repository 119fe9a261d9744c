"""Blocks that are set aside for KV on its way from another engine. Lesson 15 builds it.

A reservation is the memory of a request that is not in the scheduler yet: what is received is written there, and
admission then takes it over with what was loaded. It may never stop anybody who runs: where memory is short, the latest
reservation gives way first, before a running request is preempted. Its request is then computed like any other, so the
scheduler's law of progress holds with reservations as without.

Who waits at the head of the queue for want of memory comes before a new reservation: it would wait for ever if others
reserved each block that becomes free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minillm.errors import MinillmError
from minillm.request import Request

if TYPE_CHECKING:
    from minillm.cache.paged import PagedCache

GaveWay = Callable[[Request], None]


@dataclass
class Reservation:
    """ids: blocks for all of the request's tokens. loaded: how many tokens' KV is there, once that is settled."""

    ids: list[int]
    gave_way: GaveWay | None
    loaded: int | None = None
    cached: int = 0


class Reservations:
    """Of one cache, which passes itself: a reference back would outlive `del llm`."""

    def __init__(self) -> None:
        self._held: dict[Request, Reservation] = {}  # in the order in which they were made

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request: object) -> bool:
        return request in self._held

    @property
    def num_blocks(self) -> int:
        return sum(len(r.ids) for r in self._held.values())

    def take(self, cache: PagedCache, request: Request, keep_free: int, gave_way: GaveWay | None) -> bool:
        """`PagedCache.reserve`."""
        if request in self._held or request.block_ids:
            raise MinillmError(f"request {request.request_id} has blocks already; it reserves none")
        need = cache.blocks_for(request.num_tokens)
        if cache.somebody_waits or need + keep_free > cache.available(request.tenant):
            return False
        ids = cache.take(need, request.tenant)
        if ids is None:
            return False
        self._held[request] = Reservation(ids, gave_way)
        return True

    def ids(self, request: Request) -> list[int]:
        """Its blocks, in the order of its tokens. MinillmError if it has none: then nothing may be written."""
        if request not in self._held:
            raise MinillmError(f"request {request.request_id} has no reservation (any more)")
        return self._held[request].ids

    def loaded(self, request: Request, tokens: int, cached: int, block_size: int) -> None:
        """`PagedCache.loaded`."""
        most = (request.num_tokens - 1) // block_size * block_size
        if tokens % block_size or not 0 <= tokens <= most:
            raise MinillmError(
                f"request {request.request_id}: {tokens} tokens cannot be loaded; whole blocks of {block_size} can, "
                f"up to {most}, for at least one token must be computed"
            )
        self.ids(request)
        self._held[request].loaded, self._held[request].cached = tokens, cached

    def hit(self, request: Request) -> int:
        """Tokens that admission would find loaded."""
        held = self._held.get(request)
        return 0 if held is None else held.loaded or 0

    def redeem(self, request: Request) -> Reservation | None:
        """At admission: the reservation ends, and its blocks are the request's. None: there is none to use."""
        held = self._held.get(request)
        if held is None or held.loaded is None:
            return None
        return self._held.pop(request)

    def pop(self, request: Request) -> list[int]:
        """The blocks of a reservation that ends, [] if there is none."""
        held = self._held.pop(request, None)
        return [] if held is None else held.ids

    def give_way(self, cache: PagedCache) -> bool:
        """End the latest reservation. False: there is none."""
        if not self._held:
            return False
        request, held = next(reversed(self._held.items()))
        cache.release(request)
        if held.gave_way is not None:
            held.gave_way(request)
        return True
