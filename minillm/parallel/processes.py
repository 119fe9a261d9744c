"""A world of real processes for a function: what `run_threads` is for threads. Lessons 14 and 15, and the benches.

Each rank is a fresh Python that joins torch.distributed (gloo between CPUs, NCCL between GPUs), calls
`function(group, **arguments)` and gives back what it returned as JSON. For servers see launch.py; this is for a piece
of work that ends.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import minillm
from minillm.child import Child, end_with_parent
from minillm.errors import MinillmError
from minillm.parallel.group import RankLost


def child_environment(threads: int | None = None) -> dict[str, str]:
    """So that a fresh Python finds this very package, installed or not. threads: of its OpenMP."""
    path = [str(Path(minillm.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    limit = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)} | limit


def loopback() -> dict[str, str]:
    """Ranks of one machine speak where no other machine hears them, and where its own name need not lead anywhere.

    Not where somebody has chosen an interface.
    """
    chosen = sys.platform != "linux" or "GLOO_SOCKET_IFNAME" in os.environ
    return {} if chosen else {"GLOO_SOCKET_IFNAME": "lo"}


C = TypeVar("C", bound=Child)
MISSED = 3  # the exit code of a rank that ended because another was lost
CAUSE_S = 2.0  # a rank that failed may end that much later than those that missed it: it has more to clear away


def cause(failed: Callable[[], list[C]]) -> C | None:
    """Of the ranks that have failed, in order, the one to name: the first that did not merely miss another.

    failed: those that have by now. None while it is empty. Where all have MISSED, waits CAUSE_S for one that has not.
    """
    deadline = time.monotonic() + CAUSE_S
    while found := failed():
        causes = [rank for rank in found if rank.process.returncode != MISSED]
        if causes or time.monotonic() > deadline:
            return (causes or found)[0]
        time.sleep(0.01)
    return None


def run_processes(
    size: int, function: str, arguments: dict[str, Any] | None = None, *, backend: str = "gloo",
    timeout_s: float = 600.0, threads: int = 1,
) -> list[Any]:  # fmt: skip
    """What `function` returned on ranks 0 to size - 1.

    function: "package.module:name", called with a DistGroup and `arguments` (JSON data) by keyword. backend "nccl"
    gives rank r the GPU r. threads: of torch, in each process. Raises RankLost with the rank and its last words when
    one fails or does not end within `timeout_s`; all others are ended then.
    """
    if size < 1:
        raise MinillmError(f"a world needs at least 1 rank, got {size}")
    with tempfile.TemporaryDirectory(prefix="minillm-world-") as name:
        folder = Path(name)
        job = {"size": size, "function": function, "arguments": arguments or {}, "backend": backend,
               "timeout_s": timeout_s, "threads": threads, "folder": name}  # fmt: skip
        environment = child_environment(threads) | loopback()
        command = [sys.executable, "-c", "from minillm.parallel.processes import _rank; _rank()"]
        ranks: list[Child] = []
        try:
            for r in range(size):
                ranks.append(Child(command, environment, json.dumps(job | {"rank": r}) + "\n"))
            _wait(ranks, timeout_s)
            return [json.loads((folder / f"{r}.json").read_text(encoding="utf-8")) for r in range(size)]
        finally:
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.end(0.0)


def _wait(ranks: Sequence[Child], timeout_s: float) -> None:
    """Until all have ended well."""
    end = time.monotonic() + timeout_s
    while late := [str(r) for r, rank in enumerate(ranks) if not rank.ended.is_set() or rank.process.returncode]:
        rank = cause(lambda: [rank for rank in ranks if rank.ended.is_set() and rank.process.returncode])
        if rank is not None:
            last = rank.lines[-1][:500] if rank.lines else "no message"
            raise RankLost(f"rank {ranks.index(rank)} of {len(ranks)} {rank.fate()}: {last}")
        if time.monotonic() > end:
            raise RankLost(f"rank {', '.join(late)} of {len(ranks)} did not end within {timeout_s:.0f} s")
        time.sleep(0.01)


def _rank() -> None:
    """What a process of `run_processes` does."""
    code = 0
    try:
        _work()
    except BaseException as error:
        traceback.print_exc()
        code = MISSED if isinstance(error, RankLost) else 1
    leave_at_once(code)  # the result is written


def leave_at_once(code: int) -> None:
    """End this process. Python's own way takes gloo's threads down, and has aborted in it, which hides the reason."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _work() -> None:
    job = json.loads(sys.stdin.readline())
    end_with_parent(lambda: os._exit(MISSED))
    import torch
    import torch.distributed as dist

    from minillm.parallel.group import DistGroup

    torch.set_num_threads(job["threads"])
    nccl = job["backend"] == "nccl"
    if nccl:
        torch.cuda.set_device(job["rank"])
    store = dist.FileStore(str(Path(job["folder"]) / "store"), job["size"])
    try:
        dist.init_process_group(
            job["backend"], store=store, rank=job["rank"], world_size=job["size"],
            timeout=timedelta(seconds=job["timeout_s"]),
        )  # fmt: skip
    except RuntimeError as error:
        raise RankLost(f"the ranks did not meet: {error!s:.300}") from error
    group = DistGroup()
    with torch.inference_mode():
        result = named(job["function"])(group, **job["arguments"])
    path = Path(job["folder"]) / f"{job['rank']}.json"
    path.write_text(json.dumps(result, allow_nan=False), encoding="utf-8")
    # Nobody leaves while another still speaks to it.
    group.all_reduce(torch.zeros(1, device="cuda" if nccl else "cpu")).item()
    dist.destroy_process_group()


def named(function: str) -> Callable[..., Any]:
    """The function of "package.module:name"."""
    module, _, name = function.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise MinillmError(f"no function {function!r} ({error}); expected 'package.module:name'") from None
    return found
