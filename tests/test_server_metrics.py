"""/metrics: the numbers are the client's, labels are bounded, what is unknown is absent, watching never hurts."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer as Backend
from tokenizers import models

from minillm import AsyncLLM, MinillmError, SamplingParams
from minillm.errors import RequestError
from minillm.events import EventLog
from minillm.server import metrics as module
from minillm.server.errors import ApiError
from minillm.server.failures import KINDS, failure_kind
from minillm.server.labels import Names, length_bucket
from minillm.server.metrics import MAX_TENANTS, Metrics

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SMALL = {"num_kv_blocks": 12, "max_model_len": 64, "dtype": "float32"}
PROMPTS = [[5, 6], [7] * 20, [8], [9] * 33, [10, 11, 12]]

# What vLLM's own dashboards read, and this engine knows.
VLLM = {
    "num_requests_running": "gauge", "num_requests_waiting": "gauge", "kv_cache_usage_perc": "gauge",
    "prefix_cache_queries": "counter", "prefix_cache_hits": "counter", "num_preemptions": "counter",
    "prompt_tokens": "counter", "generation_tokens": "counter", "request_success": "counter",
    "time_to_first_token_seconds": "histogram", "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram", "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram", "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram", "request_inference_time_seconds": "histogram",
    "request_prompt_tokens": "histogram", "request_generation_tokens": "histogram",
    "iteration_tokens_total": "histogram", "external_prefix_cache_hits": "counter",
}  # fmt: skip


def read(metrics):
    """{(sample name without prefix, sorted labels but the model's): value}; the text parses and says nothing twice."""
    out = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for s in family.samples:
            labels = {k: v for k, v in s.labels.items() if k != "model_name"}
            key = (s.name.removeprefix("minillm:"), tuple(sorted(labels.items())))
            assert key not in out, key
            out[key] = s.value
    return out


def total(samples, name, **labels):
    found = [v for (n, have), v in samples.items() if n == name and labels.items() <= dict(have).items()]
    assert found, f"no series {name}{labels or ''}"
    return sum(found)


def names(samples):
    return {n for n, _ in samples}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def fake(prefix=True, tiers=True):
    """As much of an engine as metrics read. Its events are ours to write."""
    cache = SimpleNamespace(
        prefix=SimpleNamespace(stats=SimpleNamespace(evicted=3)) if prefix else None, tiers=object() if tiers else None,
        num_live=6, num_free=1, num_cached=5, pool=SimpleNamespace(num_blocks=12),
    )  # fmt: skip
    core = SimpleNamespace(scheduler=SimpleNamespace(running=[1, 2], num_waiting=4), outputs={})
    model = SimpleNamespace(device=torch.device("cpu"))
    return SimpleNamespace(events=EventLog(clock=Clock()), cache=cache, core=core, model=model)


def serve(engine, name, *, at=0.0, prompt=8, wait=0.5, ttft=1.0, gaps=(), tenant="", reason="length", hit=0):
    """Write the events of one request that is alone."""
    log, clock = engine.events, engine.events.clock
    clock.now = at
    log.record("queued", name, prompt_tokens=prompt, tenant=tenant, arrival=at)
    if hit:
        log.record("hit", name, tokens=hit, source="prefix")
    clock.now = at + ttft
    log.record("first_token", name)
    log.record("step", rows=[(name, prompt - hit, hit)], seconds=ttft - wait)
    log.step += 1
    for i, gap in enumerate(gaps):
        clock.now += gap
        if i == len(gaps) - 1:
            log.record("finished", name, reason=reason, output_tokens=len(gaps) + 1)
        log.record("step", rows=[(name, 1, prompt + i)], seconds=gap)
        log.step += 1
    if not gaps:
        log.record("finished", name, reason=reason, output_tokens=1)


def test_a_request_in_numbers():
    engine = fake()
    m = Metrics(engine, "small")
    serve(engine, "a", prompt=8, wait=0.5, ttft=2.0, gaps=(0.25, 0.75), tenant="ann", hit=4)
    s = read(m)
    for name, value in {
        "requests_total": 1, "prompt_tokens_total": 8, "generation_tokens_total": 3, "computed_tokens_total": 6,
        "prefix_cache_queries_total": 8, "prefix_cache_hits_total": 4, "request_kv_tokens_reused_total": 4 + 5,
        "time_to_first_token_seconds_sum": 2.0, "request_queue_time_seconds_sum": 0.5,
        "request_prefill_time_seconds_sum": 1.5, "request_decode_time_seconds_sum": 1.0,
        "request_inference_time_seconds_sum": 2.5, "e2e_request_latency_seconds_sum": 3.0,
        "inter_token_latency_seconds_sum": 1.0, "inter_token_latency_seconds_count": 2,
        "request_time_per_output_token_seconds_sum": 0.5, "request_prompt_tokens_sum": 8,
        "request_generation_tokens_sum": 3, "iteration_tokens_total_count": 3, "iteration_tokens_total_sum": 6,
        "num_requests_running": 2, "num_requests_waiting": 4, "kv_cache_usage_perc": 0.5,
        "prefix_cache_evicted_blocks_total": 3,
    }.items():  # fmt: skip
        assert total(s, name) == value, name
    assert total(s, "request_success_total", finished_reason="length") == 1
    assert total(s, "tenant_requests_total", tenant="ann") == 1
    assert total(s, "tenant_tokens_total", tenant="ann", kind="generation") == 3
    assert total(s, "tenant_time_to_first_token_seconds_sum", tenant="ann") == 2.0
    assert total(s, "time_to_first_token_by_length_seconds_sum", prompt_length="le_128") == 2.0
    assert total(s, "kv_cache_blocks", state="cached") == 5
    assert not [n for n in names(s) if n.endswith("_created")]
    m.close()
    serve(engine, "b")
    assert total(read(m), "requests_total") == 1, "it goes on after close"


def test_names_and_types_are_vllms():
    engine = fake()
    engine.core.scheduler.preempted = 0
    m = Metrics(engine, "small")
    m.preemptions.labels("small", "swap").inc()
    m.tier_hits.labels("small", "host").inc()
    serve(engine, "a", gaps=(1.0,))
    have = {
        f.name: f.type for f in text_string_to_metric_families(m.render().decode()) if f.name.startswith("minillm:")
    }
    for name, kind in VLLM.items():
        assert have.get(f"minillm:{name}") == kind, name
    assert all('model_name="small"' in line for line in m.render().decode().splitlines() if line.startswith("minillm:"))


@pytest.mark.parametrize(
    ("tokens", "label"), [(1, "le_128"), (128, "le_128"), (129, "le_512"), (32768, "le_32768"), (32769, "gt_32768")]
)
def test_length_buckets(tokens, label):
    assert length_bucket(tokens) == label


def test_the_worst_length_is_visible():
    """C4: a mean over all hides that long prompts wait ten times as long."""
    engine = fake()
    m = Metrics(engine)
    for i in range(9):
        serve(engine, f"s{i}", prompt=10, ttft=0.6)
    serve(engine, "long", prompt=9000, ttft=6.0)
    s = read(m)
    mean = lambda **labels: (
        total(s, "time_to_first_token_by_length_seconds_sum", **labels)
        / total(s, "time_to_first_token_by_length_seconds_count", **labels)
    )
    assert mean() < 1.2
    assert mean(prompt_length="le_32768") == 6.0
    assert mean(prompt_length="le_128") == pytest.approx(0.6)


# Labels that strangers choose -------------------------------------------------------------------------------


def test_a_thousand_tenants_make_a_bounded_number_of_series():
    engine = fake()
    m = Metrics(engine)
    for i in range(MAX_TENANTS):
        serve(engine, str(i), tenant=f"t{i}", gaps=(1.0,))
        m.rejected(f"code{i}", f"t{i}")
        m.http(f"/r{i}", "POST", 200, 0.1)
    before = len(read(m))
    for i in range(1000):
        serve(engine, f"x{i}", tenant=f"evil{i}", gaps=(1.0,))
        m.rejected(f"evil{i}", f"evil{i}")
        m.http(f"/evil{i}", f"VERB{i}", 9000 + i, 0.1)
    s = read(m)
    assert len(s) < before + 200
    assert total(s, "tenant_requests_total", tenant="other") == 1000
    assert total(s, "tenant_requests_total") == 1000 + MAX_TENANTS
    assert total(s, "requests_rejected_total") == 1000 + MAX_TENANTS
    assert total(s, "http_requests_total", route="other", status="other", method="other") == 1000


def test_the_bound_is_what_holds_it(monkeypatch):
    """The mutation: without it each name has its own series."""
    monkeypatch.setattr(module, "MAX_TENANTS", 10**9)
    engine = fake()
    m = Metrics(engine)
    for i in range(1000):
        m.rejected("full", f"evil{i}")
    assert len(read(m)) > 1000


def test_hostile_names_stay_inside_their_quotes():
    engine = fake()
    m = Metrics(engine)
    for name in ('a"b', "a\nb", "a\\b", "\ud800", "\x00", "x" * 10_000, 'q"} 1\nminillm:requests_total 99'):
        m.rejected("full", name)
    s = read(m)
    assert total(s, "requests_rejected_total") == 7
    assert max(len(dict(k[1]).get("tenant", "")) for k in s) <= 64


def test_names_keep_the_first():
    label = Names(2, "nobody")
    assert [label(x) for x in ("a", None, "", "b", "a", "c")] == ["a", "nobody", "nobody", "other", "a", "other"]


# Absent, not zero ----------------------------------------------------------------------------------------------


def test_what_cannot_be_known_is_absent():
    s = read(Metrics(fake(prefix=False, tiers=False)))
    absent = {n for n in names(s) if "prefix_cache" in n or n.startswith("gpu") or n == "ready"}
    assert absent == set()
    s = read(Metrics(fake(), ready=lambda: False))
    assert total(s, "ready") == 0
    assert total(s, "prefix_cache_hits_total") == 0, "it is there: nothing has hit yet"
    for name, label, values in (
        ("request_errors_total", "kind", KINDS), ("num_preemptions_total", "how", ("swap", "cached", "recompute")),
        ("request_success_total", "finished_reason", ("stop", "length", "abort", "error")),
    ):  # fmt: skip
        assert [total(s, name, **{label: v}) for v in values] == [0] * len(values), "else rate() misses the first"


def test_a_gpus_numbers_come_from_the_driver(monkeypatch):
    engine = fake()
    engine.model.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 87)
    s = read(Metrics(engine))
    assert total(s, "gpu_memory_bytes", state="used") == 70
    assert total(s, "gpu_utilization_perc") == 0.87

    def no_binding(device):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", no_binding)
    s = read(m := Metrics(engine))
    assert "gpu_utilization_perc" not in names(s)
    assert total(s, "gpu_memory_bytes", state="free") == 30
    assert "metric_faults_total" not in names(read(m)), "not knowing is no fault"


# Watching never hurts -------------------------------------------------------------------------------------------


def test_a_gauge_that_fails_costs_itself_alone():
    engine = fake()
    del engine.core.scheduler.num_waiting  # a learner's scheduler
    engine.cache.num_cached = "many"
    m = Metrics(engine, ready=lambda: 1 / 0)
    s = read(m)
    assert total(s, "num_requests_running") == 2
    assert not {"num_requests_waiting", "kv_cache_blocks", "ready"} & names(s)
    s = read(m)  # the faults of one scrape are seen in the next
    assert {where: total(s, "metric_faults_total", where=where) for where in ("num_requests_waiting", "ready")} == {
        "num_requests_waiting": 1, "ready": 1,
    }  # fmt: skip


def test_a_metric_that_fails_costs_itself_alone(monkeypatch):
    engine = fake()
    m = Metrics(engine)

    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(m.itl, "observe", broken)
    serve(engine, "a", gaps=(1.0, 1.0))
    assert not engine.events.faults, "the engine's log never hears of it"
    s = read(m)
    assert total(s, "metric_faults_total", where="gap") == 2
    assert total(s, "request_success_total") == 1, "what else the same event says is counted"
    assert total(s, "iteration_tokens_total_count") == 3
    monkeypatch.setattr(m.gauges, "collect", broken)
    s = read(m)
    assert total(s, "requests_total") == 1
    s = read(m)
    assert total(s, "metric_faults_total", where="scrape") >= 1
    m.rejections = m.errors = m.http_requests = None
    m.rejected("full")
    m.failed("engine")
    m.http("/", "GET", 200)
    s = read(m)
    assert [total(s, "metric_faults_total", where=w) for w in ("rejected", "failed", "http")] == [1, 1, 1]
    m.faults = None
    m.failed("engine")
    assert m.render()


def test_an_event_in_the_middle_of_a_count_comes_after_it(monkeypatch):
    """Garbage collection may close a generator anywhere; its request ends there, in the same thread. A metric's lock is
    not to be taken twice: without the order, this would wait for itself for ever."""
    engine = fake()
    m = Metrics(engine)
    observe, lock, order = m.itl.observe, threading.Lock(), []

    def collected(seconds):
        assert lock.acquire(blocking=False), "a metric was entered twice"
        if not order:
            order.append("once")
            serve(engine, "other", gaps=(1.0,))
        observe(seconds)
        lock.release()

    monkeypatch.setattr(m.itl, "observe", collected)
    serve(engine, "a", gaps=(1.0, 1.0))
    s = read(m)
    assert "metric_faults_total" not in names(s)
    assert total(s, "inter_token_latency_seconds_count") == 3
    assert total(s, "request_success_total") == 2


def test_that_order_is_what_prevents_it(monkeypatch):
    """The mutation: counting at once what comes in the middle."""

    def at_once(self, where, count):
        with self._lock:
            try:
                count()
            except Exception as error:
                self._fault(where, error)

    monkeypatch.setattr(Metrics, "_safely", at_once)
    with pytest.raises(AssertionError):
        test_an_event_in_the_middle_of_a_count_comes_after_it(monkeypatch)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.floats(0, 2000), st.sampled_from(module.SECONDS)), max_size=50))
