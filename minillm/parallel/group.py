"""The ranks that belong together, and what they say to each other: every word counted and timed. Lesson 14.

Three worlds have one interface. `Alone` is one rank: nothing is said. `ThreadGroup` is a world inside a process, a
thread a rank, for lessons and tests. `DistGroup` is torch.distributed: processes, gloo between CPUs, NCCL between GPUs.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from minillm.errors import EngineLost, MinillmError

MOST_UNDER_WAY = 64  # tensors that a rank has sent and keeps, since the other may not have them yet


class RankLost(EngineLost):
    """A rank is gone or does not answer. What it held is lost, so the engine ends; the message says which, and why."""


@dataclass
class Traffic:
    """What this rank has said, by kind ("all_reduce", "all_gather", "broadcast", "send", "recv").

    calls, bytes (of the tensors as given, not of the algorithm) and seconds (waiting for others included).
    """

    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def counted(self, kind: str, nbytes: int) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.calls[kind] += 1
        self.bytes[kind] += nbytes
        self.seconds[kind] += time.perf_counter() - begun

    def clear(self) -> None:
        for table in (self.calls, self.bytes, self.seconds):
            table.clear()


class Group(Protocol):
    """Ranks 0 to size - 1. A collective is called by all of them, in the same order, with tensors of one shape.

    Raises RankLost when another rank is gone.
    """

    rank: int
    size: int
    traffic: Traffic

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks. x may be overwritten; the result has its shape and dtype."""

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Everybody's x, by rank."""

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """`source`'s x, for everybody; the others' is overwritten."""

    def send(self, x: Tensor, to: int) -> None:
        """One tensor to one rank, which receives it. Does not wait for that."""

    def recv(self, x: Tensor, source: int) -> Tensor:
        """The next tensor that `source` has sent to this rank, in x, which has its shape and dtype."""

    def flush(self) -> None:
        """Wait until all that this rank has sent is received, and let go of it."""


class Alone:
    """A world of one rank: everything is here already."""

    def __init__(self) -> None:
        self.rank, self.size, self.traffic = 0, 1, Traffic()

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x

    def send(self, x: Tensor, to: int) -> None:
        raise MinillmError(f"rank {to} is not in this world of 1")

    def recv(self, x: Tensor, source: int) -> Tensor:
        raise MinillmError(f"rank {source} is not in this world of 1")

    def flush(self) -> None:
        pass


class ThreadGroup:
    """One rank of a world inside this process (see `run_threads`). It sums in rank order: the same bits everywhere."""

    def __init__(self, rank: int, world: _ThreadWorld):
        self.rank, self.size, self.traffic, self._world = rank, world.size, Traffic(), world

    def all_reduce(self, x: Tensor) -> Tensor:
        with self.traffic.counted("all_reduce", x.nbytes):
            parts = self._world.exchange(self.rank, x)
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            return total

    def all_gather(self, x: Tensor) -> list[Tensor]:
        with self.traffic.counted("all_gather", x.nbytes):
            return [part.clone() for part in self._world.exchange(self.rank, x)]

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        with self.traffic.counted("broadcast", x.nbytes):
            return x.copy_(self._world.exchange(self.rank, x)[source])

    def send(self, x: Tensor, to: int) -> None:
        with self.traffic.counted("send", x.nbytes):
            self._world.send(self.rank, to, x)

    def recv(self, x: Tensor, source: int) -> Tensor:
        with self.traffic.counted("recv", x.nbytes):
            got = self._world.receive(source, self.rank)
            if (got.shape, got.dtype) != (x.shape, x.dtype):
                raise MinillmError(
                    f"rank {source} sent {list(got.shape)} {got.dtype}, and rank {self.rank} expected "
                    f"{list(x.shape)} {x.dtype}"
                )
            return x.copy_(got)

    def flush(self) -> None:
        pass  # what was sent was copied


