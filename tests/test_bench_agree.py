"""`bench agree`: both sides' numbers are of the same requests, and a client or server that is off is seen."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_openai import FakeServer
from hypothesis import given
from hypothesis import strategies as st
from test_bench import FAST

from minillm.bench import agree, bare, common, guidellm, server_side
from minillm.bench.agree import OURS, Run
from minillm.bench.server_side import Served, compare
from minillm.errors import MinillmError
from minillm.roofline import record
from minillm.roofline.quantities import AGREE_GOALS, predict_quantity
from minillm.trace import latency
from minillm.trace.latency import Stamps

NEW = 5


# What was really so: a server's requests, and a client that saw them a millisecond later ---------------------------


def truth(count: int = 6, late: float = 0.001) -> Run:
    stamps, rows = [], {}
    for i in range(count):
        first, gaps = 0.2 + 0.03 * i, tuple(0.02 + 0.001 * k for k in range(NEW - 1))
        times = [first + sum(gaps[:k]) for k in range(NEW)]
        sent = 1.0 * i
        chunks = tuple((sent + t + late, 1) for t in times)
        spans = {"preprocess": 0.002, "prefill": first, "decode": sum(gaps), "post": 0.0005}
        rows[f"r{i}"] = Served(f"r{i}", first, sum(gaps) / (NEW - 1), gaps, spans)
        end = sent + sum(spans.values()) + late
        stamps.append(Stamps(sent, sent, chunks, end, 8, NEW, 200, request_id=f"cmpl-r{i}"))
    return Run(stamps, rows, counts(list(rows.values())))


def counts(rows):
    gaps = [g for r in rows for g in r.gaps]
    return {
        "ttft": (sum(r.ttft for r in rows), len(rows)), "tpot": (sum(r.tpot for r in rows), len(rows)),
        "itl": (sum(gaps), len(gaps)), "ended": (sum(r.e2e for r in rows), len(rows)),
    }  # fmt: skip


def stretched(s: Stamps, ttft: float = 1.0, gap: float = 1.0, end: float = 1.0) -> Stamps:
    """The same request by a client whose times are wrong by these factors."""
    at = s.sent + s.ttft * ttft
    chunks = [(at, 1)]
    for g in s.itl:
        at += g * gap
        chunks.append((at, 1))
    return replace(s, chunks=tuple(chunks), end=s.sent + (s.end - s.sent) * end)


def faults(runs: dict[str, list[Run]]) -> set[str]:
    """What is wrong with the record of these runs, by check."""
    book = record.Recorder("agree", FAST, command="x", setup={})
    for name in runs:
        for key in agree._keys(name):
            book.expect(f"{name}.{key}", "agreement", of=key.partition(".")[0], added_s=0.001, seconds=0.3)
    book.seal()
    agree.record_runs(book, runs, NEW)
    return {f.key for f in record.verify(book.finish())}


def test_a_client_that_tells_the_truth_agrees():
    assert faults({OURS: [truth(), truth(7)], guidellm.NAME: [truth(), truth(8)]}) == set()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"ttft": 1.10}, {"TTFT"}),
        ({"gap": 1.10}, {"TPOT", "ITL"}),
        ({"gap": 0.90}, {"TPOT", "ITL"}),
        ({"end": 1.03}, {"E2E"}),
        ({"end": 0.97}, {"E2E"}),
    ],
)
def test_a_client_that_is_off_is_named(wrong, named):
    bad = [replace(r, stamps=[stretched(s, **wrong) for s in r.stamps]) for r in (truth(), truth(7))]
    goal = {of.upper(): f"{g:.0%}" for of, g in AGREE_GOALS.items()}
    expected = {f"checks/{q} of {OURS} and of the server are within {goal[q]}" for q in named}
    assert faults({OURS: bad, guidellm.NAME: [truth()] * 2}) == expected


def test_a_first_token_before_the_server_had_it_breaks_the_bound():
    """Such a client is wrong whatever the goal is: its interval holds the server's."""
    bad = [replace(r, stamps=[stretched(s, ttft=0.97) for s in r.stamps]) for r in (truth(), truth(7))]
    assert {f"results/{OURS}.ttft.{stat}/p10" for stat in server_side.STATS} == faults({OURS: bad})


@pytest.mark.parametrize("quantity", ["ttft", "tpot", "itl"])
def test_a_server_whose_metrics_are_off_is_named(quantity):
    run = truth()
    total, count = run.histograms[quantity]
    bad = replace(run, histograms=run.histograms | {quantity: (total * 0.9, count)})
    assert faults({OURS: [bad]}) == {f"checks/{quantity.upper()} of {OURS} and of the server are within 5%"}


