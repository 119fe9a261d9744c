"""A replica that is a `minillm serve` of its own: started, watched, and ended with whoever started it. Lesson 14.

>>> async with ProcessReplica("smollm2-135m", "left", max_model_len=512, threads=1) as replica: ...

The child listens on a free port and says so on its output. It is gone too if this process is killed (child.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from minillm import child
from minillm.cluster.driver import SILENCE_S
from minillm.cluster.http import Address
from minillm.cluster.remote import ANSWER_S, LOOK_S, HttpReplica
from minillm.cluster.replica import ReplicaLost, ReplicaState
from minillm.errors import MinillmError
from minillm.models.hub import EMBEDDED

START_S = 180.0
EPITAPH_S = 2.0  # a broken connection and its process's end come at about the same time; the end says why
KEY = "MINILLM_API_KEY"
CHILD = "from minillm.cluster.local_process import serve; serve()"


class ProcessReplica(HttpReplica):
    """options: flags of `minillm serve` by name: max_model_len=512, enable_prefix_caching=False.

    api_key   that it lets in, and we use; None takes MINILLM_API_KEY, as the server does. It goes by the environment,
              where no list of processes shows it
    command   the process to start in its place: it must print {"event": "ready", "url": ...} as a line of its output,
              and end when its standard input does
    env       added to this process's environment
    start_s   seconds until it must be ready
    grace_s   seconds that it has for its streams when it is told to end; then it is killed
    """

    def __init__(
        self, model: str | os.PathLike[str] = EMBEDDED, name: str = "process", *, start_s: float = START_S,
        grace_s: float = 5.0, answer_s: float = ANSWER_S, silence_s: float = SILENCE_S,
        api_key: str | None = None, tenant_keys: Mapping[str, str] | None = None, env: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None, **options: Any,
    ):  # fmt: skip
        self._env = {**os.environ, **(env or {}), **({KEY: api_key} if api_key else {})}
        super().__init__(
            "http://127.0.0.1:1", name, api_key=self._env.get(KEY) or None, tenant_keys=tenant_keys, answer_s=answer_s,
            ready_s=start_s, silence_s=silence_s,
        )  # fmt: skip
        self.grace_s = grace_s
        serve = ["serve", "--model", os.fspath(model), "--port", "0", "--grace-s", str(grace_s), "--json"]
        self.command = list(command) if command is not None else [sys.executable, "-c", CHILD, *serve, *flags(options)]
        self.child: Child | None = None

    @property
    def pid(self) -> int | None:
        return None if self.child is None else self.child.process.pid

    async def _open(self) -> None:
        self.child = Child(self.command, self._env)
        end = time.monotonic() + self.ready_s
        while self.child.url is None:
            await self._pause()
            if time.monotonic() > end:
                raise MinillmError(
                    f"replica {self.name} did not become ready within {self.ready_s:g} s{self.child.last_words()}"
                )
        self._at = Address(self.child.url)
        await super()._open()

    async def _pause(self) -> None:
        assert self.child is not None
        if self.child.ended.is_set():
            raise MinillmError(f"replica {self.name} did not start: {self.child.epitaph()}")
        await asyncio.sleep(LOOK_S / 4)

    def state(self) -> ReplicaState:
        if self._open_now and self.child is not None and self.child.ended.is_set() and self._seen.alive:
            self._bury(self.child.epitaph())
        return super().state()

    async def _ask(self) -> ReplicaState:
        assert self.child is not None
        if self.child.ended.is_set():
            return replace(self._seen, alive=False, ready=False, why=self.child.epitaph())
        return await super()._ask()

    async def _died_of(self, error: ReplicaLost) -> str:
        """A broken connection says little; the process's end says why."""
        if (child := self.child) is not None:
            await asyncio.to_thread(child.ended.wait, EPITAPH_S)
            if child.ended.is_set():  # also where this process itself stood still for so long
                return child.epitaph()
        return error.why

    async def _close(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            await asyncio.to_thread(child.end, self.grace_s)


class Child(child.Child):
    """url: where it listens, once it has said so."""

    url: str | None = None

    def _hear(self, line: str) -> None:
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            facts = json.loads(line)
            if facts.get("event") == "ready":
                self.url = str(facts["url"])


def flags(options: Mapping[str, Any]) -> list[str]:
    """max_model_len=512 -> --max-model-len 512; a boolean is --name or --no-name; a list gives its flag many times."""
    found = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            found.append(flag if value else f"--no-{flag[2:]}")
        else:
            each = value if isinstance(value, list | tuple) else [value]
            found += [word for v in each for word in (flag, str(v))]
    return found


def serve() -> None:
    """In the child: a command of minillm that ends when its standard input does."""
    from minillm.cli import main

    child.end_with_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))  # as an operator would: it drains
    sys.exit(main(sys.argv[1:]))
