"""What is read from a running engine when Prometheus asks: queue, memory, device. Lesson 13.

Nothing is stored: a gauge that is set when something happens is stale when nothing happens. Each number is read by
itself, so one that fails (a learner's scheduler, a device that is gone) is left out of this scrape and the others stay.
The engine runs in another thread, and every read is one that tolerates that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from minillm.server.tracing import Traces

Read = Callable[[], Any]  # a number, {label value: number}, or None for what cannot be known


class EngineGauges:
    """A collector. fault(where, error) is told of each read that failed."""

    def __init__(
        self, engine: Any, prefix: str, model_name: str, fault: Callable[[str, BaseException], None],
        ready: Callable[[], bool] | None = None, traces: Traces | None = None,
    ):  # fmt: skip
        self.traces = traces
        self.engine, self.prefix, self.model_name, self.fault, self.ready = engine, prefix, model_name, fault, ready

    def collect(self) -> Iterator[Metric]:
        for name, text, label, read in self._reads():
            try:
                value = read()
                if value is None:
                    continue
                make = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
                family = make(self.prefix + name, text + ".", labels=["model_name", *([label] if label else [])])
                for key, number in (dict(value) if label else {"": value}).items():
                    family.add_metric([self.model_name, *([str(key)] if label else [])], float(number))
            except Exception as error:
                self.fault(name, error)
                continue
            yield family

    def _reads(self) -> list[tuple[str, str, str, Read]]:
        """(name, help, label, how to read it)"""
        e = self.engine
        return [
            ("num_requests_running", "Requests that hold memory and are computed", "", self._running),
            ("num_requests_waiting", "Requests in the queue, or whose KV is on its way", "", self._waiting),
            ("num_requests_paused", "Requests whose reader has stalled", "", self._paused),
            ("kv_cache_usage_perc", "KV blocks that live requests hold, of all: 0 to 1", "", self._kv_used),
            ("kv_cache_blocks", "KV blocks by state", "state", self._kv_blocks),
            ("prefix_cache_evicted_blocks", "Cached blocks whose memory was reclaimed", "", self._evicted),
            ("event_faults", "Errors of those who follow the engine, by type", "type", lambda: e.events.faults),
            ("traces", "Trace records by outcome", "outcome", self._traces),
            ("ready", "1 if the server takes requests", "", lambda: None if self.ready is None else bool(self.ready())),
            ("collectives", "What rank 0 has said to the other ranks, by kind", "kind", lambda: self._said("calls")),
            ("collective_seconds", "Seconds of it, waiting included", "kind", lambda: self._said("seconds")),
            ("gpu_utilization_perc", "Of the last sample, as the driver tells: 0 to 1", "", self._gpu_busy),
            ("gpu_memory_bytes", "Memory of the device by state, of all processes", "state", self._gpu_memory),
        ]  # fmt: skip

    def _running(self) -> int:
        return len(self.engine.core.scheduler.running)

    def _waiting(self) -> int:
        core = self.engine.core
        return int(core.scheduler.num_waiting) + len(getattr(core, "held", ()))

    def _paused(self) -> int:
        return sum(r.paused for r in list(self.engine.core.outputs))  # the copy is one step of the interpreter

    def _kv_used(self) -> float:
        return self.engine.cache.num_live / self.engine.cache.pool.num_blocks

    def _kv_blocks(self) -> dict[str, int]:
        cache = self.engine.cache
        return {"free": cache.num_free, "live": cache.num_live, "cached": cache.num_cached}

    def _traces(self) -> dict[str, int] | None:
        return None if self.traces is None else {"written": self.traces.written, "lost": self.traces.lost}

    def _evicted(self) -> int | None:
        stats = getattr(self.engine.cache.prefix, "stats", None)
        return None if stats is None else stats.evicted

    def _said(self, what: str) -> dict[str, float] | None:
        """all_reduce, broadcast and so on, of an engine that is spread over ranks (lesson 14)."""
        if (spread := getattr(self.engine, "spread", None)) is None:
            return None
        total: Counter[str] = Counter()
        for group in {spread.ranks.world, spread.ranks.stage}:
            total.update(dict(getattr(group.traffic, what)))
        return dict(total)

    @property
    def _gpu(self) -> torch.device | None:
        device = self.engine.model.device
        return device if device.type == "cuda" else None

    def _gpu_busy(self) -> float | None:
        """Needs NVML's Python binding, which torch asks for; without it nothing is known."""
        if self._gpu is None:
            return None
        try:
            return torch.cuda.utilization(self._gpu) / 100
        except (ModuleNotFoundError, RuntimeError):
            return None

    def _gpu_memory(self) -> dict[str, int] | None:
        if self._gpu is None:
            return None
        free, total = torch.cuda.mem_get_info(self._gpu)
        return {"used": total - free, "free": free}


COUNTERS = ("prefix_cache_evicted_blocks", "event_faults", "traces", "collectives", "collective_seconds")
