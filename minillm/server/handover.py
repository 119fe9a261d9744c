"""A server's part in a split: what its role starts beside the engine, and what /metrics tells of it. Lesson 15.

>>> door = open_door(config)          # before the weights are read
>>> side = start(config, llm, door=door)   # None for role both
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from minillm.async_llm import AsyncLLM
from minillm.cluster.disagg import Stats
from minillm.cluster.local_process import CHILD, Child, flags
from minillm.cluster.prefill_worker import PrefillWorker
from minillm.cluster.remote_prefill import RemotePrefill
from minillm.cluster.transport import Listener, connect, listen
from minillm.commands.serve import ENGINE
from minillm.errors import MinillmError
from minillm.parallel import launch
from minillm.server.config import ServerConfig
from minillm.server.roles import num_prefill

log = logging.getLogger("minillm.server")
KEY = "MINILLM_KV_KEY"
SECRETS = ("MINILLM_API_KEY", "MINILLM_ADMIN_KEY", "MINILLM_HASH_SALT")  # of this server: no business of its children
START_S = 600.0  # for a prefill server to read its weights
NOT_SHARED = ("kv_disk_bytes", "kv_disk_path", "threads")  # a folder belongs to one process; threads are divided


class Side:
    """address: of a prefill server. worker, remote: what it runs. ended: prefill servers it had started, and lost."""

    def __init__(self, llm: AsyncLLM):
        self.llm, self.address = llm, ""
        self.worker: PrefillWorker | None = None
        self.remote: RemotePrefill | None = None
        self.children: dict[str, PrefillChild] = {}
        self.ended = 0

    @property
    def stats(self) -> Stats:
        side = self.worker or self.remote
        assert side is not None
        return side.stats

    def adopt(self, name: str, child: PrefillChild, key: bytes) -> None:
        """Use a prefill server that was started, as soon as it is ready, and go on without it when it dies."""
        self.children[name] = child

        def watch() -> None:
            remote = self.remote
            assert remote is not None
            while not child.address and not child.ended.wait(0.05):
                pass
            if child.address:
                log.info("prefill server %s: metrics at %s/metrics", name, child.url)
                remote.add_peer(name, partial(connect, child.address, key))
            child.ended.wait()
            remote.remove_peer(name)
            self.ended += 1
            if name not in self.children:
                return
            if child.process.returncode == 0:  # and it has finished what it could
                log.warning("prefill server %s was told to end; prompts are computed here from now on", name)
            else:
                log.error("prefill server %s: %s; its prompts are computed here from now on", name, child.epitaph())

        threading.Thread(target=watch, name=f"minillm-kv-{name}", daemon=True).start()

    def wait(self, within_s: float = START_S) -> None:
        """Until the prefill servers it has started are there. MinillmError if one ends before."""
        end = time.monotonic() + within_s
        assert self.remote is not None
        while self.remote.states()["ready"] < len(self.children):
            for name, child in self.children.items():
                if child.ended.is_set():
                    raise MinillmError(f"prefill server {name} did not start: {child.epitaph()}")
            if self.remote.states()["refused"]:
                raise MinillmError("a prefill server was refused; the log says why")
            if time.monotonic() > end:
                raise MinillmError(f"the prefill servers were not ready within {within_s:g} s")
            time.sleep(0.02)

    def close(self) -> None:
        children, self.children = self.children, {}
        if self.remote is not None:
            self.remote.close()
        if self.worker is not None:
            self.worker.close()
        end_children(children)


class PrefillChild(Child):
    """A `minillm serve --role prefill`. address: where it hands KV over, once it is ready."""

    address = ""

    def _hear(self, line: str) -> None:
        super()._hear(line)
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            facts = json.loads(line)
            if facts.get("event") == "ready":
                self.address = str(facts["kv_address"])


def kv_key() -> bytes:
    """The secret of a split's servers. MinillmError without one."""
    if not (key := os.environ.get(KEY, "")):
        raise MinillmError(f"the servers of a split share a secret: set {KEY} to the same text for each of them")
    return key.encode()


def start_children(config: ServerConfig, args: argparse.Namespace, engine: Mapping[str, Any]) -> Children:
    """The prefill servers of --split: started before the weights are read here, so that all read at once."""
    if launch.started_by_torchrun() is not None:
        raise MinillmError(
            "split starts processes itself, and so does torchrun; start the servers of a split one by one"
        )
    count, key = num_prefill(config.split), secrets.token_hex(32)
    own = {n: v for n in ENGINE if n not in NOT_SHARED and (v := engine.get(n)) != args.default_of(n)}
    own |= shares(args, engine, count)
    command = [
        sys.executable, "-c", CHILD, "serve", "--model", str(args.model), "--role", "prefill", "--port", "0", "--json",
        "--grace-s", str(config.grace_s), *flags(own),  # told together with this one, it has as long as this one
    ]  # fmt: skip
    env = {name: value for name, value in os.environ.items() if name not in SECRETS} | {KEY: key}
    cards = own_cards(args, engine, count)[1:] or [{}] * count
    return {f"p{i}": PrefillChild(command, env | mine) for i, mine in enumerate(cards)}, key.encode()


Children = tuple[dict[str, PrefillChild], bytes]


