"""The paged KV cache of an engine: memory, block tables, and what of it outlives a request.

Lesson 06 builds blocks and tables, lesson 11 the prefix cache behind them; how blocks leave for a tier and come back is
swap.py's. A block is

free    nobody's
live    in the block table of at least one request (of several, if they begin alike), or reserved for one (reserve.py)
cached  held by the prefix cache alone: hittable until something needs its memory

and free + live + cached is the whole pool: `check` is that law. Only full blocks are shared, and a hit leaves at least
one token to compute, so nobody ever writes into a shared block and no copy-on-write is needed.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from minillm.cache.blocks import BlockAllocator
from minillm.cache.namespace import Namespace, Namespaces, PublicPrefixes
from minillm.cache.reserve import GaveWay, Reservations
from minillm.cache.swap import Pool, Swap
from minillm.cache.tiers import Tiers
from minillm.cache.view import Tokens
from minillm.errors import MinillmError
from minillm.events import EventLog
from minillm.parts import make_part
from minillm.request import Request

if TYPE_CHECKING:
    from minillm.cache.prefix import PrefixCache
    from minillm.roofline.restore import RestoreModel


class Refusal(NamedTuple):
    """Why the last request in vain was not admitted: it need not be looked up again while all this is so."""

    request: Request
    keep_free: int
    releases: int  # by then
    available: int
    hit: int  # blocks
    following: list[int]  # tokens of the block that would make the hit longer


class PagedCache:
    """pool: the memory; allocator: which blocks are free; prefix: what is kept of finished requests; tiers: where
    blocks go that lose their place. The last two may be absent.

    The allocator and the prefix cache may be a learner's, so what they say is judged: a block given twice would mix two
    sequences.
    """

    def __init__(
        self, pool: Pool, make_allocator: Callable[[int], Any] = BlockAllocator, *, prefix: PrefixCache | None = None,
        tiers: Tiers | None = None, restore: RestoreModel | None = None, preemption_mode: str = "auto",
        namespace: str = "", public: PublicPrefixes | None = None, events: EventLog | None = None,
    ):  # fmt: skip
        """namespace: of the engine: weights, dtype, ... (rule 6 of docs/source.md).
        restore: the cost model that chooses between recompute and swap; without one, a tier is always used."""
        self.pool = pool
        self.allocator = make_part("allocator", make_allocator, "the number of blocks", pool.num_blocks)
        needed = ("allocate", "free") if prefix is None else ("allocate", "free", "share")
        for name in needed:
            if not callable(getattr(self.allocator, name, None)):
                raise MinillmError(f"parts: the allocator needs a method {name}, got {self.allocator!r:.80}")
        self.prefix, self.public = prefix, public
        self.events = events if events is not None else EventLog(0)
        self._promised: dict[Request, None] = {}  # static groups: whom blocks were promised to
        self._users: Counter[int] = Counter()  # block -> requests that have it in their table
        self._holders: set[Request] = set()  # requests with a block in their table
        self.reservations = Reservations()
        self._releases = 0  # so far: what may let in somebody who did not fit
        self._refusal: Refusal | None = None
        self._namespaces = Namespaces(namespace, public)
        self._live_cached = 0  # live blocks that the prefix cache holds as well
        self._committed: dict[Request, int] = {}  # blocks of a request that the prefix cache has been shown
        whose = None if prefix is None else self._namespaces.of  # not ours: a cycle would outlive `del llm`
        self.swap = Swap(pool, tiers, restore, preemption_mode, self.events, whose)
        if prefix is not None and tiers is not None:
            prefix.on_evict = self.swap.spill
        _ = self.num_free  # judged before anything runs

    @property
    def tiers(self) -> Tiers | None:
        return self.swap.tiers

    @tiers.setter
    def tiers(self, tiers: Tiers | None) -> None:
        self.swap.tiers = tiers

    @property
    def restore(self) -> RestoreModel | None:
        return self.swap.restore

    # Counting -----------------------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def most_blocks(self, request: Request) -> int:
        """Blocks of the longest sequence that the request may reach. Its last token is never computed."""
        return self.blocks_for(request.num_prompt_tokens + request.max_tokens - 1)

    @property
    def num_free(self) -> int:
        """What the allocator says."""
        free = getattr(self.allocator, "num_free", None)
        if not isinstance(free, int) or isinstance(free, bool):
            raise MinillmError(f"parts: the allocator's num_free must be a number (a property), got {free!r:.80}")
        return free

    @property
    def num_live(self) -> int:
        return len(self._users)

    @property
    def num_cached(self) -> int:
        """Blocks that the prefix cache holds and no request uses."""
        return 0 if self.prefix is None else len(self.prefix) - self._live_cached

    def available(self, tenant: str = "") -> int:
        """Blocks that a tenant's request could get now: free ones, and cached ones that may be evicted for it."""
        evictable = 0 if self.prefix is None else self.prefix.evictable(tenant)
        return self.num_free + evictable - self.promised

    def capacity(self, tenant: str = "") -> int:
        """The most blocks that a tenant's request may ever have: all but what others' floors keep, and the public
        blocks that those may follow."""
        floors = {} if self.prefix is None else self.prefix.floors
        kept = sum(blocks for owner, blocks in floors.items() if owner != tenant)
        public = self.public.num_blocks if kept and self.public is not None else 0
        return max(0, self.pool.num_blocks - kept - public)

    def check(self) -> None:
        """Raise MinillmError unless free + live + cached == total, and the parts agree with themselves."""
        self.allocator.check()
        if self.prefix is not None:
            self.prefix.check()
        free, live, cached, total = self.num_free, self.num_live, self.num_cached, self.pool.num_blocks
        both = 0 if self.prefix is None else sum(i in self.prefix for i in self._users)
        if both != self._live_cached:
            raise MinillmError(f"{both} live blocks are cached, {self._live_cached} were counted")
        if free + live + cached != total:
            raise MinillmError(f"blocks are lost or doubled: {free} free + {live} live + {cached} cached != {total}")

    def why_not(self, request: Request) -> str:
        """Why a request cannot be admitted though nothing else runs."""
        if lost := self._lost():
            return lost
        need, most = self.blocks_for(request.num_tokens), self.capacity(request.tenant)
        return f"its {request.num_tokens} tokens need {need} blocks of KV cache, and it may have {most}, even alone"

    def _lost(self) -> str:
        free, held = self.num_free, self.num_live + self.num_cached
        if free + held == self.pool.num_blocks:
            return ""
        return (
            f"parts: the allocator says that {free} blocks are free; {held} of {self.pool.num_blocks} are held, so it "
            "has lost some"
        )

    # Admission: find, take, fill ---------------------------------------------------------------------------

    def admit(self, request: Request, keep_free: int = 0) -> bool:
        """Give a waiting request the blocks of all its tokens and move its counter over what need not be computed.

        All or nothing: False leaves everything as it was. keep_free: blocks that must be left over.
        """
        if request in self.reservations and self._redeem(request):
            return True
        if self._still_refused(request, keep_free):
            return False
        bs = self.pool.block_size
        most = (request.num_tokens - 1) // bs  # whole blocks, with a token left to compute: its logits are wanted
        ids: list[int] = []
        found: list[int] = []
        if self.prefix is not None:
            found, _ = self.prefix.peek(Tokens(request), self.namespace(request))  # not yet a use: it may not fit
            ids = self._judge_hit(found[:most])
            self._enter(ids)  # before anything is evicted for the rest
        new: list[int] | None = None
        try:
            missing, alone = self.blocks_for(request.num_tokens) - len(ids), not self._holders
            if alone or missing + keep_free <= self.available(request.tenant):
                new = self._take(missing, request.tenant, alone)
            while new is None and alone and self.reservations.give_way(self):
                new = self._take(missing, request.tenant, alone)
            if new is not None and ids:
                self.allocator.share(ids)
        except BaseException:  # a learner's part: nothing of this admission may stay
            self._leave(ids)
            with contextlib.suppress(Exception):
                self.allocator.free(new or [])
            raise
        if new is None:
            self._leave(ids)
            following = Tokens(request)[len(ids) * bs : (len(ids) + 1) * bs]
            self._refusal = Refusal(
                request, keep_free, self._releases, self.available(request.tenant), len(ids), following
            )
            return False
        self._enter(new)
        self._holders.add(request)
        request.block_ids = [*ids, *new]  # from here on `release` gives everything back
        self._committed[request] = len(ids)
        request.num_computed_tokens = len(ids) * bs
        if self.prefix is not None:  # who comes back after a preemption is no second query
            self.prefix.use(found, request.num_tokens, counted=not request.num_preemptions)
        if ids:
            self.events.record("hit", request.request_id, tokens=len(ids) * bs, source="prefix")
        self.swap.back(request, most)
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_computed_tokens
        return True

    def _still_refused(self, request: Request, keep_free: int) -> bool:
        """Whether nothing has happened that could let in the one who did not fit the last time.

        That would be a release, more blocks to be had, another limit, or a longer hit (see `commit`). Else a long
        prompt at the head of the queue would be looked up in every step.
        """
        last = self._refusal
        if last is None or last.request is not request or not self._holders:
            return False
        same = (last.keep_free, last.releases) == (keep_free, self._releases)
        return same and self.available(request.tenant) <= last.available

    def missing(self, request: Request) -> int:
        """Tokens that a step would have to compute were a waiting request admitted now, if no tier has any of them."""
        hit = self.reservations.hit(request)
        if not hit and self.prefix is not None:
            hit = self.prefix.peek(Tokens(request), self.namespace(request))[1]
        return request.num_tokens - min(hit, (request.num_tokens - 1) // self.pool.block_size * self.pool.block_size)

    def _judge_hit(self, ids: list[int]) -> list[int]:
        if len(set(ids)) != len(ids) or any(not 1 <= i <= self.pool.num_blocks for i in ids):
            raise MinillmError(f"parts: the prefix cache must name different blocks of the pool, got {ids!r:.80}")
        return ids

    def grow(self, request: Request, num_tokens: int | None = None) -> bool:
        """Blocks for so many tokens (all of the request's, unless told otherwise). False: there are none; no change."""
        missing = self.blocks_for(request.num_tokens if num_tokens is None else num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        alone = self._holders <= {request}
        new = self._take(missing, request.tenant, alone)
        while new is None and self.reservations.give_way(self):  # before anybody who runs
            new = self._take(missing, request.tenant, alone)
        if new is None:
            return False
        self._holders.add(request)
        request.block_ids.extend(new)
        self._enter(new)
        return True

    def _enter(self, ids: Sequence[int]) -> None:
        """These blocks stand in one more block table."""
        if self.prefix is not None:
            self.prefix.lock(ids)
            self._live_cached += sum(i not in self._users and i in self.prefix for i in ids)
        self._users.update(ids)

    def _leave(self, ids: Sequence[int]) -> None:
        for i in ids:
            self._users[i] -= 1
            if not self._users[i]:
                del self._users[i]
                self._live_cached -= self.prefix is not None and i in self.prefix
        if self.prefix is not None:
            self.prefix.unlock(ids)

    def _take(self, n: int, tenant: str, alone: bool) -> list[int] | None:
        """n blocks of nobody, evicting cached ones if need be; None if there are not so many. alone: nobody but the
        asking request runs."""
        short = n - self.num_free
        # `evictable` may be too careful where floors are set. Nobody else can free a block: see what an eviction gives.
        if short > 0 and self.prefix is not None and (alone or short <= self.prefix.evictable(tenant)):
            self.allocator.free(self.prefix.evict(short, tenant))
        if n > self.num_free:
            return None
        return self._allocate(n) if n else []

    def _allocate(self, n: int) -> list[int]:
        """n blocks that nobody holds; an allocator that gives anything else is at fault, and gets it back."""
        given = self.allocator.allocate(n)
        try:
            ids = [operator.index(i) for i in given]
        except TypeError:
            raise MinillmError(f"parts: the allocator must return a list of {n} block ids, got {given!r:.80}") from None
        own = {i for i in ids if 1 <= i <= self.pool.num_blocks and i not in self._users}
        if self.prefix is not None:
            own = {i for i in own if i not in self.prefix}
        if not len(own) == len(ids) == n:
            with contextlib.suppress(Exception):
                self.allocator.free(sorted(own))
            raise MinillmError(
                f"parts: the allocator was asked for {n} blocks and gave {ids!r:.80}; they must be {n} different ones "
                f"from 1 to {self.pool.num_blocks} that nobody holds (held: {sorted(self._users)!r:.80})"
            )
        return ids

    # After a step, and at the end -----------------------------------------------------------------------------

    def commit(self, request: Request) -> None:
        """Show the prefix cache the blocks that a step has filled: from now on others may share them."""
        if self.prefix is None:
            return
        bs, known = self.pool.block_size, self._committed.get(request, 0)
        full = request.num_computed_tokens // bs
        if full <= known:
            return
        tokens = Tokens(request, full * bs)
        new = self.prefix.insert(tokens, self.namespace(request), request.block_ids[:full], known=known)
        self.allocator.share(new)
        self._live_cached += len(new)
        self._committed[request] = full
        self.swap.cached(request, request.block_ids[:full], new)
        last = self._refusal
        if last and known <= last.hit < full and tokens[last.hit * bs : (last.hit + 1) * bs] == last.following:
            self._refusal = None  # it may be what the head of the queue begins with

    def release(self, request: Request) -> None:
        """Free the request's blocks, and the promise of those that it never reached. A second time, nothing."""
        held, request.block_ids = request.block_ids or self.reservations.pop(request), []
        self._promised.pop(request, None)
        self._committed.pop(request, None)
        self._holders.discard(request)
        self._releases += 1
        if not held:
            return
        self._leave(held)
        # The end of the sequence first: what is freed first is reused first, and a prefix is worth most at its start.
        self.allocator.free(held[::-1])

    def preempt(self, request: Request) -> tuple[str, int]:
        """Take all blocks from a running request. (how its tokens are kept, blocks copied for that): see `Swap.out`."""
        how, copied = "recompute", 0
        with contextlib.suppress(Exception):  # no memory for a copy: its tokens can be computed again
            how, copied = self.swap.out(request)
        self.release(request)
        request.num_computed_tokens = 0
        return how, copied

    def forget(self, request: Request) -> None:
        """The request is over: nothing is remembered of it but what the prefix cache has."""
        if self._refusal is not None and self._refusal.request is request:
            self._refusal = None
        self.swap.forget(request)
        self._namespaces.forget(request)

    # Room for KV from another engine (lesson 15) ---------------------------------------------------------------

    def reserve(self, request: Request, keep_free: int = 0, gave_way: GaveWay | None = None) -> bool:
        """Set aside blocks for all tokens of a request that is not queued yet. False: there are none, and no change.

        `release` gives them back. gave_way(request) is called, from within a step, when somebody who runs needs them.
        Raises MinillmError for a request that holds blocks.
        """
        return self.reservations.take(self, request, keep_free, gave_way)

    def loaded(self, request: Request, tokens: int, cached: int = 0) -> None:
        """The KV of the request's first tokens is in its reserved blocks: admission will go on from there.

        cached: how many of them the other engine had not computed for this request either. Raises MinillmError for a
        number that is not whole blocks or leaves no token to compute, or without a reservation.
        """
        self.reservations.loaded(request, tokens, cached, self.pool.block_size)

    @property
    def somebody_waits(self) -> bool:
        """Whether the head of the queue was not admitted for want of memory."""
        return self._refusal is not None and not self._refusal.request.block_ids

    def take(self, n: int, tenant: str) -> list[int] | None:
        """n blocks of nobody, live from now on; None if there are not so many."""
        ids = self._take(n, tenant, alone=False)
        if ids:
            self._enter(ids)
        return ids

    def _redeem(self, request: Request) -> bool:
        """Admit a request with what was loaded into its reservation. False: nothing was, and it has none any more."""
        held = self.reservations.redeem(request)
        if held is None or held.loaded is None:
            self.release(request)
            return False
        self._holders.add(request)
        request.block_ids, request.num_computed_tokens, request.num_cached_tokens = held.ids, held.loaded, held.cached
        self._committed[request] = 0
        if held.loaded:
            self.events.record("hit", request.request_id, tokens=held.loaded, source="transfer", cached=held.cached)
            self.commit(request)  # who begins alike finds it in this very step
        return True

    # Whose is what ---------------------------------------------------------------------------------------------

    @property
    def engine_namespace(self) -> str:
        """What all KV of this engine was computed with, by `cache.namespace.engine_namespace`."""
        return self._namespaces.engine

    def namespace(self, request: Request) -> Namespace:
        return self._namespaces.of(request)

    # Static groups (lessons 06 and 09) ------------------------------------------------------------------------

    @property
    def promised(self) -> int:
        """Blocks that static groups may still ask for. Summed, not counted along: a sum cannot drift."""
        return sum(self.most_blocks(r) - len(r.block_ids) for r in self._promised)

    def promise(self, requests: Sequence[Request]) -> None:
        """Set blocks aside for a group, so that none of it can run out half way. All or nothing."""
        need = sum(self.most_blocks(r) for r in requests)
        if need > self.available():
            if lost := self._lost():
                raise MinillmError(lost)
            raise MinillmError(
                f"{len(requests)} requests may need {need} blocks of KV cache, {self.available()} of "
                f"{self.pool.num_blocks} are free; finish or close the streams under way, or raise num_kv_blocks"
            )
        self._promised.update(dict.fromkeys(requests))