def test_the_quick_histogram_is_the_librarys(values):
    registry = CollectorRegistry()
    library = Histogram("h", "text", ("model_name",), registry=registry, buckets=module.SECONDS)
    quick = module.Gaps("h", "text", "small")
    for v in values:
        library.labels("small").observe(v)
        quick.observe(v)
    library.labels("small")
    want = {
        (s.name, *s.labels.values()): s.value for f in library.collect() for s in f.samples if "created" not in s.name
    }
    have = {(s.name, *s.labels.values()): s.value for f in quick.collect() for s in f.samples}
    assert {tuple(sorted(map(str, k))): v for k, v in have.items()} == pytest.approx(
        {tuple(sorted(map(str, k))): v for k, v in want.items()}
    )


def test_two_servers_in_one_process_do_not_mix():
    one, two = fake(), fake()
    a, b = Metrics(one, "a"), Metrics(two, "b")
    serve(one, "x")
    assert total(read(a), "requests_total") == 1
    assert total(read(b), "requests_total") == 0


def test_many_threads_count_exactly():
    engine = fake()
    m = Metrics(engine)

    def work(i):
        for k in range(200):
            m.rejected("full", f"t{i}")
            m.failed(KINDS[k % len(KINDS)])
            m.http("/v1/models", "GET", 200, 0.01)
            engine.events.record("refused", "", field="prompt")
            if k % 50 == 0:
                m.render()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    serve(engine, "a", gaps=(1.0,) * 100)
    for t in threads:
        t.join()
    s = read(m)
    names = ("requests_rejected_total", "request_errors_total", "http_requests_total", "requests_refused_total")
    assert [total(s, n) for n in names] == [800] * 4
    assert total(s, "generation_tokens_total") == 101
    assert "metric_faults_total" not in {n for n, _ in s}