def ranks_of(engine: Mapping[str, Any]) -> int:
    return int(engine.get("tensor_parallel_size") or 1) * int(engine.get("pipeline_parallel_size") or 1)


def shares(args: argparse.Namespace, engine: Mapping[str, Any], count: int) -> dict[str, int]:
    """Options for each of count + 1 engines of what they divide between them, where nobody has said how much."""
    each = {} if (threads := threads_each(args, count)) is None else {"threads": threads}
    asked = engine.get("num_kv_blocks") or engine.get("kv_cache_memory_bytes")
    if not asked and not own_cards(args, engine, count):
        each["engines_on_device"] = count + 1
    return each


def own_cards(args: argparse.Namespace, engine: Mapping[str, Any], count: int) -> list[dict[str, str]]:
    """For each of count + 1 engines, how CUDA is told of its cards. Empty: all use the same device."""
    if args.device not in ("auto", "cuda"):  # the CPU, or a card that was asked for
        return []
    return [mine for i in range(count + 1) if (mine := devices(i, count + 1, ranks_of(engine)))]


def threads_each(args: argparse.Namespace, count: int) -> int | None:
    """Of a CPU's threads, for each of count + 1 engines, unless somebody has said how many."""
    import torch

    on_card = args.device.startswith("cuda") or (args.device == "auto" and torch.cuda.is_available())
    if args.threads is not None or on_card:
        return None if args.threads is None else int(args.threads)
    return max(1, torch.get_num_threads() // (count + 1))


def devices(index: int, engines: int, ranks: int) -> dict[str, str]:
    """Cards of its own for engine `index` of so many, as CUDA is told, if there are enough; else they share."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() < engines * ranks:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    every = visible if visible != [""] else [str(i) for i in range(torch.cuda.device_count())]
    return {"CUDA_VISIBLE_DEVICES": ",".join(every[index * ranks : (index + 1) * ranks])}


def end_children(children: Mapping[str, PrefillChild]) -> None:
    for child in children.values():
        child.end(2.0)


def open_door(config: ServerConfig) -> Listener | None:
    """Where a prefill server listens; None for a decode server. Before the weights are read: an address that is taken,
    or no key, should not cost a minute. Who connects meanwhile waits for a hello. Raises MinillmError."""
    key = kv_key()
    if config.role != "prefill":
        return None
    return listen("shared-memory", key, config.kv_address.partition(":")[2] if config.kv_address else None)


def start(
    config: ServerConfig, llm: AsyncLLM, children: Children | None = None, door: Listener | None = None,
    machine: Any = None,
) -> Side | None:  # fmt: skip
    """What the role needs beside the engine. None: nothing. machine: of `RemotePrefill`, in place of its own."""
    side = Side(llm)
    if config.role == "prefill":
        door = open_door(config) if door is None else door
    if door is not None:
        side.worker, side.address = PrefillWorker(llm, door), door.address
        return side
    if children is None and config.role != "decode":
        return None
    own = {} if machine is None else {"machine": machine}
    side.remote = llm.remote = RemotePrefill(llm, lease_s=config.kv_lease_s, **own)
    if children is not None:
        for name, child in children[0].items():
            side.adopt(name, child, children[1])
        side.wait()
        return side
    key = kv_key()
    for i, address in enumerate(config.prefill):
        side.remote.add_peer(f"p{i}", partial(connect, address, key))
    return side


class HandoverMetrics:
    """A collector of a side's `Stats`."""

    def __init__(self, side: Side, prefix: str, model_name: str):
        self.side, self.prefix, self.model_name = side, prefix, model_name

    def collect(self) -> Iterator[Metric]:
        now = self.side.stats.copy()
        yield self._family(CounterMetricFamily, "kv_transfers", "Prompts handed over, by how it ended and why",
                           now["outcomes"], "outcome", "reason")  # fmt: skip
        yield self._family(CounterMetricFamily, "kv_transfer_bytes", "KV sent (prefill) or received (decode)",
                           {(): now["bytes"]})  # fmt: skip
        yield self._family(CounterMetricFamily, "kv_transfer_messages_dropped", "Messages that were not believed",
                           {(why,): n for why, n in now["dropped"].items()}, "reason")  # fmt: skip
        if self.side.remote is None:
            yield self._family(GaugeMetricFamily, "kv_transfer_kept_bytes", "KV that waits to be sent",
                               {(): self.side.worker.kept_bytes if self.side.worker else 0})  # fmt: skip
            return
        yield self._family(CounterMetricFamily, "kv_transfer_seconds", "First piece to last, of transfers that were "
                           "loaded: sum", {(): now["seconds"]})  # fmt: skip
        yield self._family(CounterMetricFamily, "kv_transfer_exposed_seconds", "Of these, behind the end of the "
                           "prefill: the rest overlapped with it", {(): now["exposed_seconds"]})  # fmt: skip
        states = self.side.remote.states() | {"ended": self.side.ended}
        yield self._family(GaugeMetricFamily, "prefill_servers", "Prefill servers by state",
                           {(state,): n for state, n in states.items()}, "state")  # fmt: skip

    def _family(self, kind: Any, name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Metric:
        family = kind(self.prefix + name, text + ".", labels=["model_name", *labels])
        for key, value in values.items():
            family.add_metric([self.model_name, *key], float(value))
        found: Metric = family
        return found
