"""What Prometheus sees: counters, histograms and gauges of one engine, with vLLM's names under `minillm:`. Lesson 13.

`Metrics(engine)` follows the engine's event log (`fold.Fold` says what an event means) and the app tells it what the
engine cannot know: rejections, failures, HTTP. Four rules:

- a metric that cannot be known is absent, not zero: no GPU numbers on a CPU, no prefix queries without a prefix cache
- labels are bounded: a tenant or code beyond the first few counts as "other", so no client can make series
- watching never hurts: an error while counting, or while reading a gauge, is itself counted and costs that number only
- a registry of its own, so that two servers in one process do not mix

Names and meanings follow vLLM's where both have them: docs/monitoring/README.md is the table of all.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

from minillm.events import Event
from minillm.server.errors import ApiError
from minillm.server.failures import KINDS, failure_kind, turned_away
from minillm.server.fold import Fact, Fold, Observed
from minillm.server.gauges import EngineGauges
from minillm.server.histogram import COARSE, SECONDS, STEP_TOKENS, TOKENS, Gaps
from minillm.server.labels import OTHER, Names, length_bucket
from minillm.server.tracing import Traces

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "minillm:"
MAX_TENANTS, MAX_CODES, MAX_ROUTES = 32, 32, 32
REASONS, HOWS = ("stop", "length", "abort", "error"), ("swap", "cached", "recompute")
WARM_UP = (
    "(warm-up)"  # no client can have it: the id of the server's own first generation (lifecycle): nobody waited for it
)
HELD_S = 1.0  # how long a request may wait for the event of its last step


class Metrics:
    """engine: an `Engine`, `LLM` or `AsyncLLM`. ready: whether the server takes requests. traces: whose loss counts."""

    def __init__(
        self, engine: Any, model_name: str = "minillm", ready: Callable[[], bool] | None = None,
        traces: Traces | None = None,
    ):  # fmt: skip
        engine = getattr(engine, "engine", engine)
        self.model_name = model_name
        self.registry = CollectorRegistry()
        self._collectors: list[Any] = []
        self._lock = threading.RLock()  # the fold is fed by the engine's thread and, for refusals, by callers
        self._drawn = 0  # tokens of the event that is being counted
        self._waiting: deque[tuple[str, Callable[[], None]]] = deque()
        self._fold, self._clock = Fold(), engine.events.clock
        self._prefix_cache = getattr(getattr(engine, "cache", None), "prefix", None) is not None
        self._tiers = getattr(getattr(engine, "cache", None), "tiers", None) is not None
        self._tenants, self._codes, self._routes = Names(MAX_TENANTS, "anonymous"), Names(MAX_CODES), Names(MAX_ROUTES)
        self._fields, self._words = Names(MAX_CODES), Names(MAX_CODES)
        self._define()
        self.gauges = EngineGauges(engine, PREFIX, model_name, self._fault, ready, traces)
        self._collectors += [self.gauges, ProcessCollector(registry=None)]
        self._cancel = engine.events.subscribe(self.follow)

    def add(self, collector: Any) -> None:
        """One more collector, of what is beside the engine."""
        self._collectors.append(collector)

    def close(self) -> None:
        """Stop following the engine."""
        self._cancel()

    # Definitions ------------------------------------------------------------------------------------------

    def _define(self) -> None:
        count, time, size = self._counter, self._histogram, self._histogram
        self.queued = count("requests", "Requests that came to the engine's queue")
        self.success = count("request_success", "Requests that ended, by how", "finished_reason", known=REASONS)
        self.refused = count(
            "requests_refused", "Requests that the engine's door refused, by the field at fault", "field"
        )
        self.rejections = count("requests_rejected", "Requests that were turned away, by code", "code", "tenant")
        self.errors = count("request_errors", f"Requests that failed, by kind: {', '.join(KINDS)}", "kind", known=KINDS)
        self.prompt_tokens = count("prompt_tokens", "Prompt tokens of requests that got their first token")
        self.generation_tokens = count("generation_tokens", "Tokens generated")
        self.computed_tokens = count("computed_tokens", "Tokens that steps computed, also again after a preemption")
        self.preemptions = count("num_preemptions", "Requests that gave up their KV for others", "how", known=HOWS)
        self.lost_tokens = count("preempted_tokens", "Tokens whose KV was given up")
        self.kv_reused = count(
            "request_kv_tokens_reused", "Tokens whose KV a step read and the same request had computed (within it)"
        )
        if self._prefix_cache:
            self.prefix_queries = count("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
            self.prefix_hits = count("prefix_cache_hits", "Prompt tokens found there (computed by an earlier request)")
        if self._tiers:
            self.tier_hits = count("external_prefix_cache_hits", "Prompt tokens found in a tier below", "source")
        self.ttft = time("time_to_first_token_seconds", "Arrival to first token")
        self.itl = Gaps(PREFIX + "inter_token_latency_seconds", "Between two tokens of a request.", self.model_name)
        self._collectors.append(self.itl)
        self.tpot = time("request_time_per_output_token_seconds", "(last - first token) / (tokens - 1), a request")
        self.e2e = time("e2e_request_latency_seconds", "Arrival to end")
        self.queue = time("request_queue_time_seconds", "Arrival to begin of its first step, or to its end before one")
        self.prefill = time("request_prefill_time_seconds", "Begin of its first step to first token")
        self.decode = time("request_decode_time_seconds", "First to last token")
        self.inference = time("request_inference_time_seconds", "Begin of its first step to last token")
        self.prompt_length = size("request_prompt_tokens", "Prompt tokens of a request", buckets=TOKENS)
        self.output_length = size("request_generation_tokens", "Tokens generated for a request", buckets=TOKENS)
        self.step_tokens = size("iteration_tokens_total", "Tokens computed in a step", buckets=STEP_TOKENS)
        by_length = ("prompt_length",)
        self.ttft_by_length = time(
            "time_to_first_token_by_length_seconds", "TTFT by length of the prompt", by_length, COARSE
        )
        self.e2e_by_length = time(
            "e2e_request_latency_by_length_seconds", "E2E by length of the prompt", by_length, COARSE
        )
        self.by_tenant = count("tenant_requests", "Requests that ended, by tenant", "tenant", "finished_reason")
        self.tenant_tokens = count("tenant_tokens", "Tokens of ended requests, by tenant", "tenant", "kind")
        self.tenant_ttft = self._keep(
            Summary, "tenant_time_to_first_token_seconds", "TTFT by tenant: sum and count", ("tenant",)
        )
        self.http_requests = count(
            "http_requests", "HTTP requests, by route, method and status", "route", "method", "status"
        )
        self.http_seconds = time(
            "http_request_duration_seconds", "HTTP request to end of its response", labels=("route",), buckets=COARSE
        )
        self.faults = count("metric_faults", "Errors while counting or reading a metric, by where", "where")

    def _keep(self, kind: Any, name: str, text: str, labels: Iterable[str] = (), **options: Any) -> Any:
        metric = kind(PREFIX + name, text + ".", ("model_name", *labels), registry=self.registry, **options)
        self._collectors.append(metric)
        return metric if labels else metric.labels(self.model_name)

    def _counter(self, name: str, text: str, *labels: str, known: Iterable[str] = ()) -> Any:
        """known: values of its label that are there from the start: rate() misses the event that makes a series."""
        counter = self._keep(Counter, name, text, labels)
        for value in known:
            counter.labels(self.model_name, value)
        return counter

    def _histogram(
        self, name: str, text: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = SECONDS
    ) -> Any:
        return self._keep(Histogram, name, text, labels, buckets=buckets)

    # What the engine does ------------------------------------------------------------------------------------

    def follow(self, event: Event) -> None:
        """A subscriber of the event log, in the thread that records. Never raises."""
        if event.request_id != WARM_UP:  # its queued event unseen, the fold knows nothing of it
            self._safely("events", lambda: self._count(self._fold.feed(event)))

    def _count(self, facts: Iterable[Fact]) -> None:
        for fact in facts:
            try:
                getattr(self, "_on_" + fact.kind)(fact, fact.request)
            except Exception as error:  # what else the event says is counted
                self._fault(fact.kind, error)
        drawn, self._drawn = self._drawn, 0
        if drawn:
            self.generation_tokens.inc(drawn)

    def _on_queued(self, fact: Fact, r: Observed) -> None:
        self.queued.inc()

    def _on_refused(self, fact: Fact, r: None) -> None:
        self.refused.labels(self.model_name, self._fields(fact.label)).inc()

    def _on_began(self, fact: Fact, r: Observed) -> None:
        if self._prefix_cache:
            self.prefix_queries.inc(r.prompt_tokens)

    def _on_hit(self, fact: Fact, r: Observed) -> None:
        if fact.label == "prefix":
            if self._prefix_cache:
                self.prefix_hits.inc(fact.value)
        elif self._tiers:
            self.tier_hits.labels(self.model_name, self._words(fact.label)).inc(fact.value)

    def _on_preempted(self, fact: Fact, r: Observed) -> None:
        self.preemptions.labels(self.model_name, self._words(fact.label)).inc()
        self.lost_tokens.inc(fact.value)

    def _on_first_token(self, fact: Fact, r: Observed) -> None:
        self.prompt_tokens.inc(r.prompt_tokens)
        self._drawn += 1
        self.ttft.observe(fact.value)
        self.ttft_by_length.labels(self.model_name, length_bucket(r.prompt_tokens)).observe(fact.value)
        self.tenant_ttft.labels(self.model_name, self._tenants(r.tenant)).observe(fact.value)

    def _on_gap(self, fact: Fact, r: Observed) -> None:
        self._drawn += 1
        self.itl.observe(fact.value)

    def _on_step(self, fact: Fact, r: None) -> None:
        self.step_tokens.observe(fact.value)
        self.computed_tokens.inc(fact.value)

    def _on_reused(self, fact: Fact, r: None) -> None:
        self.kv_reused.inc(fact.value)

    def _on_ended(self, fact: Fact, r: Observed) -> None:
        reason, tenant = r.finish_reason or "unknown", self._tenants(r.tenant)
        self.success.labels(self.model_name, reason).inc()
        self.by_tenant.labels(self.model_name, tenant, reason).inc()
        self.tenant_tokens.labels(self.model_name, tenant, "prompt").inc(r.prompt_tokens)
        self.tenant_tokens.labels(self.model_name, tenant, "generation").inc(r.generation_tokens)
        self.prompt_length.observe(r.prompt_tokens)
        self.output_length.observe(r.generation_tokens)
        for metric, seconds in (
            (self.e2e, r.e2e_s), (self.queue, r.waited_s), (self.prefill, r.prefill_s), (self.decode, r.decode_s),
            (self.inference, r.inference_s), (self.tpot, r.tpot_s),
        ):  # fmt: skip
            if seconds is not None:
                metric.observe(seconds)
        if r.e2e_s is not None:
            self.e2e_by_length.labels(self.model_name, length_bucket(r.prompt_tokens)).observe(r.e2e_s)

    # What the app knows --------------------------------------------------------------------------------------

    def rejected(self, code: str | None, tenant: str = "") -> None:
        """A request was turned away: 429, or 503 while it drains."""
        self._safely("rejected", lambda: self.rejections.labels(
            self.model_name, self._codes(code), self._tenants(tenant)
        ).inc())  # fmt: skip

    def failed(self, error: BaseException | str, tenant: str = "") -> None:
        """A request ended in an error: the exception, its kind, or its code (see `failures.failure_kind`).

        Who was only turned away (`failures.turned_away`) is counted as `rejected`.
        """
        if isinstance(error, ApiError) and turned_away(error):
            self.rejected(error.code, tenant)
        else:
            self._safely("failed", lambda: self.errors.labels(self.model_name, failure_kind(error)).inc())

    def http(self, route: str | None, method: str, status: int, seconds: float | None = None) -> None:
        """An HTTP request was answered. route: the template ("/v1/models"), never the path that a client sent; None
        for what has no route."""

        def count() -> None:
            where = self._routes(route)
            verb = method if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH") else OTHER
            code = str(status) if 100 <= status < 600 else OTHER
            self.http_requests.labels(self.model_name, where, verb, code).inc()
            if seconds is not None:
                self.http_seconds.labels(self.model_name, where).observe(seconds)

        self._safely("http", count)

    def _safely(self, where: str, count: Callable[[], None]) -> None:
        """Count, whatever happens. One at a time, also within a thread: the collector of garbage may close a generator
        in the middle of a count, whose request then ends, and a metric's own lock cannot be taken twice."""
        with self._lock:
            self._waiting.append((where, count))
            if len(self._waiting) > 1:  # whoever is counting further up takes it next
                return
            while self._waiting:
                where, count = self._waiting[0]
                try:
                    count()
                except Exception as error:
                    self._fault(where, error)
                self._waiting.popleft()

    def _fault(self, where: str, error: BaseException) -> None:
        with contextlib.suppress(Exception):  # nothing is left that could tell
            self.faults.labels(self.model_name, where).inc()

    # A scrape -----------------------------------------------------------------------------------------------

    def render(self) -> bytes:
        """The text of /metrics (CONTENT_TYPE). A metric that cannot be read is left out, and counted as a fault."""
        self._safely("events", lambda: self._count(self._fold.flush(before=self._clock() - HELD_S)))
        out = []
        for collector in [*self._collectors]:
            try:
                for family in collector.collect():
                    out.append(generate_latest(_One(family)))
            except Exception as error:
                self._fault("scrape", error)
        return b"".join(out)


class _One:
    """A registry of one family, without the "_created" series: they double a histogram and nobody reads them."""

    def __init__(self, family: Metric):
        family.samples = [s for s in family.samples if not s.name.endswith("_created")]
        self.family = family

    def collect(self) -> Iterator[Metric]:
        yield self.family
