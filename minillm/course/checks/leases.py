"""References and mistakes of exercise 15 for leases: room that is lent for a time, on both sides of a transfer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from minillm.course.tasks import Wrong


class Leases:
    """The flags make the wrong ones."""

    fenced = fences_release = fences_renew = returns = once = newer = all_or_nothing = inclusive = asks_clock = True
    shortens = all_late = orders = last_one = True
    revives = prolongs = adds = False

    def __init__(self, room: int):
        self.room, self.lent = room, dict[str, tuple[int, int, float]]()  # key -> (attempt, amount, until)

    def free(self) -> int:
        return self.room - sum(amount for _, amount, _ in self.lent.values())

    def grant(self, key: str, attempt: int, amount: int, seconds: float, now: float) -> bool:
        self.expire(now)
        mine = self.lent.get(key)
        if mine is not None:
            if mine[0] > attempt and self.fenced:
                return False
            if mine[0] == attempt and self.once:
                if self.prolongs:
                    self.lent[key] = (attempt, mine[1], now + seconds)
                return True
            if self.newer:
                del self.lent[key]
            else:
                return False
        if self.all_or_nothing and (amount > self.free() or (amount == self.free() and not self.last_one)):
            return False
        self.lent[key] = (attempt, amount, now + seconds)
        return True

    def valid(self, key: str, attempt: int, now: float) -> bool:
        mine = self.lent.get(key)
        if mine is None or (self.fenced and mine[0] != attempt):
            return False
        return not self.asks_clock or self.lives(mine[2], now)

    def lives(self, until: float, now: float) -> bool:
        return now < until if self.inclusive else now <= until

    def renew(self, key: str, attempt: int, seconds: float, now: float) -> bool:
        mine = self.lent.get(key)
        if mine is None or (self.fences_renew and mine[0] != attempt):
            return False
        if not self.lives(mine[2], now) and not self.revives:
            return False
        until = (mine[2] if self.adds else now) + seconds
        self.lent[key] = (mine[0], mine[1], until if self.shortens else max(mine[2], until))
        return True

    def release(self, key: str, attempt: int) -> int:
        mine = self.lent.get(key)
        if mine is None or (self.fences_release and mine[0] != attempt):
            return 0
        del self.lent[key]
        return mine[1]

    def expire(self, now: float) -> list[str]:
        late = [key for key, (_, _, until) in self.lent.items() if not self.lives(until, now)]
        late = (sorted(late) if self.orders else late)[: None if self.all_late else 1]
        for key in late if self.returns else ():
            del self.lent[key]
        return late


class Forgets(Leases):
    """Room that is lent is counted down and, when a lease expires, not up again."""

    gone = 0

    def free(self) -> int:
        return super().free() - self.gone

    def expire(self, now: float) -> list[str]:
        late = [(key, self.lent[key][1]) for key in sorted(self.lent) if not self.lives(self.lent[key][2], now)]
        self.gone += sum(amount for _, amount in late)
        return super().expire(now)


class OnlyWhenAsked(Leases):
    """A grant does not look at the clock: room that is long free is refused."""

    def grant(self, key: str, attempt: int, amount: int, seconds: float, now: float) -> bool:
        late, self.expire = self.expire, lambda now: []  # type: ignore[method-assign]
        try:
            return super().grant(key, attempt, amount, seconds, now)
        finally:
            self.expire = late  # type: ignore[method-assign]


def leases(**flags: Any) -> Any:
    return type("Leases", (Leases,), flags)


def play(function: Any, room: int, calls: Sequence[tuple[Any, ...]]) -> Any:
    """What each call gave, and how much was free behind it."""
    one, said = function(room), {}
    for i, (what, *args) in enumerate(calls, 1):
        got = getattr(one, what)(*args)
        said[f"call {i}, {what}({', '.join(map(repr, args))})"] = {"gave": got, "free": int(one.free())}
    return said


def calls(room: int, *those: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: (room, list(those))


def both_sides(function: Any, seed: int, count: int) -> str:
    """Blocks of a decode engine and bytes of a prefill engine, over a line that loses messages. Nothing may stay.

    Each transfer: P lends its buffer, D its blocks; pieces renew both; acks and cancels come or are lost. Everything
    that is written must be under a lease of its own attempt.
    """
    rng = random.Random(seed)
    blocks, buffer, now, lent = function(64), function(640), 0.0, False
    granted: dict[str, tuple[int, float]] = {}  # key -> attempt and end of the lease, as the check keeps it
    for i in range(count):
        now += rng.choice((0.0, 0.5, 1.0, 4.0))
        key, attempt = f"r{rng.randrange(6)}", rng.randrange(1, 4)
        kind = rng.random()
        true = granted.get(key)
        live = true is not None and true[0] == attempt and now < true[1]
        if kind < 0.4:
            amount = rng.randrange(4, 24)
            got = blocks.grant(key, attempt, amount, 5.0, now)
            lent = lent or got
            buffer.grant(key, attempt, 10 * amount, 5.0, now)
            if got and not live:
                granted[key] = (attempt, now + 5.0)
            elif not got and true is not None and now < true[1] and true[0] < attempt:
                granted.pop(key)  # the older one is gone, and the newer did not fit
        elif kind < 0.7:
            if blocks.valid(key, attempt, now) is not live:
                raise Wrong(
                    f"call {i}: valid({key!r}, {attempt}, {now:g}) is wrong: a piece would be written "
                    f"{'into blocks of somebody else' if not live else 'nowhere, although its lease runs'}",
                    "valid: the lease is held by this attempt, and has not ended",
                )
            if live and blocks.renew(key, attempt, 5.0, now):
                granted[key] = (attempt, now + 5.0)
            buffer.renew(key, attempt, 5.0, now)
        elif kind < 0.8 and (live or true is None or true[0] != attempt):
            given = blocks.release(key, attempt)
            if given and not live:
                raise Wrong(
                    f"call {i}: release({key!r}, {attempt}) gave back {given} blocks of another attempt",
                    "only the attempt that holds a lease can give it back",
                )
            buffer.release(key, attempt)
            if live:
                granted.pop(key)
        else:
            blocks.expire(now), buffer.expire(now)
    blocks.expire(now + 60.0), buffer.expire(now + 60.0)
    if not lent:
        raise Wrong(f"not one lease was granted in {count} calls", "`grant` lends what is free")
    left = (int(blocks.free()), int(buffer.free()))
    if left != (64, 640):
        raise Wrong(
            f"after all leases {64 - left[0]} blocks and {640 - left[1]} bytes are still lent",
            "after the lease nothing is held: `expire` gives everything back",
        )
    return "nothing is held after the lease"
