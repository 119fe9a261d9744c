"""Schedulers, policies and prefix caches of exercises 09 to 12, as the engine calls them."""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakKeyDictionary

from minillm.cache.eviction import CachedBlock
from minillm.course.answers import Answers
from minillm.course.checks.chunks import chunked_part
from minillm.course.checks.prefix_part import PrefixPart, prefix_part
from minillm.course.checks.scheduler_part import scheduler_part
from minillm.course.checks.victims import Mounted, as_dict, mounted_room
from minillm.errors import MinillmError
from minillm.request import Request
from minillm.scheduler import Scheduler

SCHEDULER: dict[str, int | None] = {"add": 2, "schedule": 2, "finish": 1, "num_waiting": None, "running": None}
PREFIX = {"kv_cache": "paged", "enable_prefix_caching": True}
CREDIT, MOST = 20, 3  # of 11.5: what a hit is worth, in calls, and how many count; the exercise mounts these


def whole_prompts(answers: Answers) -> Any:
    """What `parts["scheduler"]` takes, around 09.3's Scheduler."""
    return scheduler_part(answers.take("09.3", 1, **SCHEDULER))


def chunked(answers: Answers) -> Any:
    """What `parts["scheduler"]` takes, around 10.4's ChunkedScheduler."""
    return chunked_part(answers.take("10.4", 2, **SCHEDULER))


def make_room(answers: Answers) -> type[Scheduler]:
    """What `parts["scheduler"]` takes: the engine's own, with 12.4's make_room."""
    return mounted_room(answers.take("12.4", 5))


def prefix_cache(answers: Answers) -> type[PrefixPart]:
    """What `parts["prefix_cache"]` takes, around 11.2's block_keys and 11.4's PrefixCache."""
    return prefix_part(answers.take("11.2", 4), answers.take("11.4", 0, match=1, insert=2, evict=2))


class EvictionPart:
    def __init__(self, eviction_key: Any):
        self.eviction_key = eviction_key

    def key(self, block: CachedBlock) -> float:
        return _number("eviction_key", self.eviction_key(block.last_used, block.uses, CREDIT, MOST))


def eviction(answers: Answers) -> EvictionPart:
    """What `parts["eviction"]` takes, around 11.5's eviction_key."""
    return EvictionPart(answers.take("11.5", 4))


class PolicyPart(Mounted):
    """Forgets the keys of requests that have ended: a server runs for days."""

    def __init__(self, policy: Any):
        super().__init__(policy)
        self.keys: Any = WeakKeyDictionary[Request, float]()

    def key(self, request: Request) -> float:
        if request not in self.keys:
            self.keys[request] = _number("Policy.key", self.policy.key(as_dict(request)))
        return float(self.keys[request])


def policy(answers: Answers) -> PolicyPart:
    """What `parts["policy"]` takes, around 12.3's Policy."""
    return PolicyPart(answers.take("12.3", 0, key=1, victim=1)())


def _number(what: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or math.isnan(given):
        raise MinillmError(f"parts: {what} must return a number, got {given!r:.80}")
    return given