@pytest.mark.parametrize("quantity", ["ttft", "tpot", "itl", "ended"])
def test_one_request_or_token_more_than_were_sent_is_noticed(quantity):
    run = truth()
    total, count = run.histograms[quantity]
    bad = replace(run, histograms=run.histograms | {quantity: (total * (count + 1) / count, count + 1)})
    assert faults({OURS: [bad]}) == {f"checks/the server counted {OURS}'s requests and tokens, no others"}


def test_a_stream_that_is_not_whole_is_no_measurement():
    run = truth()
    for short in (replace(run.stamps[0], output_tokens=NEW - 1), replace(run.stamps[0], error="gone")):
        with pytest.raises(MinillmError, match="not whole"):
            faults({OURS: [replace(run, stamps=[short, *run.stamps[1:]])]})


# Both sides of a quantity ------------------------------------------------------------------------------------------


def test_each_number_is_by_hand():
    run = truth(3)
    got = compare(run.stamps, run.rows, run.histograms, per_token=True)
    assert got["ttft.mean"] == pytest.approx((0.231, 0.230))
    assert got["ttft.p50"] == pytest.approx((0.231, 0.230))
    assert got["tpot.mean"] == pytest.approx((0.0215, 0.0215))
    assert got["itl.p50"] == pytest.approx((0.0215, 0.0215))
    assert got["e2e.p50"] == pytest.approx((0.3195, 0.3185))  # 2 ms, 230 ms, 86 ms, half of one; and what is late
    assert "itl.mean" not in compare(run.stamps, run.rows, run.histograms, per_token=False)


def test_the_mean_is_that_of_metrics_not_of_the_log():
    run = truth(2)
    got = compare(run.stamps, run.rows, run.histograms | {"ttft": (3.0, 2)}, per_token=True)
    assert got["ttft.mean"][1] == 1.5


def test_the_servers_requests_are_those_of_this_client():
    """Others that the log knows, from another client, are not counted; one that it does not know is an error."""
    run = truth(4)
    some = compare(run.stamps[:2], run.rows, {}, per_token=True)
    assert some == compare(run.stamps[:2], {k: run.rows[k] for k in ("r0", "r1")}, {}, per_token=True)
    with pytest.raises(MinillmError, match="unknown to the server"):
        compare(run.stamps, {"r0": run.rows["r0"]}, {}, per_token=True)
    with pytest.raises(MinillmError, match="counted no TTFT"):
        compare(run.stamps, run.rows, {"ttft": (0.0, 0)}, per_token=True)


@given(st.lists(st.tuples(st.floats(1e-4, 10), st.floats(0, 1)), min_size=1, max_size=40))
def test_what_holds_for_every_request_holds_for_every_statistic(pairs):
    """So TTFT has a lower bound of 1: each of the client's holds the server's, whatever the order of either."""
    stamps = [
        Stamps(0, 0, ((server + more, 1), (server + more + 1, 1)), 20.0, 1, 2, 200, request_id=f"cmpl-{i}")
        for i, (server, more) in enumerate(pairs)
    ]
    rows = {str(i): Served(str(i), server, 1.0, (1.0,), {"post": 20.0}) for i, (server, _) in enumerate(pairs)}
    got = compare(stamps, rows, {}, per_token=True)
    for stat in server_side.STATS:
        client, server = got[f"ttft.{stat}"]
        assert client >= server * (1 - 1e-12)


def test_a_log_and_a_trace_become_one_request_each():
    observed = [
        SimpleNamespace(request_id="a~0f3c", ttft_s=0.2, tpot_s=0.01, gaps=[0.01, 0.0100004]),
        SimpleNamespace(request_id="b", ttft_s=None, tpot_s=None, gaps=[]),
        SimpleNamespace(request_id="c", ttft_s=0.2, tpot_s=0.01, gaps=[]),
    ]
    spans = [["auth", 0, 5], ["ingress", 5, 9], ["auth", 9, 20], ["prefill", 20, 100], ["post", 100, 170]]
    traces = [{"id": name, "spans": spans} for name in ("a", "b", "d")]
    (one,) = server_side.served(observed, traces).values()
    assert (one.request_id, one.ttft, one.gaps) == ("a", 0.2, (0.01, 0.01))
    assert one.e2e == pytest.approx(170e-9)
    assert one.front == pytest.approx(20e-9)


