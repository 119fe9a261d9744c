"""Where the time of a request went, as the server says, against who else knows it: the client, and the engine's log."""

from __future__ import annotations

import inspect
import itertools
import json
import time
from types import SimpleNamespace

import pytest
from server_life import SMALL, Wire, body, held, tiny_model, wait_for

from minillm import AsyncLLM
from minillm.events import EventLog
from minillm.server import generation
from minillm.server.local import LocalServer
from minillm.server.trace_file import read_traces
from minillm.server.tracing import STAGES, RequestTrace

STEP_S, PREFILL_S, SEND_S = 1 / 32, 3 / 8, 3 / 8  # sums of such numbers are exact
TOKENS, BEFORE = 120, 60  # of the request, and of the one that it waits for
SHARE = 1e-6


class Clock:
    """Passes while a step computes and while the client sends, and not while a machine has other things to do."""

    now = 1024.0

    def __call__(self):
        return self.now


def test_the_server_and_the_engine_have_one_clock():
    default = inspect.signature(RequestTrace).parameters["clock"].default
    assert default is EventLog().clock is time.perf_counter


@pytest.fixture(scope="module")
def seen(tiny_folder, tmp_path_factory):
    """(its record, the client's stamps, the engine's events) of a request that is sent slowly, waits and is long. All
    are times of one clock: client and server are on one machine."""
    folder, clock, begun = tmp_path_factory.mktemp("spans"), Clock(), []
    model = tiny_model(tiny_folder, folder / "model")

    class Trace(RequestTrace):
        def __init__(self, *args, **options):
            super().__init__(*args, clock=clock, **options)
            begun.append(self)

    with pytest.MonkeyPatch.context() as patch, AsyncLLM(model, **(SMALL | {"max_num_seqs": 1})) as llm:
        patch.setattr(generation, "RequestTrace", Trace)
        patch.setattr("minillm.engine.time", SimpleNamespace(perf_counter=clock))  # of arrivals
        llm.core.clock = llm.engine.events.clock = clock
        compute = llm.core._compute

        def slow(rows, done):
            clock.now += PREFILL_S if any(n > 1 for _, n in rows) else STEP_S
            return compute(rows, done)

        with LocalServer(llm, served_model_name="tiny", trace_file=folder / "traces.jsonl") as server:
            llm.core._compute = slow
            with Wire(server.port) as first, Wire(server.port) as wire:
                with held(server) as steps:
                    first.post(body(max_tokens=BEFORE, stream=True))
                    steps.until(lambda: llm.core.scheduler.running, "the first runs")
                    raw = json.dumps(body((5, 6, 7), TOKENS, stream=True)).encode()
                    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n"
                    stamps = {"begin": clock()}
                    wire.socket.sendall(f"{head}Content-Type: application/json\r\nX-Request-Id: mine\r\n\r\n".encode())
                    wait_for(lambda: len(begun) == 2 and begun[1].marks, "its body is awaited")
                    clock.now += SEND_S
                    wire.socket.sendall(raw)
                    stamps["sent"] = clock()
                    wait_for(lambda: not llm._commands.empty(), "it is on its way to the engine")
                wire.until(b"data: ")
                stamps["first"] = clock()
                wire.until(b"data: [DONE]")
                stamps["end"] = clock()
            wait_for(lambda: server.state.traces.written == 2, "both are recorded")
        (record,) = [r for r in read_traces(folder / "traces.jsonl") if r["id"] == "mine"]
        return record, stamps, list(llm.engine.events.events)


def disagreements(record, stamps, events):
    """Which numbers of the record are not those of the client and of the engine's log, within a share of the whole."""
    mine = lambda name: "mine" in name
    took = dict.fromkeys(STAGES, 0.0)
    for stage, begin, end in record["spans"]:
        took[stage] += (end - begin) / 1e9
    (queued,) = [e for e in events if e.kind == "queued" and mine(e.request_id)]
    of_mine = [e for e in events if e.kind == "step" and any(mine(r[0]) for r in e.data["rows"])]
    steps = [(e.time - e.data["seconds"], e.time) for e in of_mine]
    (prefill, *decode) = steps
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(steps)]
    assert len(decode) == len(gaps) == TOKENS - 1
    assert min(gaps) >= 0
    e2e = stamps["end"] - stamps["begin"]
    others = {
        "e2e": (sum(took.values()), e2e),
        "ingress": (took["ingress"], stamps["sent"] - record["start"]),
        "queue": (took["queue"], prefill[0] - queued.data["arrival"]),
        "prefill": (took["prefill"], prefill[1] - prefill[0]),
        "decode": (took["decode"], sum(end - begin for begin, end in decode) + sum(gaps)),
        "post": (took["post"], stamps["end"] - steps[-1][1]),
    }
    wrong = {name for name, (said, known) in others.items() if abs(said - known) > SHARE * e2e}
    return wrong | {f"no {stage}" for stage in STAGES if stage not in {s for s, *_ in record["spans"]}}


def test_the_stages_of_a_request_are_what_others_saw(seen):
    """A2, over HTTP: the sum is the client's end to end, decode is the steps of this id and the time between them."""
    assert disagreements(*seen) == set()
    record, stamps, _ = seen
    ends = {stage: record["start"] + end / 1e9 for stage, _, end in record["spans"]}
    assert stamps["begin"] <= record["start"]
    assert ends["prefill"] <= stamps["first"]
    assert ends["decode"] <= stamps["end"]


def without(record, stage):
    """As it would be if that mark were left out: its time falls to the stage after it."""
    spans, begin = [], 0
    for name, _, end in record["spans"]:
        if name != stage:
            spans.append([name, begin, end])
            begin = end
    return record | {"spans": spans}


@pytest.mark.parametrize("stage", STAGES)
def test_a_mark_that_is_left_out_is_noticed(seen, stage):
    record, *others = seen
    wrong = disagreements(without(record, stage), *others)
    assert f"no {stage}" in wrong
    if stage in ("ingress", "queue", "prefill", "decode"):
        assert stage in wrong, "by its time, too"


def test_a_trace_that_begins_late_is_noticed(seen):
    """Its spans still sum to its own end to end: only the client knows better."""
    record, *others = seen
    late = SEND_S * 1e9
    spans = [[name, max(0, begin - late), max(0, end - late)] for name, begin, end in record["spans"]]
    assert "e2e" in disagreements(record | {"spans": spans, "start": record["start"] + SEND_S}, *others)