def test_memory_is_bounded_by_who_is_under_way():
    engine = fake()
    m = Metrics(engine)
    serve(engine, "0", gaps=(1.0,))
    size = len(read(m))
    for i in range(500):
        serve(engine, str(i), gaps=(1.0,))
        engine.events.record("queued", f"q{i}", prompt_tokens=3)
        engine.events.record("finished", f"q{i}", reason=("abort", "error")[i % 2], output_tokens=0)
    engine.events.clock.now += 2.0
    s = read(m)
    assert not m._fold.under_way
    assert not m._fold._leaving
    assert total(s, "request_success_total", finished_reason="error") == 250, "nobody waits for a step that never came"
    assert len(s) < size + 10


# Failures ------------------------------------------------------------------------------------------------------


def chained(outer, cause):
    try:
        raise outer from cause
    except type(outer) as error:
        return error


FAILURES = [
    (TimeoutError(), "timeout"),
    (ApiError(504, "late", code="deadline_exceeded"), "timeout"),
    (ApiError(408, "slow sender"), "timeout"),
    ("deadline_exceeded", "timeout"),
    ("504", "timeout"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "out_of_memory"),
    (MemoryError(), "out_of_memory"),
    (chained(MinillmError("a step failed"), torch.OutOfMemoryError("no")), "out_of_memory"),
    (MinillmError("its 90 tokens need 6 blocks of KV cache, and it may have 4, even alone"), "out_of_memory"),
    (MinillmError("3 requests may need 9 blocks of KV cache, 2 of 8 are free"), "out_of_memory"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't"), "out_of_memory"),
    (Exception("OutOfMemoryError: CUDA out of memory. Tried to"), "out_of_memory"),  # as a step's failure is told
    # What a client wrote is in the text of an error about it:
    (ApiError(400, "out of memory: this field is not known", param="out of memory"), "format"),
    (ApiError(404, "model: this server serves 'a', not 'blocks of KV cache'"), "format"),
    (RequestError("stop", "CUDA out of memory"), "format"),
    (RequestError("max_tokens", "this request may need 9 blocks of KV cache, and there are 8"), "format"),
    (ValueError("the template failed at 'CUDA out of memory'"), "engine"),
    (ApiError(503, "ends", code="shutting_down"), "shutdown"),
    ("shutting_down", "shutdown"),
    (ApiError(400, "no tools", param="tools"), "tool"),
    (ApiError(400, "no tools", param="tools[0].function"), "tool"),
    (RequestError("tool_choice", "no"), "tool"),
    (RequestError("top_p", "too large"), "format"),
    (ApiError(413, "too large"), "format"),
    ("unsupported_field", "format"),
    ("400", "format"),
    (ApiError(401, "who"), "auth"),
    ("invalid_api_key", "auth"),
    (asyncio.CancelledError(), "client_gone"),
    (ConnectionResetError(), "client_gone"),
    ("client_gone", "client_gone"),
    (RuntimeError("the device is gone"), "engine"),
    (chained(ApiError(500, "failed"), ValueError("boom")), "engine"),
    (ApiError(503, "dead", code="engine_dead"), "engine"),
    ("500", "engine"),
]


@pytest.mark.parametrize(("error", "kind"), FAILURES, ids=lambda x: str(x)[:40])
def test_each_failure_is_counted_by_its_kind(error, kind):
    m = Metrics(fake())
    before = {k: total(read(m), "request_errors_total", kind=k) for k in KINDS}
    assert set(before.values()) == {0}, "all kinds are there from the start: a rate needs a zero to rise from"
    m.failed(error)
    assert failure_kind(error) == kind
    assert {k: total(read(m), "request_errors_total", kind=k) for k in KINDS} == before | {kind: 1}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ApiError(429, "full", code="queue_full"), "queue_full"),
        (ApiError(503, "elsewhere", code="draining"), "draining"),
        (ApiError(503, "elsewhere", code="too_many_connections"), "too_many_connections"),
        (ApiError(503, "dead", code="engine_dead"), None),
        (ApiError(503, "ends", code="shutting_down"), None),
        (ApiError(500, "failed"), None),
        (ApiError(400, "wrong", code="draining"), None),
    ],
    ids=str,
)
def test_who_is_turned_away_has_not_failed(error, code):
    m = Metrics(fake())
    m.failed(error, "ann")
    if code is None:
        assert "requests_rejected_total{" not in m.render().decode()
    else:
        assert total(read(m), "requests_rejected_total", code=code, tenant="ann") == 1
    assert sum(total(read(m), "request_errors_total", kind=k) for k in KINDS) == (code is None)