def test_the_prediction_is_one_and_what_the_way_adds():
    shape = {"quantity": "agreement", "of": "ttft", "added_s": 0.004, "seconds": 0.2}
    assert predict_quantity(shape) == {"lower": 0.999, "expected": pytest.approx(1.02), "upper": 1.05}
    shape = {"quantity": "agreement", "of": "e2e", "added_s": 0.0, "seconds": 0.2}
    assert predict_quantity(shape) == {"lower": 0.0, "expected": 1.0, "upper": 1.02}


# guidellm ----------------------------------------------------------------------------------------------------------


def timings(**changes):
    times = {
        "resolve_start": 99.0, "request_start": 100.0, "first_token_iteration": 100.5, "last_token_iteration": 101.3,
        "request_end": 101.4, "token_iterations": 5,
    }  # fmt: skip
    return {
        "response_id": "cmpl-a", "info": {"timings": times | changes}, "output_metrics": {"total_tokens": 5},
        "input_metrics": {"total_tokens": 8},
    }  # fmt: skip


def page(successful, errored=(), incomplete=None):
    groups = {"successful": successful, "errored": list(errored), "incomplete": incomplete, "total": None}
    return json.dumps({"metadata": {"guidellm_version": "0.8.1"}, "benchmarks": [{"requests": groups}]})


def test_a_report_is_read_by_our_definitions():
    """Its own TPOT would be 1.3 s over 5 tokens."""
    (one,), version = guidellm.read(page([timings()]))
    assert version == "0.8.1"
    assert one.ok
    assert (one.ttft, one.tpot, one.e2e) == pytest.approx((0.5, 0.2, 1.3))
    assert one.end - one.sent == pytest.approx(1.4)
    assert (one.tokens, one.prompt_tokens, one.request_id) == (5, 8, "cmpl-a")
    two, _ = guidellm.read(page([timings(request_start=100.2), timings()]))
    assert [s.sent for s in two] == [100.0, 100.2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (page([timings()], errored=[timings()]), "1 requests of guidellm failed"),
        (page([timings()], incomplete=[timings()]), "1 requests of guidellm failed"),
        (page([]), "0 were answered"),
        ("{", "another form"),
        ("[]", "another form"),
        (page([timings(first_token_iteration=None)]), "another form"),
        (json.dumps({"metadata": {}, "benchmarks": []}), "another form"),
    ],
)
def test_a_report_that_is_no_measurement_is_refused(text, words):
    with pytest.raises(MinillmError, match=words):
        guidellm.read(text)


def test_the_peer_is_named_with_its_python():
    assert guidellm.python_of(None) is None
    assert guidellm.python_of("guidellm=/env/bin/python") == "/env/bin/python"
    assert guidellm.python_of("guidellm") == sys.executable
    with pytest.raises(MinillmError, match="guidellm=PYTHON"):
        guidellm.python_of("vllm=/env/bin/python")


def fake_python(folder: Path) -> str:
    """A "Python" that runs the fake whatever it is asked to run."""
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).with_name("fake_guidellm.py")}" "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def fake(tmp_path) -> str:
    return fake_python(tmp_path)


WORK = {"users": 2, "requests": 3, "prompt": (4, 8), "new": 3, "seed": 7}


def test_it_is_started_with_our_load_and_its_report_is_read(fake):
    with FakeServer() as server:
        found, version = guidellm.load(fake, server.url, "model", **WORK)
    assert version == "0.0-fake"
    assert [s.tokens for s in found] == [3, 3, 3]
    assert all(body["max_tokens"] == 3 and body["ignore_eos"] for body in server.seen)
    assert len(server.seen) == 3
    assert server.most == 2


def test_what_goes_wrong_with_it_is_told_in_words(fake, monkeypatch):
    with FakeServer() as server:
        monkeypatch.setenv("FAKE_GUIDE", "fail")
        with pytest.raises(MinillmError, match="code 3: no such backend"):
            guidellm.load(fake, server.url, "model", **WORK)
        monkeypatch.setenv("FAKE_GUIDE", "incomplete")
        with pytest.raises(MinillmError, match="1 requests of guidellm failed"):
            guidellm.load(fake, server.url, "model", **WORK)
    with pytest.raises(MinillmError, match="cannot be started"):
        guidellm.load("/no/such/python", "http://127.0.0.1:1", "model", **WORK)


# The bench ---------------------------------------------------------------------------------------------------------


