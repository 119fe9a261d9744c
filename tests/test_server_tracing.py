"""One id, no gap, nothing that the user wrote; and a disk that fails, fills up or hangs is nobody's problem."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace as api
from tokenizers import Tokenizer as Backend
from tokenizers import models

from minillm import AsyncLLM, MinillmError, SamplingParams
from minillm.server import otel, tracing
from minillm.server.otel import OpenTelemetry, make_exporter
from minillm.server.trace_file import read_traces
from minillm.server.tracing import STAGES, RequestTrace, Traces

CANARY = "canary-7f3a19"


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def traced(*stages, clock=None, rid="req-1", took=0.25):
    clock = clock or Clock()
    trace = RequestTrace(rid, "/v1/chat/completions", "ann", clock=clock)
    for stage in stages:
        clock.now += took
        trace.mark(stage)
    return trace


# Spans ----------------------------------------------------------------------------------------------------------


def test_a_trace_in_numbers():
    trace = traced(*STAGES)
    assert trace.spans() == [(s, i * 250_000_000, (i + 1) * 250_000_000) for i, s in enumerate(STAGES)]
    assert trace.seconds == 2.0
    trace.status, trace.user, trace.key = 200, "u-1", "Bearer sk-1"
    trace.note(stream=True, prompt_tokens=7, cached_tokens=4, output_tokens=9, finish_reason="stop")
    line = Traces(salt=b"s").line(trace)
    assert {k: line[k] for k in ("id", "route", "tenant", "status", "error", "e2e_ns", "stream", "prompt_tokens")} == {
        "id": "req-1", "route": "/v1/chat/completions", "tenant": "ann", "status": 200, "error": None,
        "e2e_ns": 2_000_000_000, "stream": True, "prompt_tokens": 7,
    }  # fmt: skip
    assert line["start"] == 100.0
    assert abs(line["time"] - time.time()) < 60


def whole(trace):
    """No gap, no overlap, and the sum is the end: exactly."""
    spans, line = trace.spans(), Traces().line(trace)
    assert spans[0][1] == 0
    assert all(a[2] == b[1] for a, b in itertools.pairwise(spans))
    assert all(begin <= end for _, begin, end in spans)
    assert sum(end - begin for _, begin, end in spans) == line["e2e_ns"]
    assert abs(line["e2e_ns"] / 1e9 - trace.seconds) < 1e-8


MARKS = st.lists(st.tuples(st.sampled_from(STAGES), st.one_of(st.none(), st.floats(0, 1e6))), min_size=1, max_size=20)


@settings(max_examples=200, deadline=None)
@given(MARKS, st.floats(0, 1e9))
def test_spans_sum_to_the_whole_whatever_is_marked_when(marks, start):
    clock = Clock()
    clock.now = start
    trace = RequestTrace("a", "/", clock=clock)
    for stage, at in marks:  # also times that lie before the start: stamps of another thread
        clock.now += 0.1
        trace.mark(stage, at)
    whole(trace)


def test_rounding_each_span_alone_would_not_sum(monkeypatch):
    """The mutation: durations rounded one by one, as a first version might, miss the end."""

    def alone(trace):
        out, before, at = [], trace.start, 0
        for stage, end in trace.marks:
            took = round((end - before) * 1e9)
            out.append((stage, at, at + took))
            before, at = end, at + took
        return out

    monkeypatch.setattr(RequestTrace, "spans", alone)
    trace = traced(*STAGES, took=1.0000000004 / 3)
    honest = round((trace.end - trace.start) * 1e9)
    assert alone(trace)[-1][2] != honest


def test_a_stage_that_is_none_is_refused():
    with pytest.raises(MinillmError, match="'thinking' is no stage"):
        traced("thinking")
    with pytest.raises(MinillmError, match="no field 'prompt'"):
        traced("auth").note(prompt="hello")


def test_a_stage_twice_in_a_row_is_one_span_and_later_another():
    assert [s for s, *_ in traced("admit", "admit", "preprocess", "admit").spans()] == ["admit", "preprocess", "admit"]


@pytest.mark.parametrize(
    ("times", "spans"),
    [
        ([], [("queue", 9.0)]),  # gone before anything came out
        ([{"arrival": 1.0, "finished": 3.0}], [("queue", 3.0)]),  # its deadline passed in the queue
        ([{"scheduled": 2.0}], [("queue", 2.0), ("prefill", 9.0)]),
        ([{"scheduled": 2.0, "finished": 4.0}], [("queue", 2.0), ("prefill", 4.0)]),  # no distribution to draw from
        (
            [{"scheduled": 2.0, "first_token": 3.0, "last_token": 5.0}],
            [("queue", 2.0), ("prefill", 3.0), ("decode", 9.0)],
        ),
        (
            [{"scheduled": 2.0, "first_token": 3.0, "last_token": 5.0, "finished": 5.5}],
            [("queue", 2.0), ("prefill", 3.0), ("decode", 5.0)],
        ),
        (  # two prompts: the first to begin, the first token of any, the last of all
            [
                {"scheduled": 4.0, "first_token": 5.0, "last_token": 8.0, "finished": 8.1},
                {"scheduled": 2.0, "first_token": 3.0, "last_token": 6.0, "finished": 6.1},
            ],
            [("queue", 2.0), ("prefill", 3.0), ("decode", 8.0)],
        ),
        ([{"scheduled": 2.0, "first_token": 3.0, "last_token": 5.0, "finished": 5.1}, {}], [
            ("queue", 2.0), ("prefill", 3.0), ("decode", 9.0)]),  # one of two is still under way
    ],
)  # fmt: skip
def test_the_engines_stamps(times, spans):
    clock = Clock()
    clock.now = 0.0
    trace = RequestTrace("a", "/", clock=clock)
    clock.now = 9.0
    trace.engine(times)
    assert trace.marks == spans
    whole(trace)


# Nothing that the user wrote --------------------------------------------------------------------------------------


def leaky():
    """A client that writes the canary wherever a client can write."""
    trace = traced(*STAGES)
    trace.request_id = f"my id is {CANARY}"
    trace.tenant, trace.user, trace.key = f"{CANARY} & sons", CANARY, f"Bearer {CANARY}"
    trace.error, trace.traceparent = f"model {CANARY} not found", CANARY
    trace.note(model=f"the {CANARY} model", finish_reason=f"{CANARY}\n", prompt_tokens=CANARY, stream=CANARY)
    return trace


def recorded(tmp_path, trace, **options):
    traces = Traces(tmp_path / "t.jsonl", **options)
    traces.record(trace)
    traces.close(60)
    assert (traces.written, traces.lost) == (1, 0)
    return (tmp_path / "t.jsonl").read_text()


def test_a_canary_is_nowhere_in_the_file(tmp_path):
    text = recorded(tmp_path, leaky())
    assert CANARY not in text
    assert json.loads(text)["e2e_ns"] == 2_000_000_000


def test_the_canary_would_be_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(Traces, "hash", lambda self, text: text)
    assert CANARY in recorded(tmp_path, leaky())


def test_hashes_are_salted():
    salt = b"a salt that no clock and no hash spells"
    one, same, other, unsaid = Traces(salt=salt), Traces(salt=salt), Traces(salt=b"another one"), Traces()
    assert one.hash("u") == same.hash("u") != one.hash("v")
    assert len({one.hash("u"), other.hash("u"), unsaid.hash("u"), Traces().hash("u")}) == 4
    assert len(one.hash("\ud800")) == 32
    assert one._salt.hex() not in json.dumps(one.line(leaky()))


# Files that fail ---------------------------------------------------------------------------------------------------


def test_lines_are_appended_and_only_their_owner_reads_them(tmp_path):
    for i in range(2):
        traces = Traces(tmp_path / "t.jsonl")
        for k in range(3):
            traces.record(traced(*STAGES, rid=f"{i}-{k}"))
        traces.close(60)
        traces.close(60)
    assert [r["id"] for r in read_traces(tmp_path / "t.jsonl")] == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]
    assert stat.S_IMODE(os.stat(tmp_path / "t.jsonl").st_mode) == 0o600


def test_a_file_that_cannot_be_opened_is_said_at_once(tmp_path):
    with pytest.raises(MinillmError, match=r"cannot be written to .*nowhere.*No such file"):
        Traces(tmp_path / "nowhere" / "t.jsonl")
    with pytest.raises(MinillmError, match="Is a directory"):
        Traces(tmp_path)


def test_the_file_is_bounded(tmp_path):
    path = tmp_path / "t.jsonl"
    traces = Traces(path, max_bytes=2000)
    for i in range(100):
        traces.record(traced(*STAGES, rid=str(i)))
    traces.close(60)
    assert (traces.written, traces.lost) == (100, 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.jsonl", "t.jsonl.1"]
    assert max(p.stat().st_size for p in tmp_path.iterdir()) <= 2000
    ids = [r["id"] for p in ("t.jsonl.1", "t.jsonl") for r in read_traces(tmp_path / p)]
    assert ids == [str(i) for i in range(100 - len(ids), 100)], "the last ones, in order"


def test_a_full_disk_costs_records_and_nothing_else():
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full to be a full disk")
    traces = Traces("/dev/full")
    for _ in range(10):
        traces.record(traced(*STAGES))
    assert traces.flush(60)
    assert (traces.written, traces.lost) == (0, 10)
    traces.close(60)


def test_after_a_full_disk_lines_are_whole_again(tmp_path, monkeypatch):
    """A write that fails in its middle leaves half a line; what follows begins on a line of its own."""
    traces = Traces(tmp_path / "t.jsonl")
    full = [False]

    class Half:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, text):
            if full[0]:
                self.file.write(text[: len(text) // 2])
                self.file.flush()
                raise OSError(28, "No space left on device")
            return self.file.write(text)

    opened = traces._file._open
    monkeypatch.setattr(traces._file, "_open", lambda: Half(opened()))
    traces._file.close()
    for i, full[0] in enumerate([False, True, True, False, False]):
        traces.record(traced(*STAGES, rid=str(i)))
        assert traces.flush(60)
    traces.close(60)
    assert (traces.written, traces.lost) == (3, 2)
    assert [r["id"] for r in read_traces(tmp_path / "t.jsonl")] == ["0", "3", "4"]


def test_a_disk_that_hangs_holds_up_nobody_and_costs_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(tracing, "MAX_QUEUED", 5)
    traces, hang = Traces(tmp_path / "t.jsonl"), threading.Event()
    write = traces._file.write
    monkeypatch.setattr(traces._file, "write", lambda line: (hang.wait(600), write(line)))
    for _ in range(50):  # would never return if it waited for the disk
        traces.record(traced(*STAGES))
    assert traces.lost >= 50 - 5 - 1
    assert not traces.flush(0.01)
    hang.set()
    traces.close(60)
    assert traces.written + traces.lost == 50
    assert len(list(read_traces(tmp_path / "t.jsonl"))) == traces.written


def test_many_threads_write_whole_lines(tmp_path):
    traces = Traces(tmp_path / "t.jsonl")

    def work(i):
        for k in range(100):
            traces.record(traced(*STAGES, rid=f"{i}-{k}"))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    traces.close(60)
    assert len({r["id"] for r in read_traces(tmp_path / "t.jsonl")}) == 500


def test_a_trace_that_cannot_be_written_down_is_lost_alone(tmp_path):
    traces = Traces(tmp_path / "t.jsonl")
    bad = traced(*STAGES)
    bad.marks = None
    traces.record(bad)
    traces.record(traced(*STAGES))
    traces.close(60)
    assert (traces.written, traces.lost) == (1, 1)


def test_without_a_file_nothing_is_kept():
    traces = Traces()
    traces.record(traced(*STAGES))
    assert traces._thread is None
    traces.close(60)


# A real engine ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tiny_folder, tmp_path_factory):
    """A random Qwen3 of 211 words."""
    folder = tmp_path_factory.mktemp("traces") / "model"
    shutil.copytree(tiny_folder("qwen3"), folder)
    Backend(models.WordLevel({f"w{i}": i for i in range(211)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    llm = AsyncLLM(folder, num_kv_blocks=12, max_model_len=64, dtype="float32", max_buffered=4)  # who leaves is in time
    yield llm
    llm.shutdown()


def ask(llm, trace, n=1, leave=None):
    """What a server does between its marks."""

    async def main():
        for stage in STAGES[:4]:
            trace.mark(stage)
        out = None
        params = SamplingParams(temperature=0 if n == 1 else 1.0, max_tokens=12, ignore_eos=True, n=n)
        async for out in llm.generate([5] * 20, params, request_id=trace.request_id):
            if leave is not None and len(out.outputs[0].token_ids) >= leave:
                break
        trace.engine([out])
        trace.finish()
        return out

    return asyncio.run(asyncio.wait_for(main(), 600))


@pytest.mark.parametrize(("n", "leave"), [(1, None), (3, None), (1, 4)])
def test_one_id_through_all_stages_without_a_gap(llm, n, leave):
    """A3, and A2 by construction: what a stopwatch around it measures is the sum of the spans."""
    trace = RequestTrace(f"id-{n}-{leave}", "/v1/completions")
    begun = time.perf_counter()
    out = ask(llm, trace, n, leave)
    took = time.perf_counter() - begun
    whole(trace)
    assert [s for s, *_ in trace.spans()] == list(STAGES)
    assert trace.seconds <= took
    assert {e.request_id.split("-")[0] for e in llm.engine.events.of("queued")} == {"id"}
    m, at = out.metrics, {s: trace.start + end / 1e9 for s, _, end in trace.spans()}
    assert at["queue"] == pytest.approx(m["scheduled"], abs=1e-6)
    assert at["prefill"] == pytest.approx(m["first_token"], abs=1e-6)
    assert (leave is not None) or at["decode"] == pytest.approx(m["last_token"], abs=1e-6)
    assert trace.fields["prompt_tokens"] == 20
    assert trace.fields["output_tokens"] == sum(len(c.token_ids) for c in out.outputs)
    assert trace.fields.get("finish_reason") == ("length" if leave is None else None)


# OpenTelemetry ------------------------------------------------------------------------------------------------------


class Span(api.NonRecordingSpan):
    def __init__(self, name, context, parent, attributes, start):
        super().__init__(context)
        self.name, self.parent, self.attributes, self.start = name, parent, dict(attributes or {}), start
        self.finished = self.status = None

    def set_status(self, status, description=None):
        self.status = status

    def end(self, end_time=None):
        self.finished = end_time


class Tracer(api.Tracer):
    """As much of an SDK as tells whether the API was used rightly."""

    def __init__(self):
        self.spans = []

    def start_span(self, name, context=None, kind=None, attributes=None, links=None, start_time=None, **_):
        parent = api.get_current_span(context).get_span_context()
        number = len(self.spans) + 1
        ids = api.SpanContext(parent.trace_id or 99, number, is_remote=False)
        self.spans.append(Span(name, ids, parent, attributes, start_time))
        return self.spans[-1]

    def start_as_current_span(self, *_, **__):
        raise NotImplementedError


def export(trace, **options):
    tracer = Tracer()
    traces = Traces(exporter=OpenTelemetry(tracer), **options)
    traces.record(trace)
    traces.close(60)
    assert (traces.written, traces.lost) == (1, 0)
    return tracer.spans


def test_the_same_spans_with_their_own_times():
    trace = traced(*STAGES)
    trace.status = 200
    trace.note(prompt_tokens=7, output_tokens=9, finish_reason="stop")
    parent, *stages = export(trace)
    begin = round(trace.wall * 1e9)
    assert (parent.name, parent.start, parent.finished) == ("llm_request", begin, begin + 2_000_000_000)
    assert [(s.name, s.start - begin, s.finished - begin) for s in stages] == trace.spans()
    assert {s.parent.span_id for s in stages} == {parent.get_span_context().span_id}
    assert {s.get_span_context().trace_id for s in (parent, *stages)} == {parent.get_span_context().trace_id}
    assert not parent.parent.is_valid
    want = {
        "gen_ai.request.id": "req-1", "gen_ai.usage.prompt_tokens": 7, "gen_ai.usage.completion_tokens": 9,
        "gen_ai.latency.e2e": 2.0, "gen_ai.latency.time_to_first_token": 1.5, "gen_ai.latency.time_in_queue": 0.25,
        "http.response.status_code": 200, "minillm.tenant": "ann", "minillm.finish_reason": "stop",
    }  # fmt: skip
    assert {k: parent.attributes.get(k) for k in want} == want
    assert parent.status is None


def test_a_clients_trace_goes_on_and_a_broken_header_begins_one():
    trace = traced(*STAGES)
    trace.traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    spans = export(trace)
    assert {s.get_span_context().trace_id for s in spans} == {0x0AF7651916CD43DD8448EB211C80319C}
    assert spans[0].parent.span_id == 0xB7AD6B7169203331
    trace.traceparent = f"00-{CANARY}"
    assert not export(trace)[0].parent.is_valid


@pytest.mark.parametrize(("status", "reason", "error"), [(500, None, True), (200, "error", True), (400, None, False)])
def test_our_own_failures_are_errors(status, reason, error):
    trace = traced(*STAGES)
    trace.status = status
    trace.note(finish_reason=reason)
    assert (export(trace)[0].status is not None) == error


def test_a_canary_is_in_no_attribute():
    assert CANARY not in json.dumps([s.attributes for s in export(leaky())])


def test_an_exporter_that_fails_does_not_cost_the_line(tmp_path):
    class Broken:
        closed = 0

        def __call__(self, trace, record):
            raise ConnectionError("no collector")

        def close(self):
            self.closed += 1
            raise ConnectionError("still none")

    broken = Broken()
    traces = Traces(tmp_path / "t.jsonl", exporter=broken)
    traces.record(traced(*STAGES))
    traces.close(60)
    assert (traces.written, traces.lost, broken.closed) == (0, 1, 1)
    assert len(list(read_traces(tmp_path / "t.jsonl"))) == 1


@pytest.mark.parametrize("gone", ["opentelemetry.sdk", "opentelemetry.exporter"])
def test_asked_for_and_not_installed_is_said_in_words(monkeypatch, gone):
    real = otel.importlib.import_module

    def missing(name):
        if name.startswith(gone):
            raise ModuleNotFoundError(name)
        return None if ".sdk" in name else real(name)

    monkeypatch.setattr(otel.importlib, "import_module", missing)
    with pytest.raises(MinillmError, match=rf"needs {gone}.* not installed; run: pip install"):
        make_exporter("http://127.0.0.1:4318/v1/traces")


def test_tracing_imports_nothing_of_opentelemetry_unless_asked():
    code = "import sys, minillm.server.tracing; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