def test_every_kind_is_tried():
    assert {kind for _, kind in FAILURES} == set(KINDS)


# A real engine ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    """A random Qwen3 of 211 words."""
    folder = tmp_path_factory.mktemp("metrics") / "model"
    shutil.copytree(tiny_folder("qwen3"), folder)
    Backend(models.WordLevel({f"w{i}": i for i in range(211)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def run(llm, prompts, leave=()):
    """Outputs of all prompts, which the engine gets at once; those whose index is in `leave` are left after 3 tokens.

    A stream may be four tokens ahead, so none is over by then, however late its reader comes.
    """
    together, llm.max_buffered = threading.Event(), 4

    async def until(true, what):
        end = time.monotonic() + 60  # of a machine that is busy with other things
        while not true():
            assert time.monotonic() < end, f"it never happened: {what}"
            await asyncio.sleep(0.002)

    async def one(i, prompt):
        out = None
        async for out in llm.generate(prompt, GREEDY, tenant=f"t{i % 2}"):
            if i in leave and len(out.outputs[0].token_ids) >= 3:
                break
        return out

    async def main():
        llm.call(lambda: together.wait(60))
        works = [asyncio.create_task(one(i, p)) for i, p in enumerate(prompts)]
        await until(lambda: llm._commands.qsize() == len(prompts), "the engine has them all")
        together.set()
        outputs = await asyncio.gather(*works)
        await until(lambda: not llm.core.outputs and llm._commands.empty(), "the engine has heard of all ends")
        heard = threading.Event()
        llm.call(heard.set)
        await until(heard.is_set, "what it did before is done")
        return outputs

    return asyncio.run(asyncio.wait_for(main(), 600))


def test_the_clients_numbers_are_the_servers(folder):
    """C1, C2: counts exactly; sums of times by what a client reads off its own outputs, within a step each."""
    llm = AsyncLLM(folder, **SMALL, enable_prefix_caching=True)
    try:
        m = Metrics(llm, "tiny")
        outputs = run(llm, PROMPTS)
        s = read(m)
        n, tokens = len(PROMPTS), sum(len(o.outputs[0].token_ids) for o in outputs)
        assert total(s, "requests_total") == total(s, "request_success_total", finished_reason="length") == n
        assert total(s, "prompt_tokens_total") == sum(map(len, PROMPTS))
        assert total(s, "generation_tokens_total") == tokens == 12 * n
        assert total(s, "inter_token_latency_seconds_count") == tokens - n
        steps = [e.data["seconds"] for e in llm.engine.events.of("step")]
        for name, mine in {
            "time_to_first_token_seconds": [o.metrics["time_to_first_token"] for o in outputs],
            "e2e_request_latency_seconds": [o.metrics["e2e_latency"] for o in outputs],
            "request_queue_time_seconds": [o.metrics["scheduled"] - o.metrics["arrival"] for o in outputs],
        }.items():
            assert total(s, f"{name}_count") == n
            assert abs(total(s, f"{name}_sum") - sum(mine)) <= n * max(steps), name
        assert [total(s, "tenant_requests_total", tenant=t) for t in ("t0", "t1")] == [3, 2]
        assert total(s, "num_requests_running") == total(s, "num_requests_waiting") == 0

        again = run(llm, [[210], PROMPTS[3]])[1]  # as the same tenant
        found = again.num_cached_tokens
        assert found, "the prompt was not found again: nothing is tested"
        after = read(m)
        assert total(after, "prefix_cache_hits_total") - total(s, "prefix_cache_hits_total") == found
        assert total(after, "prefix_cache_queries_total") - total(s, "prefix_cache_queries_total") == 34
        # B6: what it read of its own KV does not depend on where the prompt's came from.
        own = total(after, "request_kv_tokens_reused_total") - total(s, "request_kv_tokens_reused_total")
        assert own == sum(33 + i - found for i in range(11)) + sum(1 + i for i in range(11))

        run(llm, PROMPTS, leave=(1, 3))
        end = read(m)
        assert total(end, "request_success_total", finished_reason="abort") == 2
        assert total(end, "requests_total") == total(end, "request_success_total") == 2 * n + 2
        assert not llm.engine.events.faults
        assert "metric_faults_total" not in names(end)
    finally:
        llm.shutdown()


def test_metrics_that_raise_change_nothing_that_is_generated(folder, monkeypatch):
    llm = AsyncLLM(folder, **SMALL)
    try:
        want = [o.outputs[0].token_ids for o in run(llm, PROMPTS)]
        m = Metrics(llm, "tiny")

        def broken(_):
            raise RuntimeError("broken")

        monkeypatch.setattr(m._fold, "feed", broken)
        llm.engine.events.subscribe(broken)  # and one without a guard of its own
        assert [o.outputs[0].token_ids for o in run(llm, PROMPTS)] == want
        assert llm.dead is None
        s = read(m)
        assert total(s, "metric_faults_total", where="events") > 20
        assert total(s, "event_faults_total", type="RuntimeError") > 20
    finally:
        llm.shutdown()


def test_preemptions_are_those_of_the_requests(folder):
    llm = AsyncLLM(folder, **(SMALL | {"num_kv_blocks": 5}))
    try:
        m = Metrics(llm, "tiny")
        run(llm, [[7] * 14, [8] * 14, [9] * 14])
        events = llm.engine.events.of("preempted")
        assert events, "nobody was preempted: nothing is tested"
        s = read(m)
        assert total(s, "num_preemptions_total") == len(events)
        assert total(s, "preempted_tokens_total") == sum(e.data["computed"] for e in events)
    finally:
        llm.shutdown()


def test_no_text_of_a_prompt_is_in_the_exposition(folder):
    llm = AsyncLLM(folder, **SMALL)
    try:
        m = Metrics(llm, "tiny")
        run(llm, ["w101 w102 w103"])
        m.failed(RequestError("prompt", "w101 is no prompt"))
        m.failed("w101")
        text = m.render().decode()
        assert "w101" not in text
        assert "minillm:requests_total" in text
    finally:
        llm.shutdown()
