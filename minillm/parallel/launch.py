"""The processes of a parallel engine: started, watched, ended. Lesson 14.

Rank 0 is the process that made the engine. It starts one process for each other rank (or finds itself started by
torchrun, beside them), and they meet over torch.distributed: gloo between CPUs, NCCL between GPUs. A rank that ends
before its time is noticed at once, with what it last said; one that stands still (stopped, frozen) without ending, when
nothing was heard of it for `still_s()`. A rank 0 that ends takes the others along.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from minillm.child import Child
from minillm.config import ModelConfig
from minillm.engine_config import EngineConfig
from minillm.errors import MinillmError
from minillm.parallel import messages
from minillm.parallel.group import RankLost
from minillm.parallel.processes import CAUSE_S, cause, child_environment, loopback
from minillm.parallel.ranks import Ranks
from minillm.parallel.shard import Place

START_S = 300.0  # in which the other ranks must have come
MEET = timedelta(seconds=60)  # in which ranks that have come must find each other
FOREVER = timedelta(days=30)  # an idle rank waits for the next step; a rank that dies closes its connections
LOOK_S = 0.1
NOTICED_S = 10.0  # in which the end of a process is, after a collective that failed because of it
BEAT_S = 1.0  # how often a rank is heard of
STILL, STILL_S = "MINILLM_STILL_S", 30.0  # how long it may say nothing, where that variable says nothing else
QUIET_NCCL = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def started_by_torchrun() -> int | None:
    """This process's rank if torchrun, or another launcher with its variables, has started it. Raises MinillmError."""
    if not all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise MinillmError(
            f"the launcher's variables RANK {rank!r} and WORLD_SIZE {world!r} are no rank of so many processes; unset "
            "them, or start this with torchrun"
        )
    return int(rank)


def expect_world(size: int) -> None:
    """Raise MinillmError unless the launcher has started as many processes as the engine has ranks."""
    if (started := int(os.environ["WORLD_SIZE"])) != size:
        raise MinillmError(
            f"{started} processes were started, and the engine has {size} ranks (tensor_parallel_size times "
            f"pipeline_parallel_size); start as many: torchrun --nproc-per-node {size}"
        )


def still_s() -> float:
    """Seconds for which a rank may say nothing. 0 in the environment: for ever, for one that is debugged."""
    told = os.environ.get(STILL) or str(STILL_S)
    try:
        seconds = float(told)
    except ValueError:
        seconds = math.nan
    if not (seconds == 0 or seconds >= 3 * BEAT_S):
        raise MinillmError(f"{STILL} is {told!r}; give seconds, {3 * BEAT_S:g} at least, or 0 to wait for ever")
    return seconds or math.inf


