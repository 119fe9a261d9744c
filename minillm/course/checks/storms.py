"""Exercise 15's transfer in random lives: a memory around the machine, and a line that loses its manners.

The blocks of that memory go to the next request as soon as they are given back, so that a late write lands in somebody
else's prompt.
"""

from __future__ import annotations

import random
from typing import Any

from minillm.course.checks.transfers import (
    ABORTED,
    ATTEMPT,
    EPOCH,
    GAVE_WAY,
    HASH,
    LAYERS,
    LEASE,
    LOST,
    TICK,
    TOKENS,
    Action,
    Event,
    actions_of,
    done,
    piece,
    refused,
    reserve,
    words,
)
from minillm.course.tasks import Wrong


class Memory:
    """Blocks of one engine. What is given back is somebody else's in the same moment; each write is checked."""

    def __init__(self) -> None:
        self.mine = False
        self.written: set[tuple[int, int]] = set()
        self.ends: list[str] = []

    def act(self, action: Action, told: str) -> None:
        what = action[0]
        if what == "hold":
            if self.mine:
                raise Wrong(f"it holds blocks twice {told}", "the same `reserve` again is answered, not obeyed again")
            self.mine, self.written = True, set()
        elif what == "give_back":
            if not self.mine:
                raise Wrong(
                    f"it gives back blocks that are not its own any more {told}",
                    "give back what is held, once; what belongs to somebody else by now is not yours to free",
                )
            self.mine = False
        elif what == "write":
            if not self.mine:
                raise Wrong(
                    f"it writes into blocks that belong to another request by now {told}",
                    "after the end, and after the lease, nothing is written",
                )
            self.written |= {(action[1], t) for t in range(action[2], action[2] + action[3])}
        elif what == "resume":
            if not self.mine:
                raise Wrong(
                    f"it resumes on blocks that are not its own any more {told}",
                    "what is loaded is not given back: the blocks are the request's from now on",
                )
            missing = LAYERS * TOKENS - len(self.written)
            if missing:
                raise Wrong(
                    f"it resumes on {missing} token positions that were never written {told}",
                    "count what is there, by layer and token, before `done` is believed",
                )
            self.mine = False  # the request's now
            self.ends.append("resume")
        elif what == "recompute":
            self.ends.append("recompute")


def stormy(function: Any, seed: int, count: int) -> str:
    """`count` random lives, with every message lost, late, doubled, corrupt or of another life now and then."""
    rng, loaded = random.Random(seed), 0
    for life in range(count):
        one, memory, now, log = function(ATTEMPT, HASH, TOKENS, LAYERS, LEASE), Memory(), 0.0, list[str]()
        cancelled = False
        for event in storm(rng):
            now += rng.choice((0.5, 1.0, 1.5)) if rng.random() < 0.95 else LEASE
            log.append(f"{words(event)} at {now:g} s")
            cancelled = cancelled or event["what"] == "aborted"
            for action in in_order(one.feed(dict(event), now)):
                if action[0] == "write" and (event["attempt"], event["epoch"], event["ok"]) != (ATTEMPT, EPOCH, True):
                    raise Wrong(
                        f"it writes what another life has sent, or what is corrupt, in life {life}: {log[-1]}",
                        "compare attempt and epoch first, then the checksum",
                    )
                memory.act(action, f"in life {life}, after {'; '.join(log[-6:])}")
        where = f"in life {life}, after {'; '.join(log[-8:])}, and long after the lease"
        for action in in_order(one.feed(dict(TICK), now + 10 * LEASE)):
            memory.act(action, where)
        if memory.mine:
            raise Wrong(f"blocks are held for nobody {where}", "every way out gives back what is held")
        if len(memory.ends) > 1 or (not memory.ends and not cancelled):
            raise Wrong(
                f"it ended {len(memory.ends)} times ({', '.join(memory.ends) or 'never'}) {where}",
                "exactly one of resume, recompute and cancelled, once",
            )
        loaded += "resume" in memory.ends
    if not loaded:
        raise Wrong(f"not one of {count} lives ended in a resume", "what comes as it was promised is loaded")
    return "one end each, and nothing held"


def in_order(got: Any) -> list[Action]:
    """Actions of one event as an engine would take them: blocks first, then what is written, then the rest."""
    return sorted(actions_of(got), key=lambda a: ("hold", "write").index(a[0]) if a[0] in ("hold", "write") else 2)


def storm(rng: random.Random) -> list[Event]:
    cut = rng.choice((2, 4, 8))
    pieces = [piece(n, start, cut) for n in range(LAYERS) for start in range(0, TOKENS, cut)]
    events = [reserve(room=rng.random() < 0.9), *pieces, done()]
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        i = rng.randrange(len(events))
        kind = rng.randrange(9)
        if kind == 0 and len(events) > 1:
            del events[i]
        elif kind == 1:
            events.insert(rng.randint(i, len(events)), dict(events[i]))
        elif kind == 2 and events[i]["what"] == "piece":
            events[i] = {**events[i], "ok": False}
        elif kind == 3 and "attempt" in events[i]:
            events.insert(i, {**events[i], "attempt": ATTEMPT - 1})
        elif kind == 4 and "epoch" in events[i]:
            events.insert(i, {**events[i], "epoch": "b8"} if i else reserve(epoch="b8", token_hash="0000"))
        elif kind > 4:
            events.insert(max(i, kind == 7), (LOST, ABORTED, GAVE_WAY, refused())[kind - 5])
    return events
