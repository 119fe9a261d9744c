"""`bench serving` on tiny settings: both sides do the same work, the record verifies, and wrong work is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys

import pytest
from fake_openai import FakeServer, event, usual
from test_bench import FAST

from minillm.bench import bare, common, held_out, main, serving, streams
from minillm.bench.streams import Remote
from minillm.errors import MinillmError
from minillm.roofline import record, stats
from minillm.roofline.quantities import SERVING_GOALS, predict_quantity
from minillm.trace.client import Client
from minillm.trace.latency import Stamps

# The load, and the process that sends it -------------------------------------------------------------------------


def test_the_burst_sends_all_at_once_and_probes_find_the_others_running():
    """32 seats: 31 streams run before the first newcomer comes, one newcomer at a time, then the streams are left."""
    now, most, log = 0, 0, []

    async def send(call, scheduled=None, on_text=None):
        nonlocal now, most
        now += 1
        most = max(most, now)
        log.append(("begins", call.max_tokens, now))
        try:
            for i in range(call.max_tokens):
                await asyncio.sleep(0.001)
                if on_text is not None and i == 0:
                    on_text("x")
            log.append(("ends", call.max_tokens, now))
            return Stamps(0, 0, ((1.0, 1),), 1.0, len(call.prompt), call.max_tokens, 200)
        finally:
            now -= 1

    found = asyncio.run(streams.burst(send, [[1]] * 5, 3))
    assert len(found) == most == 5
    log.clear()
    most = 0
    found, ran = asyncio.run(streams.probes(send, [[1]] * 4, 10_000, [[1, 2]] * 3))
    assert [s.prompt_tokens for s in found] == [2, 2, 2]
    assert ran == 4
    assert most == 5
    assert log[:4] == [("begins", 10_000, i) for i in (1, 2, 3, 4)]
    assert log[4:] == [("begins", streams.PROBE_TOKENS, 5), ("ends", streams.PROBE_TOKENS, 5)] * 3
    assert now == 0  # the others were left


def test_a_background_stream_that_ends_early_is_told():
    """Mutation of the load: with too short an answer newcomers find empty seats, and the record says so."""

    async def send(call, scheduled=None, on_text=None):
        if on_text is not None:
            on_text("x")
        await asyncio.sleep(0.02 if call.max_tokens == 7 else 0.001)
        return Stamps(0, 0, status=500)

    assert asyncio.run(streams.probes(send, [[1]] * 3, 7, [[1]] * 50))[1] == 0


def test_the_clients_process_answers_every_job():
    with FakeServer() as server, Remote(server.url) as client:
        answer = client.do("burst", prompts=[[1, 2], [3, 4]], new=3)
        assert [s.tokens for s in answer["stamps"]] == [3, 3]
        assert answer["cpu"] > 0
        assert server.seen[0]["ignore_eos"] is True
        assert client.do("alone", prompt=[1], new=2)["text"] == "w0 w1 "
        answer = client.do("probes", background=[[1]], new=5000, prompts=[[1], [2]])
        assert (len(answer["stamps"]), answer["ran"]) == (2, 1)
        before = server.connections
        assert client.do("hold", connections=7, path="/health") | {"cpu": 0} == {"answered": 7, "open": 7, "cpu": 0}
        assert server.connections == before + 7
        client.do("drop")
        with pytest.raises(MinillmError, match="no_such"):
            client.do("no_such")
        assert client.do("alone", prompt=[1], new=1)["text"] == "w0 "  # and it goes on
    assert client.process.returncode == 0


def test_a_client_that_cannot_begin_or_dies_is_told_in_words():
    with FakeServer() as server:
        url = server.url
    with pytest.raises(MinillmError, match="ended"), Remote(url):
        pass
    with FakeServer() as server, Remote(server.url) as client:
        client.process.kill()
        client.process.wait()
        with pytest.raises(MinillmError, match="exit code"):
            client.do("alone", prompt=[1], new=1)


def test_the_clients_process_loads_neither_torch_nor_the_server():
    probe = """
import sys, minillm.bench.streams
sys.exit(str([m for m in ('torch', 'numpy', 'fastapi') if m in sys.modules]))"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=300)
    assert done.stderr.strip() == "[]"