def threads_of(config: EngineConfig, world: int) -> int:
    """Torch's threads a rank: as told, or an even share of the cores."""
    return config.threads or max(1, len(os.sched_getaffinity(0)) // world if hasattr(os, "sched_getaffinity") else 1)


def device_of(config: EngineConfig, rank: int) -> str:
    """Where a rank computes: on a CPU all in one, of GPUs each has its own."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if config.device not in ("auto", "cuda"):
        raise MinillmError(f"device {config.device!r}: with several ranks each has its own GPU; use 'cuda' or 'cpu'")
    told = os.environ.get("LOCAL_RANK", "") if started_by_torchrun() is not None else ""
    local = int(told) if told.isdecimal() else rank
    if local >= torch.cuda.device_count():
        raise MinillmError(f"rank {rank} needs a GPU of its own, and torch sees {torch.cuda.device_count()} here")
    return f"cuda:{local}"


def refuse_second() -> None:
    """torch.distributed has one world a process, so it can have one parallel engine at a time."""
    import torch.distributed as dist

    if dist.is_initialized():
        raise MinillmError("this process has a parallel engine already; end it first with shutdown()")


def join(store: Any, rank: int, world: int, device: str) -> None:
    """Enter torch.distributed's world. store: where the ranks meet; None: as torchrun's variables say. RankLost."""
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    where: dict[str, Any] = {} if store is None else {"store": store, "rank": rank, "world_size": world}
    try:
        dist.init_process_group(backend, timeout=MEET, **where)
        dist.barrier()  # gloo's, also between GPUs: NCCL meets in `Ranks`
    except BaseException as error:
        leave()
        if isinstance(error, RuntimeError):  # whatever it is of: another has not come, or left
            raise RankLost(f"the ranks did not meet: {error!s:.300}") from error
        raise
    # The only function for it. From here on an idle rank waits for the next step, however long that takes.
    dist.distributed_c10d._set_pg_timeout(FOREVER)


def among_ours() -> dict[str, str]:
    """The environment in which the groups of ranks are made that `Launched` has started, and watches.

    NCCL's own watchdog would end a process, and say nothing, where `Launched` ends the engine and says why.
    """
    return loopback() | ({} if QUIET_NCCL in os.environ else {QUIET_NCCL: "0"})


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            os.environ.pop(name, None)


def leave() -> None:
    import torch.distributed as dist

    with contextlib.suppress(Exception):
        if dist.is_initialized():
            dist.destroy_process_group()
        else:  # a world that did not meet has been counted, and the next would be looked for under another number
            dist.distributed_c10d._world.group_count = 0


class RankProcess(Child):
    """Another rank's process. It writes a line every BEAT_S, as long as it runs at all."""

    def __init__(self, rank: int, settings: dict[str, Any]):
        self.rank, self.silent = rank, 0
        environment = child_environment(settings["threads"]) | among_ours()
        told = json.dumps(settings | {"rank": rank}) + "\n"
        super().__init__([sys.executable, "-m", "minillm.parallel.worker"], environment, told)

    def _hear(self, line: str) -> None:
        self.silent = 0

    def gone(self) -> str:
        """How it has ended, in words."""
        last = f": {self.lines[-1]}" if self.lines else ""
        return f"rank {self.rank} (process {self.process.pid}) {self.fate()}{last}"

    def look(self, still_s: float) -> str | None:
        """That it has said nothing for longer than still_s, in words. Called every LOOK_S: silence is counted in looks,
        so that a time in which this process itself stood still (Ctrl+Z, a frozen machine) does not count."""
        self.silent += 1
        if self.silent * LOOK_S > still_s and not self.ended.is_set():
            return f"rank {self.rank} (process {self.process.pid}) has stood still for {still_s:.0f} s ({STILL})"
        return None


class Launched:
    """Rank 0's hold on the others. on_lost: called once, from the watching thread, when one ends before its time."""

    def __init__(self, folder: Path, config: EngineConfig, model: ModelConfig, dtype: str):
        """dtype: what "auto" means here, so that it means the same on every rank."""
        self.on_lost: Callable[[RankLost], None] | None = None
        self.lost: RankLost | None = None
        self.still_s = still_s()
        self._closing = threading.Event()
        self._joined = False
        self._children: list[RankProcess] = []
        self._threads_before = torch.get_num_threads()
        world = config.world_size
        place = Place.of_rank(0, config.tensor_parallel_size, config.pipeline_parallel_size)
        self._device = device_of(config, 0)
        if started_by_torchrun() is None:
            device_of(config, world - 1)  # refused before anything begins
        refuse_second()
        try:
            torch.set_num_threads(threads_of(config, world))
            store = None if started_by_torchrun() is not None else self._start(folder, config, dtype)
            if self._children:
                threading.Thread(target=self._watch, name="minillm-ranks", daemon=True).start()
            with _environment({} if store is None else among_ours()):
                join(store, 0, world, self._device)
                self._joined = True
                self.ranks = Ranks(place, config, model, self._device, dtype)
        except BaseException as error:
            lost = self.why(error) if isinstance(error, RankLost) else self.lost
            self.close(tell=False)
            if lost is None or lost is error or not isinstance(error, Exception):
                raise
            raise lost from error

    def _start(self, folder: Path, config: EngineConfig, dtype: str) -> Any:
        """Start the other ranks, and wait until each has come to the meeting place."""
        from torch.distributed import TCPStore

        world = config.world_size
        door = socket.create_server(("127.0.0.1", 0))  # its own choice would listen to the whole network, without a key
        store = TCPStore(
            "127.0.0.1", door.getsockname()[1], world, is_master=True, wait_for_workers=False, timeout=FOREVER,
            master_listen_fd=door.detach(),
        )  # fmt: skip
        own: dict[str, Any] = {"public_prefixes": (), "cache_floors": {}}  # rank 0's affair, in any types
        settings = {
            "folder": str(folder), "config": asdict(config) | own | {"dtype": dtype}, "port": store.port,
            "threads": threads_of(config, world),
        }  # fmt: skip
        for rank in range(1, world):
            self._children.append(RankProcess(rank, settings))  # one by one: it must end if the next cannot start
        deadline = time.monotonic() + START_S
        missing = set(range(1, world))
        while missing:
            missing = {r for r in missing if not store.check([f"here/{r}"])}
            if (ended := cause(self._ended)) is not None:
                self.lost = RankLost(f"{ended.gone()} before it had begun")
            elif time.monotonic() > deadline:
                self.lost = RankLost(f"rank {min(missing)} did not begin within {START_S:.0f} s")
            if self.lost is not None:
                raise self.lost
            time.sleep(0.02)
        return store

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_S):
            still = [words for child in self._children if (words := child.look(self.still_s)) is not None]
            ended = cause(self._ended)
            if (ended or still) and not self._closing.is_set():
                fate = ended.gone() if ended else still[0]
                self.lost = RankLost(f"{fate}; the engine needs all its ranks")
                self._give_up()
                if self.on_lost is not None:
                    self.on_lost(self.lost)
                return

    def _ended(self) -> list[RankProcess]:
        return [child for child in self._children if child.ended.is_set()]

    def _give_up(self) -> None:
        """Whoever still waits for an answer must not wait for ever: what is left of the ranks is of no use."""
        for child in self._children:  # gloo notices connections that close, also those of a rank that stands still
            child.kill()
        if self._joined and self._device.startswith("cuda"):  # NCCL notices nothing by itself
            import torch.distributed as dist

            with contextlib.suppress(Exception):
                dist.distributed_c10d._abort_process_group()

    def why(self, error: RankLost) -> RankLost:
        """What is behind a collective that failed: the process that has ended, if there is one."""
        deadline = time.monotonic() + NOTICED_S + CAUSE_S
        while self._children and self.lost is None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return self.lost or error

    def close(self, tell: bool = True) -> None:
        """End the other ranks. A second time, nothing. tell: they are between two steps, and listen."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.on_lost = None
        if tell and self.lost is None and not self._ended():
            with contextlib.suppress(Exception):
                messages.tell(self.ranks.world, [messages.END])
            deadline = time.monotonic() + 3.0
            for child in self._children:
                child.ended.wait(max(0.0, deadline - time.monotonic()))
        for child in self._children:
            child.kill()
        for child in self._children:
            child.end(0.0)
        if self._joined:  # another engine of this process may be there
            leave()
        torch.set_num_threads(self._threads_before)
