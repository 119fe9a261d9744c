"""A server in a process of its own, so that its memory is its own: no test before it, no client, lives there.

>>> server = Measured(folder, engine={"max_num_seqs": 8}, max_queued_requests=24)
>>> server("under_way(server)")      # any expression over `server`, `steps`, this module and server_life
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import server_life
from server_life import WAIT_S, serving

from minillm.server.connection import Connection
from minillm.server.open_files import _raised


class Measured:
    """The parent's side. Leaving the block ends it."""

    def __init__(self, folder: Any, **options: Any):
        _raised(4096)  # open files of this process, whose clients they are
        root = Path(__file__).resolve().parents[1]
        paths = os.pathsep.join([str(root), str(root / "tests")])
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(folder), json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=os.environ | {"PYTHONPATH": paths},
        )  # fmt: skip
        self.port: int = self("server.port")

    def __call__(self, expression: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        late = threading.Timer(WAIT_S, self.process.kill)  # a server that hangs must not hang the suite
        late.start()
        try:
            self.process.stdin.write(expression + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        finally:
            late.cancel()
        assert answer, f"{expression}: the server's process has ended, or said nothing for {WAIT_S:g} s"
        failed, value = json.loads(answer)
        assert not failed, f"{expression}: {value}"
        return value

    def close(self) -> None:
        """It ends when nobody can ask any more; what it leaves behind is its failure."""
        try:
            self.process.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        assert self.process.returncode == 0

    def __enter__(self) -> Measured:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# In the process ------------------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of this process that are held: without what Python has not collected and malloc has not given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class AdmitsAll:
    """What the bounds are there against."""

    def admit(self, ask: Any, queue: Any) -> None:
        return None


def hoard(size: int) -> None:
    """Each connection from now on holds so many bytes more."""
    made = Connection.connection_made
    hoards = lambda c, transport: (made(c, transport), setattr(c, "hoard", b"x" * size))[0]
    Connection.connection_made = hoards  # type: ignore[assignment, method-assign]


class Holding:
    """`server_life.held`, begun by one expression and ended by another."""

    def __init__(self, server: Any, stack: ExitStack):
        self.server, self.stack = server, stack
        self.steps: Any = None

    def hold(self) -> None:
        self.steps = self.stack.enter_context(server_life.held(self.server))

    def run(self, count: int) -> None:
        """Let steps through until so many sequences run."""
        scheduler = self.server.state.llm.core.scheduler
        self.steps.until(lambda: len(scheduler.running) == count, "all run")

    def release(self) -> None:
        self.stack.close()


connections: set[Connection] = set()  # that are open


def follow_connections() -> None:
    made, lost = Connection.connection_made, Connection.connection_lost
    Connection.connection_made = lambda c, transport: (connections.add(c), made(c, transport))[1]  # type: ignore
    Connection.connection_lost = lambda c, error: (connections.discard(c), lost(c, error))[1]  # type: ignore


def main(folder: str, options: str) -> None:
    follow_connections()
    with serving(folder, **json.loads(options)) as server, ExitStack() as stack:
        gc.collect()
        gc.freeze()  # what is there now need not be looked through each time that memory is measured
        names = vars(server_life) | globals() | {"server": server, "steps": Holding(server, stack)}
        for line in sys.stdin:
            try:
                said = [False, eval(line, names)]
            except BaseException as error:
                said = [True, f"{type(error).__name__}: {error}"]
            print(json.dumps(said, default=repr), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