def test_small_writes_of_the_bare_application_are_not_held_back(monkeypatch):
    """With Nagle's algorithm on, a first token waits 40 ms for an acknowledgement, and the prediction with it."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    kinds = [H11Protocol]
    with contextlib.suppress(ImportError):  # uvicorn takes it where it is installed
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

        kinds.append(HttpToolsProtocol)
    seen = []
    for kind in kinds:
        real = kind.connection_made

        def made(self, transport, real=real):
            sock = transport.get_extra_info("socket")
            seen.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            real(self, transport)

        monkeypatch.setattr(kind, "connection_made", made)
    with bare.serve() as url, Remote(url) as client:
        assert client.do("alone", prompt=[1], new=1)["stamps"][0].ok
    assert seen
    assert all(seen)


def test_the_bare_application_speaks_as_the_server_does():
    with bare.serve() as url:

        async def work():
            async with Client(url) as client:
                return client.model, await streams.burst(client.send, [[1]] * 3, 4)

        model, found = asyncio.run(work())
    assert model == "bare"
    assert all(s.ok and s.tokens == 4 for s in found)


# Predictions and derived numbers -----------------------------------------------------------------------------------


def test_predictions_follow_their_formulas():
    shape = {"quantity": "serving_ratio", "chunks": 2000, "burst_s": 5.0, "chunk_s": 0.0001}
    assert predict_quantity(shape) == {"lower": 0.0, "expected": pytest.approx(1.04), "upper": SERVING_GOALS["ratio"]}
    shape = {"quantity": "serving_ttft", "streams": 32, "step_s": 0.08, "chunk_s": 0.0001, "request_s": 0.003}
    assert predict_quantity(shape) == {"lower": -0.08, "expected": pytest.approx(0.0046), "upper": 0.02}
    shape = {"quantity": "connection_bytes", "connections": 500, "each": 30_000.0}
    assert predict_quantity(shape) == {"lower": 0.0, "expected": 15e6, "upper": 100e6}


def test_a_request_alone_is_predicted_and_its_error_is_worked_out_again():
    shape = {"quantity": "request_cost", "a": 0.001, "b": 0.03, "m": 100, "n": 10}
    found = predict_quantity(shape)
    assert found == {"lower": 0.0, "expected": pytest.approx(0.4), "upper": pytest.approx(0.46)}
    made = {
        "results": {"x": {"samples": [1.0, 2.0, 9.0]}, "y": {"samples": [3.0]}},
        "predictions": {k: {"prediction": {"expected": e}} for k, e in (("x", 2.5), ("y", 2.0))},
    }
    assert stats.derive({"op": "prediction_error", "of": ["x", "y"]}, made) == pytest.approx([0.2, 0.5])


@pytest.mark.parametrize(("prompt", "new"), [(128, 64), (8, 4), (1, 2), (500, 16)])
def test_held_out_shapes_are_none_of_the_fits_and_no_longer_than_the_bench(prompt, new):
    train, held = held_out.shapes(prompt, new)
    assert not set(train) & set(held)
    assert all(1 <= m <= prompt and 1 <= n <= new for m, n in train + held)
    if prompt >= 8 and new >= 16:
        assert (len(train), len(held)) == (4, 4)


def machine(seconds):
    """A side whose requests take seconds(m, n) by their stamps."""

    async def send(call, scheduled=None, on_text=None):
        end = 5.0 + seconds(len(call.prompt), call.max_tokens)
        chunks = tuple((end, 1) for _ in range(call.max_tokens))
        return Stamps(5.0, 5.0, chunks, end, len(call.prompt), call.max_tokens, 200)

    return send


MACHINES = {
    "as the formula says": (lambda m, n: 0.002 * m + 0.03 * n, True),
    "a step's own cost is in b": (lambda m, n: 0.02 + 0.002 * m + 0.031 * (n - 1), True),
    "prompts cost their square": (lambda m, n: 2e-4 * m * m + 0.03 * n, False),
    "output costs its square": (lambda m, n: 0.002 * m + 0.03 * n * n, False),
}


@pytest.mark.parametrize("what", MACHINES)
def test_the_gate_tells_machines_of_this_form_from_others(what):
    seconds, sound = MACHINES[what]
    book, o = common.recorder(options(), FAST), options()
    train, held = held_out.shapes(128, 64)
    side = machine(seconds)
    ran = lambda turn, wanted: asyncio.run(held_out.alone(side, held_out.draw(o, 9000, turn, wanted)))
    held_out.expect(book, held_out.fit(train, [ran("fit", train)] * 3), held)
    book.seal()
    held_out.enter(book, held, [ran("held", held)] * 3)
    done = book.finish()
    assert [c["passed"] for c in done["checks"]] == [sound]
    assert done["derived"][held_out.ERROR]["median"] < 0.03 or not sound
    assert {f.key for f in record.verify(done)} == (set() if sound else {f"checks/{done['checks'][0]['name']}"})


def test_requests_alone_are_fresh_and_whole():
    first, again, other = (held_out.draw(options(), 9000, turn, [(5, 2), (5, 2)]) for turn in ("a", "a", "b"))
    assert first == again
    assert len({tuple(c.prompt) for c in first + other}) == 4

    async def cut(call, scheduled=None, on_text=None):
        return Stamps(0, 0, ((1.0, 1),), 1.0, 5, 1, 200)

    with pytest.raises(MinillmError, match="not whole"):
        asyncio.run(held_out.alone(cut, first))


def test_a_difference_is_paired_by_repeat():
    made = {"results": {"a": {"samples": [3.0, 5.0]}, "b": {"samples": [1.0, 7.0]}}}
    assert stats.derive({"op": "difference", "of": ["a", "b"]}, made) == [2.0, -2.0]
    with pytest.raises(ValueError):
        stats.derive({"op": "difference", "of": ["a", "b"]}, {"results": {**made["results"], "b": {"samples": [1.0]}}})


# The bench ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(serving, "ceilings", lambda options: FAST)
    monkeypatch.setattr(serving, "ceilings_after", lambda options: {"read": 1e15})
    # LONG: they must go on until the newcomers have been, however long the client's process stands still. They are left
    # then, so their length costs nothing.
    for name, value in {"PROBES": 2, "CONNECTIONS": 10, "LONG": 1000}.items():
        monkeypatch.setattr(serving, name, value)
    monkeypatch.setattr(bare, "PIECES", 3)


@pytest.fixture(scope="module")
def engine(embedded_folder):
    from minillm.async_llm import AsyncLLM

    llm = AsyncLLM(embedded_folder, dtype="float32", max_num_seqs=2, max_model_len=1024, threads=1)
    yield llm
    llm.shutdown()


@pytest.fixture
def loaded(quick, monkeypatch, engine):
    """The bench takes an engine that is loaded, and leaves it running."""
    from minillm import async_llm

    monkeypatch.setattr(async_llm, "AsyncLLM", lambda *_, **__: engine)
    monkeypatch.setattr(engine, "shutdown", lambda: None)


def options(**changes):
    values = {
        "step": "serving",
        "device": "cpu",
        "dtype": "float32",
        "repeats": 2,
        "requests": 3,
        "prompt": 8,
        "new": 4,
    }
    return common.Options(**(values | {"out": lambda line: None} | changes))


@pytest.mark.model
def test_the_record_verifies_and_says_what_the_server_adds(quick):
    done = serving.run(options())
    # Too few streams on a machine that is not quiet: noise may pass the floor of a difference. All else must hold.
    noisy = ("results/probe.added/p10", "results/idle.bytes/p10")
    faults = [f for f in record.verify(done) if f.key not in noisy and "a m + b n" not in f.key]
    assert faults == []
    assert {c["passed"] for c in done["checks"] if "a m + b n" not in c["name"]} == {True}
    assert len(done["checks"]) == 6
    for key in ("burst", "probe", "outside", "tpot"):
        for side in ("direct", "http"):
            assert len(done["results"][f"{key}.{side}"]["samples"]) == 2
    direct, http = (done["results"][f"burst.{side}"]["samples"] for side in ("direct", "http"))
    assert done["derived"]["burst.ratio"]["samples"] == [b / a for a, b in zip(direct, http)]
    held = {f"alone.{m}.{n}" for m, n in held_out.shapes(8, 4)[1]}
    assert set(done["predictions"]) == {"burst.ratio", "probe.added", "idle.bytes"} | held
    assert len(done["derived"][held_out.ERROR]["samples"]) == len(held)
    assert done["setup"]["streams"] == 3
    text = serving.show(done)
    for words in ("time through the server / direct", "TTFT that the server adds", "idle connections", "goal at most",
                  "unseen shapes are"):  # fmt: skip
        assert words in text


@pytest.mark.model
def test_streams_that_are_cut_short_are_no_measurement(loaded, monkeypatch):
    real = streams.Remote.do

    def short(self, what, **job):
        answer = real(self, what, **job)
        if what == "burst" and len(job["prompts"][0]) > 1:
            one = answer["stamps"][0]
            answer["stamps"][0] = Stamps(one.sent, one.sent, one.chunks[:-1], one.end, 8, one.tokens - 1, 200)
        return answer

    monkeypatch.setattr(streams.Remote, "do", short)
    with pytest.raises(MinillmError, match="not whole"):
        serving.run(options(repeats=1, requests=2))


@pytest.mark.model
def test_another_answer_through_the_server_fails_the_check(loaded, monkeypatch):
    real = streams.Remote.do
    other = lambda self, what, **job: real(self, what, **job) | ({"text": "x"} if what == "alone" else {})
    monkeypatch.setattr(streams.Remote, "do", other)
    done = serving.run(options(repeats=1, requests=2))
    assert "checks/alone, both sides write the same text" in {f.key for f in record.verify(done)}


def test_one_stream_and_options_of_other_steps_are_refused(quick, capsys):
    with pytest.raises(MinillmError, match="--requests"):
        serving.run(options(requests=1))
    from minillm.cli import main as minillm

    assert minillm(["bench", "serving", "--workloads", "W1"]) == 2
    assert "belongs to throughput" in capsys.readouterr().err
    assert "serving" in main.STEPS


def test_an_error_in_a_stream_is_named(quick):
    broken = lambda body: [*usual(body)[:1], event({"error": {"message": "out of blocks"}}), event(b"[DONE]")]
    with FakeServer(broken) as server, Remote(server.url) as client:
        (one,) = client.do("burst", prompts=[[1]], new=3)["stamps"]
    assert one.error == "out of blocks"
