"""From exercise 09's scheduler, which knows requests by name, to the part that an engine takes.

`LLM(parts={"scheduler": scheduler_part(Scheduler)})` mounts it. Nobody runs out of blocks half way: before it joins, a
request gets those of the longest text that it may reach.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from minillm.cache.paged import PagedCache
from minillm.errors import MinillmError
from minillm.events import EventLog
from minillm.policy import SchedulerPolicy
from minillm.request import Request, Status
from minillm.scheduler import Limits, ScheduledRow, SchedulerOutput


def scheduler_part(kind: Callable[[int], Any]) -> Callable[..., SchedulerPart]:
    """What `parts["scheduler"]` takes, around a learner's class; kind(max_num_seqs) makes one."""

    def make(cache: PagedCache, policy: SchedulerPolicy, limits: Limits, events: EventLog) -> SchedulerPart:
        return SchedulerPart(kind(limits.max_num_seqs), cache, policy)

    return make


class SchedulerPart:
    """`mine` decides; this class translates names to requests, and judges what comes back."""

    def __init__(self, mine: Any, cache: PagedCache, policy: SchedulerPolicy):
        self.mine, self.cache, self.policy = mine, cache, policy
        self.requests: WeakValueDictionary[str, Request] = WeakValueDictionary()  # a server runs for days

    @property
    def num_waiting(self) -> int:
        return int(self.mine.num_waiting)

    @property
    def running(self) -> list[Request]:
        return [self._known(name) for name in list(self.mine.running)]

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.mine.add(request.request_id, float(self.policy.key(request)))

    def schedule(self) -> SchedulerOutput:
        rows = self.mine.schedule(lambda name: self._known(name).num_new_tokens, self._room)
        if not isinstance(rows, list) or any(not isinstance(row, tuple | list) or len(row) != 2 for row in rows):
            raise MinillmError(f"schedule must return a list of (name, tokens), got {rows!r:.80}")
        out = SchedulerOutput([ScheduledRow(self._known(name), n) for name, n in rows])
        for request, _ in out.rows:
            request.status = Status.RUNNING
        return out

    def finish(self, request: Request) -> None:
        self.mine.finish(request.request_id)
        self.cache.release(request)
        request.status = Status.FINISHED

    def _room(self, name: str) -> bool:
        """All blocks to the request's end, or none and False. A second time, what it has."""
        request = self._known(name)
        if request.block_ids:
            return True
        if not self.cache.admit(request):
            return False
        if self.cache.grow(request, request.num_prompt_tokens + request.max_tokens - 1):
            return True
        self.cache.release(request)
        request.num_computed_tokens = 0
        return False

    def _known(self, name: Any) -> Request:
        if not isinstance(name, str) or name not in self.requests:
            raise MinillmError(f"the scheduler names request {name!r:.40}, which was never added or has ended")
        return self.requests[name]
