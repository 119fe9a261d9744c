"""References and typical mistakes of exercise 09: a queue that ages, and a scheduler. The loop is in batch_loop.py.

Sorted lists in place of heaps, and apart from solutions/ and the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from minillm.course.candidate import CandidateError, NotAttempted, OverTimeError
from minillm.course.checks.scheduler_part import scheduler_part
from minillm.course.checks.shadows import Game, first_fault
from minillm.course.tasks import Wrong

# 09.2 a queue that ages


class WaitingQueue:
    """A list of (key, number, name), kept sorted."""

    newest_first = False

    def __init__(self, ageing_s: float):
        self.ageing_s, self.entries, self.made = ageing_s, [], 0  # type: ignore[var-annotated]

    def key(self, arrival: float, priority: int) -> Any:
        return arrival + priority * self.ageing_s

    def __len__(self) -> int:
        return len(self.entries)

    def push(self, name: str, arrival: float, priority: int) -> None:
        if self.has(name):
            raise ValueError("queued already")
        self.made += 1
        self.entries.append((self.key(arrival, priority), -self.made if self.newest_first else self.made, name))
        self.entries.sort()

    def has(self, name: str) -> bool:
        return any(name == entry[2] for entry in self.entries)

    def pop(self) -> str | None:
        return self.entries.pop(0)[2] if self.entries else None

    def remove(self, name: str) -> None:
        self.entries = [e for e in self.entries if e[2] != name]


class Starves(WaitingQueue):
    def key(self, arrival: float, priority: int) -> Any:
        return (priority, arrival)


class NoPriority(WaitingQueue):
    def key(self, arrival: float, priority: int) -> Any:
        return arrival


class LargerFirst(WaitingQueue):
    def key(self, arrival: float, priority: int) -> Any:
        return arrival - priority * self.ageing_s


class Divides(WaitingQueue):
    def key(self, arrival: float, priority: int) -> Any:
        return arrival + priority / self.ageing_s


class NewestOfEqual(WaitingQueue):
    newest_first = True


class QueuesTwice(WaitingQueue):
    def has(self, name: str) -> bool:
        return False


class NeverForgets(WaitingQueue):
    """Who was in it once may not come again."""

    def __init__(self, ageing_s: float):
        super().__init__(ageing_s)
        self.seen: set[str] = set()

    def has(self, name: str) -> bool:
        known = name in self.seen
        self.seen.add(name)
        return known


class KeepsRemoved(WaitingQueue):
    def remove(self, name: str) -> None:
        pass


Script = Sequence[tuple[Any, ...]]


def queue_play(kind: Any, ageing_s: float, script: Script) -> list[Any]:
    """What comes of each operation: ("push", name, arrival, priority), ("pop",), ("remove", name)."""
    queue = kind(ageing_s)
    said: list[Any] = []
    for what, *args in script:
        try:
            got = getattr(queue, what)(*args)
            said.append(got if what == "pop" else what)
        except (NotAttempted, OverTimeError):
            raise
        except (ValueError, CandidateError) as error:
            said.append(_value_error(error))
        said.append(len(queue))
    return said


def _value_error(error: Exception) -> str:
    plain = isinstance(error, ValueError) or str(error).startswith("it raised ValueError")
    return "ValueError" if plain else str(error)


def crowd(ageing_s: float, requests: Sequence[tuple[str, float, int]]) -> Callable[[], Any]:
    """Everybody is pushed, then everybody is popped, and once more."""
    script = [("push", *r) for r in requests] + [("pop",)] * (len(requests) + 1)
    return lambda: (ageing_s, list(script))


def stream(ageing_s: float, priority: int, newcomers: int) -> Callable[[], Any]:
    """One that waits, and a stream of urgent ones: one comes, one goes."""
    script: list[tuple[Any, ...]] = [("push", "poor", 0.0, priority), ("push", "0", 0.0, 0)]
    for i in range(1, newcomers + 1):
        script += [("push", str(i), float(i), 0), ("pop",)]
    return lambda: (ageing_s, list(script))


# 09.3 a scheduler


class Scheduler:
    """Two lists of (key, number, name), both kept sorted."""

    def __init__(self, max_num_seqs: int):
        self.most, self.queue, self.batch, self.made = max_num_seqs, [], [], 0  # type: ignore[var-annotated]

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    @property
    def running(self) -> list[str]:
        return [e[2] for e in self.batch]

    def add(self, name: str, key: float) -> None:
        if any(name == e[2] for e in self.queue + self.batch):
            raise ValueError("known already")
        self.made += 1
        self.queue.append((key, self.made, name))
        self.queue.sort()

    def schedule(self, behind: Callable[[str], int], room: Callable[[str], bool]) -> list[tuple[str, int]]:
        self.admit(room)
        return [(e[2], behind(e[2])) for e in self.batch]

    def admit(self, room: Callable[[str], bool]) -> None:
        while self.queue and len(self.batch) < self.most and room(self.queue[0][2]):
            self.join(self.queue.pop(0))

    def join(self, entry: Any) -> None:
        self.batch.append(entry)
        self.batch.sort()

    def finish(self, name: str) -> None:
        self.queue = [e for e in self.queue if e[2] != name]
        self.batch = [e for e in self.batch if e[2] != name]


class Static(Scheduler):
    def admit(self, room: Callable[[str], bool]) -> None:
        if not self.batch:
            super().admit(room)


class KeepsFinished(Scheduler):
    def finish(self, name: str) -> None:
        self.queue = [e for e in self.queue if e[2] != name]


class FinishesRunningOnly(Scheduler):
    def finish(self, name: str) -> None:
        self.batch = [e for e in self.batch if e[2] != name]


class AddsTwice(Scheduler):
    def add(self, name: str, key: float) -> None:
        self.made += 1
        self.queue.append((key, self.made, name))
        self.queue.sort()


class InOrderOfJoining(Scheduler):
    def join(self, entry: Any) -> None:
        self.batch.append(entry)


class OneTooMany(Scheduler):
    def __init__(self, max_num_seqs: int):
        super().__init__(max_num_seqs + 1)


class OneAStep(Scheduler):
    """Admits one request a step."""

    def admit(self, room: Callable[[str], bool]) -> None:
        if self.queue and len(self.batch) < self.most and room(self.queue[0][2]):
            self.join(self.queue.pop(0))


class Overtakes(Scheduler):
    """Whoever fits goes in, past the first that does not."""

    def admit(self, room: Callable[[str], bool]) -> None:
        for entry in list(self.queue):
            if len(self.batch) < self.most and room(entry[2]):
                self.queue.remove(entry)
                self.join(entry)


class IgnoresKeys(Scheduler):
    def add(self, name: str, key: float) -> None:
        super().add(name, 0.0)


class OneToken(Scheduler):
    """Everybody gets one token: a decode step, whatever is missing."""

    def schedule(self, behind: Callable[[str], int], room: Callable[[str], bool]) -> list[tuple[str, int]]:
        self.admit(room)
        return [(e[2], 1) for e in self.batch]


class LosesRefused(Scheduler):
    """Who finds no room is out of the queue."""

    def admit(self, room: Callable[[str], bool]) -> None:
        while self.queue and len(self.batch) < self.most:
            entry = self.queue.pop(0)
            if not room(entry[2]):
                return
            self.join(entry)


def scheduler_play(kind: Any, max_num_seqs: int, blocks: int, script: Script) -> list[Any]:
    """What a scheduler says. ("add", name, key, tokens, blocks), ("step",), ("finish", name).

    A step says its rows, and who runs behind it; `blocks` is the pool, and each request needs some of it.
    """
    scheduler = kind(max_num_seqs)
    said: list[Any] = []
    missing: dict[str, int] = {}
    need: dict[str, int] = {}
    held: dict[str, int] = {}

    def room(name: str) -> bool:
        if name not in held and sum(held.values()) + need[name] > blocks:
            return False
        held[name] = need[name]
        return True

    for what, *args in script:
        try:
            if what == "add":
                name, key, missing_now, need_now = args
                missing.setdefault(name, missing_now)
                need.setdefault(name, need_now)
                scheduler.add(name, key)
            elif what == "finish":
                scheduler.finish(args[0])
                held.pop(args[0], None)
            else:
                rows = scheduler.schedule(lambda name: missing[name], room)
                said.append([tuple(row) for row in rows])
                missing.update({name: 1 for name, _ in rows if name in missing})
        except (NotAttempted, OverTimeError):
            raise
        except (ValueError, CandidateError) as error:
            said.append(_value_error(error))
        said.append([list(scheduler.running), int(scheduler.num_waiting)])
    return said


def schedules(kind: Any, seeds: Sequence[int], roomy: bool) -> str:
    """The first fault in random schedules over a shadow: "" for a scheduler that does what it must."""
    game = Game(steps=30, roomy=roomy, whole=True, full=roomy)
    fault = first_fault(seeds, game, scheduler=scheduler_part(kind))
    if fault and not kind.reference:
        raise Wrong(fault)
    return fault
