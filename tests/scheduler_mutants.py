"""Wrong schedulers and caches, one slip each: the random schedules of schedules.py must notice every one of them.

A mutant is the engine's own method with a few characters changed, so that it stays a mutant of what is there: a slip
whose text is no longer found, once, is an error.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from schedules import Parts

from minillm.cache.paged import PagedCache
from minillm.cache.swap import Swap
from minillm.core import EngineCore
from minillm.scheduler import Scheduler, WaitingQueue
from minillm.shadow import ShadowCore


def rewritten(owner: type, method: str, *changes: tuple[str, str]) -> Callable[..., Any]:
    """owner.method, compiled with the changes (old, new); each old text must be there exactly once."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, method)))
    for old, new in changes:
        assert source.count(old) == 1, f"{owner.__name__}.{method} has {source.count(old)} times: {old}"
        source = source.replace(old, new)
    space: dict[str, Any] = {}
    exec(compile(source, f"mutant of {owner.__name__}.{method}", "exec"), vars(sys.modules[owner.__module__]), space)
    return space[method]


def slip(owner: type, method: str, *changes: tuple[str, str]) -> Parts:
    """Parts with a subclass of owner that has the rewritten method."""
    changed = {method: rewritten(owner, method, *changes)}
    if owner is Scheduler:
        return Parts(scheduler=type("Mutant", (Scheduler,), changed))
    if owner is PagedCache:
        return Parts(cache=type("Mutant", (PagedCache,), changed))
    if owner is Swap:
        kind = type("Mutant", (Swap,), changed)

        class Swapping(PagedCache):
            def __init__(self, *arguments: Any, **options: Any):
                super().__init__(*arguments, **options)
                self.swap.__class__ = kind

        return Parts(cache=Swapping)
    if owner is EngineCore:
        return Parts(core=type("Mutant", (ShadowCore,), changed))
    if owner is Swap:
        swap = type("Mutant", (Swap,), changed)

        class Cache(PagedCache):
            def __init__(self, *arguments: Any, **options: Any):
                super().__init__(*arguments, **options)
                self.swap.__class__ = swap

        return Parts(cache=Cache)
    assert owner is WaitingQueue
    queue = type("Mutant", (WaitingQueue,), changed)

    class Mutant(Scheduler):
        def __init__(self, *arguments: Any):
            super().__init__(*arguments)
            self.waiting = queue(self.waiting.key)

    return Parts(scheduler=Mutant)


