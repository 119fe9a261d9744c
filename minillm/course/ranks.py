"""A world of ranks for one answer: a thread a rank, one of them running at a time, and a record of what they said.

Real ranks run at once, and a mistake between them shows as a hang. Here a rank goes on until it has to wait for another
one, then the next goes on: the same order every time, and when all wait it is known at once who waits for what. The
interface is that of `minillm.parallel.group.Group`. The record goes to the grader as plain numbers.

This file stands alone: the sandbox loads it by path, before the submission. Lesson 14 uses it.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

COLLECTIVES = ("all_reduce", "all_gather", "broadcast")
KINDS = (*COLLECTIVES, "send", "recv")
MOST = 1_000  # things that one rank may say


class RanksStuck(Exception):
    """Every rank that has not ended waits for another one. The text is meant for the learner."""


class Ended(BaseException):
    """Raised inside the ranks of a world that is over. Not an `Exception`, so that `except Exception` lets it pass."""


def run(function: Callable[..., Any], args: Sequence[Sequence[Any]], only: Sequence[str]) -> tuple[list[Any], Any]:
    """function(group, *args[rank]) on all ranks: what each returned, and what each said, [kind, peer, numbers, bytes].

    only: the methods that this world has. Raises what a rank has raised, or RanksStuck.
    """
    world = World(len(args), only)
    try:
        return world.run(lambda rank: function(Group(world, rank), *args[rank])), world.said
    finally:
        rung = None
        while not world.ended:  # the time limit may ring again before the end has begun
            try:
                world.end()
            except BaseException as error:
                rung = error
        if rung is not None:
            raise rung


class World:
    """The threads, what each waits for, and what is on its way."""

    def __init__(self, size: int, only: Sequence[str]):
        self.size, self.only = size, tuple(only)
        self.said: list[list[list[Any]]] = [[] for _ in range(size)]
        self.waits: list[tuple[Any, ...] | None] = [None] * size
        self.done, self.over, self.ended = [False] * size, False, False  # ended: all threads are told
        self.given: list[Any] = [None] * size  # to the collective that a rank waits in
        self.wires: dict[tuple[int, int], deque[Tensor]] = {}
        self._go = [threading.Semaphore(0) for _ in range(size)]
        self._back = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._fault: BaseException | None = None

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            self._go[rank].acquire()
            try:
                if not self.over:
                    with torch.no_grad():
                        results[rank] = work(rank)
            except Ended:
                pass
            except BaseException as error:
                self._fault = self._fault or error
            self.done[rank] = True
            self._back.release()

        self._threads = [threading.Thread(target=one, args=(r,), daemon=True) for r in range(self.size)]
        for thread in self._threads:
            thread.start()
        at = 0
        while not all(self.done):
            ready = [r for r in range(self.size) if self._may_go((at + r) % self.size)]
            if not ready:
                raise RanksStuck("the ranks wait for each other: " + ", ".join(map(self._state, range(self.size))))
            at = (at + ready[0]) % self.size
            self._go[at].release()
            self._back.acquire()
            if self._fault is not None:
                raise self._fault
        return results

    def wait(self, rank: int, what: tuple[Any, ...]) -> None:
        """Hand over to the others until `what` has happened."""
        self.waits[rank] = what
        self._back.release()
        self._go[rank].acquire()
        if self.over:
            raise Ended
        self.waits[rank] = None

    def meet(self, rank: int, kind: str, x: Any) -> list[Any]:
        """Everybody's x, once all ranks are in the same collective."""
        round_: list[Any] = [None] * self.size
        self.given[rank] = (x, round_)
        self.wait(rank, (kind,))
        return round_

    def _may_go(self, rank: int) -> bool:
        what = self.waits[rank]
        if self.done[rank]:
            return False
        if what is None or what[0] == "go":
            return True
        if what[0] == "recv":
            return bool(self.wires.get((what[1], rank)))
        if all(w is not None and w[0] == what[0] for w in self.waits) and not any(self.done):
            parts = [x for x, _ in self.given]
            for r, (_, round_) in enumerate(self.given):
                round_[:] = parts
                self.waits[r] = ("go",)
            return True
        return False

    def _state(self, rank: int) -> str:
        what = self.waits[rank]
        if self.done[rank]:
            return f"rank {rank} has returned"
        assert what is not None
        return f"rank {rank} is in " + (f"recv from {what[1]}" if what[0] == "recv" else what[0])

    def end(self) -> None:
        """No thread goes on: those that wait are woken, one that computes for ever is interrupted.

        On a busy machine the time limit may ring again in the middle of this. It is heard when all threads are told.
        """
        self.over, told, rung = True, 0, None
        while told < len(self._threads):
            try:
                self._end(self._threads[told], self._go[told])
                told += 1
            except BaseException as error:
                rung = error
        self.ended = True
        if rung is not None:
            raise rung

    def _end(self, thread: threading.Thread, go: threading.Semaphore) -> None:
        go.release()
        thread.join(0.05)
        if thread.is_alive() and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Ended))