class _ThreadWorld:
    def __init__(self, size: int, timeout_s: float, rendezvous: bool):
        self.size, self.timeout_s, self.rendezvous = size, timeout_s, rendezvous
        self._barrier = threading.Barrier(size, timeout=timeout_s)
        self._slots: list[Any] = [None] * size
        pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
        self._wires: dict[tuple[int, int], SimpleQueue[Tensor]] = {pair: SimpleQueue() for pair in pairs}
        self._taken: dict[tuple[int, int], SimpleQueue[Tensor]] = {pair: SimpleQueue() for pair in pairs}

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """Everybody's x. Two barriers: nobody reads before all have written, or writes before all have read."""
        try:
            self._slots[rank] = x.clone()
            self._barrier.wait()
            parts = list(self._slots)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise RankLost(f"rank {rank} waited in vain for the others in a collective: one has ended or left it out"
                           ) from None  # fmt: skip
        if len({(p.shape, p.dtype) for p in parts}) > 1:
            shapes = [f"{list(p.shape)} {p.dtype}" for p in parts]
            raise MinillmError(f"a collective needs one shape and dtype on all ranks, got {', '.join(shapes)}")
        return parts

    def wire(self, source: int, to: int) -> SimpleQueue[Tensor]:
        if (source, to) not in self._wires:
            raise MinillmError(f"a rank sends to another one from 0 to {self.size - 1}, got {source} to {to}")
        return self._wires[source, to]

    def send(self, source: int, to: int, x: Tensor) -> None:
        self.wire(source, to).put(x.clone())
        if self.rendezvous:
            self.get(self._taken[source, to], f"rank {to} does not take what rank {source} sends")

    def receive(self, source: int, to: int) -> Tensor:
        x = self.get(self.wire(source, to), f"rank {source} sent nothing")
        if self.rendezvous:
            self._taken[source, to].put(x)
        return x

    def get(self, wire: SimpleQueue[Tensor], why: str) -> Tensor:
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                return wire.get(timeout=0.02)
            except Empty:
                if self._barrier.broken or time.monotonic() > deadline:
                    raise RankLost(why) from None

    def abort(self) -> None:
        self._barrier.abort()


def run_threads(
    size: int, work: Callable[[Group], Any], timeout_s: float = 60.0, rendezvous: bool = False
) -> list[Any]:
    """work(group) on every rank of a world of threads; what each returned, by rank.

    rendezvous: a send ends when its receiver takes it, as NCCL's do that do not fit its buffers.
    Raises what the first rank that failed has raised; the others are told (RankLost), so nothing hangs.
    """
    world = _ThreadWorld(size, timeout_s, rendezvous)
    results: list[Any] = [None] * size
    faults: list[tuple[bool, int, BaseException]] = []

    def one(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = work(ThreadGroup(rank, world))
        except BaseException as error:
            faults.append((isinstance(error, RankLost), rank, error))
            world.abort()

    threads = [threading.Thread(target=one, args=(r,), daemon=True) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout_s + 10)
    if faults:
        raise min(faults, key=lambda f: f[:2])[2]
    if any(t.is_alive() for t in threads):
        raise RankLost(f"a rank did not end within {timeout_s + 10:.0f} s")
    return results


class DistGroup:
    """Ranks of torch.distributed. `ranks`: which of the world's belong to it, in order; every process must make it.

    gloo sums integers and floats of 4 bytes exactly as they come; bf16 and fp16 travel as they are.
    """

    def __init__(self, ranks: Sequence[int] | None = None):
        import torch.distributed as dist

        self._dist = dist
        world = dist.get_world_size()
        self.ranks = list(range(world)) if ranks is None else list(ranks)
        self._group = None if self.ranks == list(range(world)) else dist.new_group(self.ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(dist.get_rank()) if dist.get_rank() in self.ranks else -1
        self.traffic = Traffic()
        self._sending: list[tuple[Any, Tensor]] = []

    @contextmanager
    def _said(self, kind: str, x: Tensor) -> Iterator[None]:
        try:
            with self.traffic.counted(kind, x.nbytes):
                yield
                if self.timed and x.is_cuda:
                    torch.cuda.synchronize(x.device)
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} of {self.size}: {kind} failed, another rank is gone ({error!s:.200})"
                           ) from error  # fmt: skip

    timed = False  # set by benches: NCCL only launches; wait for each to end, so that its seconds are its own

    def all_reduce(self, x: Tensor) -> Tensor:
        with self._said("all_reduce", x):
            self._dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._said("all_gather", x):
            self._dist.all_gather(parts, x, group=self._group)
        return parts

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        with self._said("broadcast", x):
            self._dist.broadcast(x, src=self.ranks[source], group=self._group)
        return x

    def send(self, x: Tensor, to: int) -> None:
        x = x.contiguous()
        with self._said("send", x):
            # gloo's work never says that it is done until it is waited for, so the oldest ones are: no more are kept.
            while len(self._sending) >= MOST_UNDER_WAY:
                self._sending.pop(0)[0].wait()
            self._sending = [(work, t) for work, t in self._sending if not work.is_completed()]
            work = self._dist.isend(x, dst=self.ranks[to], group=self._group)
            self._sending.append((work, x))  # it is read until it has gone

    def recv(self, x: Tensor, source: int) -> Tensor:
        with self._said("recv", x):
            self._dist.recv(x, src=self.ranks[source], group=self._group)
        return x

    def flush(self) -> None:
        sending, self._sending = self._sending, []
        for work, x in sending:
            with self._said("flush", x):
                work.wait()