def hasten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(agree, "ceilings", lambda options: FAST)
    patch.setattr(agree, "ceilings_after", lambda options: {"read": 1e15})
    patch.setattr(bare, "PIECES", 3)
    patch.setattr(bare, "CONNECTIONS", 10)


@pytest.fixture
def quick(monkeypatch):
    hasten(monkeypatch)


def options(**changes):
    values = {
        "step": "agree", "device": "cpu", "dtype": "float32", "repeats": 2, "requests": 4, "prompt": 6, "new": 3,
        "out": lambda line: None, "threads": 1,
    }  # fmt: skip
    return common.Options(**(values | changes))


@pytest.fixture(scope="module")
def done(embedded_folder, tmp_path_factory):
    """One run of the bench, with both clients."""
    folder = tmp_path_factory.mktemp("guide")
    with pytest.MonkeyPatch.context() as patch:
        hasten(patch)
        return agree.run(options(peer=f"guidellm={fake_python(folder)}"))


@pytest.mark.model
def test_the_record_verifies_but_for_what_a_busy_machine_decides(done):
    wrong = [f.key for f in record.verify(done) if "are within" not in f.key]
    assert wrong == []
    exact = [c for c in done["checks"] if "no others" in c["name"]]
    assert [c["passed"] for c in exact] == [True, True]
    assert done["setup"]["clients"] == ["minillm", "guidellm"]
    assert done["setup"]["guidellm"] == "0.0-fake"
    assert set(done["predictions"]) <= set(done["derived"])
    assert "guidellm.itl.mean" not in done["derived"]
    assert {"minillm.itl.p99", "guidellm.e2e.mean", "guidellm.tpot.p95"} <= set(done["derived"])
    text = agree.show(done)
    for words in ("client / server", "guidellm", "ttft.p99", "before its engine takes the request", "check"):
        assert words in text


@pytest.mark.model
@pytest.mark.parametrize("name", ["minillm", "guidellm"])
def test_the_raw_stamps_give_all_of_it_again(done, name):
    """Percentiles of both sides from what is stored; means of the server's are /metrics', which equals its log."""
    run = done["results"][f"{name}.run"]
    for turn, (text, served) in enumerate(zip(run["stamps"], run["server"], strict=True)):
        stamps = latency.from_jsonl(text)
        rows = {r["request_id"]: Served(**r) for r in map(json.loads, served.splitlines())}
        assert len(stamps) == len(rows) == 4
        again = compare(stamps, rows, {}, per_token=name == OURS)
        for key, sides in again.items():
            stored = [done["results"][f"{name}.{key}.{side}"]["samples"][turn] for side in ("client", "server")]
            assert sides == pytest.approx(stored, rel=1e-9, abs=1e-6)


@pytest.mark.model
@pytest.mark.parametrize("name", ["minillm", "guidellm"])
def test_each_clients_request_holds_the_servers_spans(done, name):
    """Up to the last token: the client may have read the end before the server's loop comes back to note it."""
    run = done["results"][f"{name}.run"]
    for text, served in zip(run["stamps"], run["server"], strict=True):
        rows = {r["request_id"]: Served(**r) for r in map(json.loads, served.splitlines())}
        for s in latency.from_jsonl(text):
            row = rows[server_side.plain_id(s)]
            assert set(row.spans) == {
                "ingress", "auth", "admit", "preprocess", "queue", "prefill", "decode", "post",
            }  # fmt: skip
            assert row.e2e - row.spans["post"] <= s.end - s.sent + 1e-5
            assert row.ttft <= s.ttft + 1e-5
            assert row.front + row.spans["queue"] + row.spans["prefill"] <= s.ttft + 1e-5


@pytest.mark.model
def test_without_a_second_client_it_says_so_and_measures_ours(quick, embedded_folder):
    said = []
    done = agree.run(options(repeats=1, out=said.append))
    assert done["setup"]["clients"] == ["minillm"]
    assert any("--peer guidellm=PYTHON" in line for line in said)
    assert not any(key.startswith("guidellm") for key in done["results"])


def test_what_has_no_time_between_tokens_is_refused(quick, capsys):
    for changes in ({"new": 1}, {"requests": 3}):
        with pytest.raises(MinillmError, match="--new must be at least 2"):
            agree.run(options(**changes))
    from minillm.cli import main as minillm

    assert minillm(["bench", "agree", "--peer", "vllm=x"]) == 2
    assert "guidellm=PYTHON" in capsys.readouterr().err
    assert minillm(["bench", "agree", "--workloads", "W1"]) == 2