class Group:
    """What an answer gets: `rank`, `size`, and the methods of `minillm.parallel.group.Group` that the task allows."""

    def __init__(self, world: World, rank: int):
        self._world, self.rank, self.size = world, rank, world.size

    def _say(self, kind: str, x: Any, peer: int = -1) -> None:
        world = self._world
        if kind not in world.only:
            raise ValueError(f"this task's group has {' and '.join(world.only) or 'no methods'}, not {kind}")
        if not isinstance(x, Tensor):
            raise TypeError(f"{kind} takes a tensor, got a {type(x).__name__}")
        if kind in ("send", "recv") and (not 0 <= peer < self.size or peer == self.rank):
            raise ValueError(f"rank {self.rank} of {self.size} cannot {kind} with rank {peer}")
        if kind == "broadcast" and not 0 <= peer < self.size:
            raise ValueError(f"there is no rank {peer} to broadcast, only 0 to {self.size - 1}")
        if len(world.said[self.rank]) >= MOST:
            raise ValueError(f"rank {self.rank} has said {MOST} things; is there a loop that never ends?")
        world.said[self.rank].append([kind, peer, x.numel(), x.nbytes])

    def _all(self, kind: str, x: Tensor) -> list[Tensor]:
        parts = self._world.meet(self.rank, kind, x.clone())
        if len({(p.shape, p.dtype) for p in parts}) > 1:
            shapes = ", ".join(f"{list(p.shape)} {str(p.dtype).removeprefix('torch.')}" for p in parts)
            raise ValueError(f"{kind} needs one shape and dtype on all ranks, got {shapes}")
        return [p.clone() for p in parts]

    def all_reduce(self, x: Tensor) -> Tensor:
        self._say("all_reduce", x)
        parts = self._all("all_reduce", x)
        for part in parts[1:]:
            parts[0] += part
        return parts[0]

    def all_gather(self, x: Tensor) -> list[Tensor]:
        self._say("all_gather", x)
        return self._all("all_gather", x)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        self._say("broadcast", x, source)
        return x.copy_(self._all(f"broadcast from {source}", x)[source])  # the ranks must mean the same one

    def send(self, x: Tensor, to: int) -> None:
        self._say("send", x, to)
        self._world.wires.setdefault((self.rank, to), deque()).append(x.clone())

    def recv(self, x: Tensor, source: int) -> Tensor:
        self._say("recv", x, source)
        wire = self._world.wires.setdefault((source, self.rank), deque())
        if not wire:
            self._world.wait(self.rank, ("recv", source))
        got = wire.popleft()
        if (got.shape, got.dtype) != (x.shape, x.dtype):
            sent, wants = (f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (got, x))
            raise ValueError(f"rank {source} sent {sent}, and rank {self.rank} expects {wants}")
        return x.copy_(got)