# slip in words -> (class, method, (old, new), ...)
SLIPS: dict[str, tuple[Any, ...]] = {
    # who runs, and for how many tokens
    "the budget is not kept at the first row": (
        Scheduler, "_advance", ("n = min(n, budget - reserved)", "n = min(n, budget - reserved) if out.rows else n")
    ),
    "the budget is not kept at admission": (Scheduler, "_admit", ("n = min(n, budget)", "pass")),
    "a chunk takes the tokens of streams behind it": (
        Scheduler, "_advance", ("reserved = sum(n == 1 for _, n in order)", "reserved = sum(n == 1 for _, n in [])"),
        ("reserved -= n == 1", "pass"),
    ),
    "a paused request is scheduled": (Scheduler, "_advance", ("if not r.paused", "if True")),
    "a victim of this step is scheduled in it": (Scheduler, "_advance", ("r.status != Status.RUNNING", "False")),
    "a whole prompt joins the streams": (
        Scheduler, "schedule", ("if out.rows:  # whole prompts", "if False:  # whole prompts")
    ),
    "a whole prompt over the budget joins others": (Scheduler, "_within", ("<= budget", "<= 10**9")),
    "a step that only preempted admits nobody": (Scheduler, "schedule", ("not out.rows or (self", "(self")),
    "one more than may run": (
        Scheduler, "_admit", (">= self.limits.max_num_seqs", "> self.limits.max_num_seqs")
    ),
    # the queue
    "the queue serves the shortest first": (WaitingQueue, "push", ("self.key(request)", "request.num_tokens")),
    "the queue forgets ageing": (WaitingQueue, "push", ("self.key(request)", "request.priority")),
    "running is in the order of joining": (
        Scheduler, "_admit", ("insort(self.running, r, key=self._keys.of)", "self.running.append(r)")
    ),
    "who joins stays in the queue": (Scheduler, "_admit", ("self.waiting.remove(r)", "pass")),
    "who is preempted is lost": (Scheduler, "_preempt", ("self.waiting.push(request)", "pass")),
    "who is preempted while paused is queued": (Scheduler, "_preempt", ("if request.paused:", "if False:")),
    "who is paused stays in the queue": (Scheduler, "pause", ("self.waiting.remove(request)", "pass")),
    "who is resumed is not queued": (Scheduler, "pause", ("self.waiting.push(request)", "pass")),
    "who has ended stays in the queue": (Scheduler, "finish", ("self.waiting.remove(request)", "pass")),
    "who has ended goes on running": (Scheduler, "finish", ("self.running.remove(request)", "pass")),
    "deadlines do not pass": (WaitingQueue, "expired", ("first.deadline < now", "False")),
    "a deadline ends who has begun": (WaitingQueue, "push", (" and request.status == Status.WAITING", "")),
    # who gives way
    "the first gives way": (Scheduler, "_make_room", ("or candidates)", "or candidates[:1])")),
    "who runs gives way before who is paused": (
        Scheduler, "_make_room", ("[r for r in candidates if r.paused] or candidates", "candidates")
    ),
    "preemptions are not counted": (Scheduler, "_preempt", ("request.num_preemptions += 1", "pass")),
    "the watermark is not kept": (Scheduler, "_admit", ("self.limits.keep_free if self.running else 0", "0")),
    "preemption keeps the counter": (PagedCache, "preempt", ("request.num_computed_tokens = 0", "pass")),
    "preemption keeps the blocks": (PagedCache, "preempt", ("self.release(request)", "pass")),
    # blocks
    "an end frees nothing": (Scheduler, "finish", ("self.cache.release(request)", "pass")),
    "blocks are freed twice": (
        PagedCache, "release",
        ("self.allocator.free(held[::-1])", "self.allocator.free(held[::-1]); self.allocator.free(held)"),
    ),
    "blocks are freed and still in use": (PagedCache, "release", ("self._leave(held)", "pass")),
    "a grown block has no user": (PagedCache, "grow", ("self._enter(new)", "pass")),
    "live cached blocks are miscounted": (PagedCache, "_enter", ("i not in self._users and i", "i")),
    "an abort frees what a step in flight reads": (EngineCore, "abort", ("if self._stepping:", "if False:")),
    # the prefix cache
    "a hit of all tokens": (PagedCache, "admit", ("(request.num_tokens - 1) // bs", "request.num_tokens // bs")),
    "a hit is not counted": (
        PagedCache, "admit", ("request.num_computed_tokens = len(ids) * bs", "request.num_computed_tokens = 0")
    ),
    "a hit is not referenced": (PagedCache, "admit", ("self.allocator.share(ids)", "pass")),
    "a hit may be evicted for the rest of its own request": (
        PagedCache, "admit", ("self._enter(ids)  # before", "pass  # before"),
        ("self._enter(new)", "self._enter(ids + new)"),
        ("        self._leave(ids)\n        with", "        with"),
        ("if new is None:\n        self._leave(ids)\n", "if new is None:\n"),
    ),
    "blocks are shown before they are filled": (
        PagedCache, "commit", ("request.num_computed_tokens // bs", "request.num_tokens // bs")
    ),
    "a block more than is filled is shown": (
        PagedCache, "commit", ("// bs\n", "// bs + 1\n")
    ),
    "what is shown has no reference": (PagedCache, "commit", ("self.allocator.share(new)", "pass")),
    "tenants share": (
        PagedCache, "namespace", ("self._namespaces.of(request)",
         'Namespace("", "", "", self._namespaces.of(request).public_tokens)')
    ),
    "a block behind the public ones is public": (
        PagedCache, "namespace", ("self._namespaces.of(request)",
         'Namespace("", request.tenant, "", self._namespaces.of(request).public_tokens + 4)')
    ),
    "floors are ignored": (PagedCache, "_take", ("self.prefix.evict(short, tenant)", 'self.prefix.evict(short, "a")'),
                           ("self.prefix.evictable(tenant)", 'self.prefix.evictable("a")')),
    # reservations
    "a reservation gives way to nobody": (PagedCache, "grow", ("self.reservations.give_way(self)", "False")),
    "a reservation blocks the queue for ever": (
        PagedCache, "admit", ("alone and self.reservations.give_way(self)", "False")
    ),
    "more is loaded than has come": (
        PagedCache, "_redeem", ("held.loaded, held.cached", "held.loaded + 1, held.cached")
    ),
    "what was not loaded is taken for it": (
        PagedCache, "_redeem", ("held is None or held.loaded is None", "held is None"),
        ("held.loaded, held.cached", "0 if held.loaded is None else held.loaded + self.pool.block_size, held.cached"),
    ),
    "reserved blocks have no user": (PagedCache, "take", ("self._enter(ids)", "pass")),
    "who is held is scheduled": (
        EngineCore, "hold", ("self.held.add(request)", "self.held.add(request); self.scheduler.add(request)")
    ),
    "a held request's deadline does not pass": (EngineCore, "_expire", ("r.deadline < now", "False")),
    "a held request keeps its blocks when it ends": (EngineCore, "_let_go", ("self.cache.release(request)", "pass")),
    "who resumes is not queued": (EngineCore, "resume", ("self.scheduler.add(request)", "pass")),
    # tiers
    "a block too many comes back from a tier": (
        PagedCache, "admit", ("self.swap.back(request, most)", "self.swap.back(request, most + 1)")
    ),
    "blocks come back in the wrong order": (Swap, "back", ("], payloads)", "], payloads[::-1])")),
    "the counter moves further than what came back": (
        Swap, "back", ("request.num_computed_tokens = start * bs", "request.num_computed_tokens = start * bs + 1")
    ),
    "a swap keeps the block that is not full": (
        Swap, "out", ("request.num_computed_tokens // self.pool.block_size", "len(request.block_ids)")
    ),
    "a swap keeps the neighbour's payload": (
        Swap, "out", ("(keys[i], request.block_ids[i])", "(keys[i], request.block_ids[i - 1])")
    ),
    "private blocks outlive their request": (PagedCache, "forget", ("self.swap.forget(request)", "pass")),
    "private blocks are everybody's": (Swap, "keys", ("uuid.uuid4().bytes", "b'everybody'")),
    "a spilled block is everybody's": (
        Swap, "keys", ("self.namespace(request).reader_key", "(lambda end: b'everybody')")
    ),
    "a spilled block goes under its neighbour's name": (
        Swap, "cached", ("self._cached[ids[i]] = key", "self._cached[ids[i - 1]] = key")
    ),
}  # fmt: skip
# Too rare for random schedules; each is noticed by the test that is named after it.
RARE: dict[str, tuple[Any, ...]] = {
    "a token that was set aside is lost": (Scheduler, "schedule", ("if not out.rows and out.preempted:", "if False:")),
    "a shorter swap forgets a longer one": (
        Swap, "out", ("max(full, self.private.get(request, 0))", "full")
    ),
    "who has left piles up among the deadlines": (
        WaitingQueue, "remove", ("most = max(len(self._heap), len(self._deadlines))", "most = len(self._heap)")
    ),
}  # fmt: skip
