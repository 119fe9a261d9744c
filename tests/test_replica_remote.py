"""Lesson 14: a replica elsewhere, at a server that misbehaves. What is death, what a refusal, what the request's own.

Requests that minillm's own servers answer are in test_replica_conformance.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from dataclasses import replace

import httpx
import pytest
from fake_openai import FakeServer, event
from replica_cases import greedy, held, read, until, whole
from server_life import WAIT_S, serving, tiny_model, wait_for

from minillm.cluster import http
from minillm.cluster.data_parallel import DataParallel
from minillm.cluster.http import MOST_BUFFERED, Address
from minillm.cluster.remote import HttpReplica
from minillm.cluster.replica import ReplicaBusy, ReplicaLost, ReplicaState
from minillm.errors import MinillmError, RequestError
from minillm.server import app
from minillm.trace.wire import Connection


def chunk(text, ids, **more):
    return event({"choices": [{"index": 0, "text": text, "token_ids": ids, "finish_reason": None, **more}]})


FIRST, LAST, DONE = chunk("a", [5], prompt_token_ids=[1, 2]), chunk("", [], finish_reason="length"), event(b"[DONE]")


def refusal(status, code=None, message="no", param=None, **headers):
    error = {"message": message, "type": "x", "param": param, "code": code}
    return status, headers, json.dumps({"error": error}).encode()


def at(behave, replica=None, **options):
    """A request to a fake server: (outputs, the error, the replica's state afterwards, the server)."""

    async def go(url):
        made = HttpReplica(url, "west", model="m", answer_s=WAIT_S, **options)
        outputs = []
        async with made:
            try:
                async for output in made.generate([1, 2], greedy(4)):
                    outputs.append(output)
            except MinillmError as error:
                return outputs, error, made.state()
            return outputs, None, made.state()

    with FakeServer(lambda body: behave) as server:
        return *asyncio.run(go(server.url)), server


def test_a_server_of_others():
    outputs, error, state, server = at([FIRST, chunk("bc", [6, 7]), LAST, DONE])
    assert error is None
    assert [o.outputs[0].token_ids for o in outputs][-1] == [5, 6, 7]
    assert (outputs[-1].outputs[0].text, outputs[-1].outputs[0].finish_reason) == ("abc", "length")
    assert outputs[-1].prompt_token_ids == [1, 2]
    (sent,) = server.seen
    assert sent == {  # only what is asked for: others' servers know each field
        "model": "m", "prompt": [1, 2], "stream": True, "stream_options": {"include_usage": True},
        "return_token_ids": True, "max_tokens": 4, "temperature": 0.0, "ignore_eos": True,
    }  # fmt: skip
    assert (state.alive, state.epoch, state.total_blocks) == (True, None, None)


LOST = {
    "broken before a token": (["hang up"], 0, "connection"),
    "broken after one": ([FIRST, "hang up"], 1, "connection"),
    "an end without [DONE]": ([FIRST, chunk("b", [6])], 2, "DONE"),
    "its engine has ended": (refusal(503, "engine_dead", "the engine has ended"), 0, "the engine has ended"),
    "its engine ends": ([FIRST, event({"error": {"message": "it ended", "code": "engine_dead"}})], 1, "it ended"),
    "it shuts down": ([FIRST, event({"error": {"message": "shut", "code": "shutting_down"}})], 1, "shut"),
    "a gateway with nobody behind it": (refusal(502, message="bad gateway"), 0, "bad gateway"),
    "no HTTP": ([b"\r\n\r\n" * 2, "hang up"], 0, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", LOST)
def test_what_is_death(case):
    behave, sent, words = LOST[case]
    outputs, error, state, _ = at(behave)
    assert isinstance(error, ReplicaLost), error
    assert (error.tokens_sent, error.replica) == (sent, "west")
    assert sum(len(o.outputs[0].token_ids) for o in outputs[-1:]) == sent, "what came before was told"
    assert words in str(error)
    assert not state.alive
    assert not state.ready


BUSY = {
    "full": (refusal(429, "queue_full", "the queue is full", **{"Retry-After": "7"}), 7.0),
    "draining": (refusal(503, "draining", **{"Retry-After": "1"}), 1.0),
    "too many connections": (refusal(503, "too_many_connections"), None),
    "shutting down, and no token came": (refusal(503, "shutting_down"), None),
}


@pytest.mark.parametrize("case", BUSY)
def test_what_is_a_refusal_and_no_death(case):
    behave, wait = BUSY[case]
    outputs, error, state, server = at(behave)
    assert isinstance(error, ReplicaBusy), error
    assert (outputs, error.retry_after_s) == ([], wait)
    assert (state.alive, state.ready) == (True, True)
    assert len(server.seen) == 1, "it is not asked again at once"


OWN = {
    "a field": (refusal(400, param="top_k", message="top_k: too many"), RequestError, "top_k: too many"),
    "a place in a field": (refusal(400, param="prompt[3]", message="prompt[3]: bad"), RequestError, "prompt: bad"),
    "a better class": (refusal(403, "priority_not_allowed", param="priority"), RequestError, "priority"),
    "a key": (refusal(401, "invalid_api_key", "no such API key"), MinillmError, "no such API key"),
    "a model": (refusal(404, "model_not_found", "serves another", param="model"), MinillmError, "serves another"),
    "a step": (refusal(500, "internal_error", "the server failed"), MinillmError, "the server failed"),
    "a step, late": ([FIRST, event({"error": {"message": "it failed", "code": "internal_error"}})], MinillmError, "it"),
    "too slow": (refusal(504, "request_timeout", "took longer"), MinillmError, "took longer"),
    "no ids": ([event({"choices": [{"index": 0, "text": "a"}]}), DONE], MinillmError, "return_token_ids"),
    "no JSON": ([event(b"{nonsense"), DONE], MinillmError, "cannot be read"),
    "too deep": ([event(b"[" * 100_000), DONE], MinillmError, "cannot be read"),
    "too deep a refusal": ((500, {}, b"[" * 100_000), MinillmError, "status 500"),
    "a choice too many": ([event({"choices": [{"index": 3, "text": "a", "token_ids": [1]}]})], MinillmError, "read"),
    "choice -1": ([event({"choices": [{"index": -1, "text": "a", "token_ids": [1]}]})], MinillmError, "read"),
    "no stream": ((200, {"Content-Type": "text/html"}, b"<html>"), MinillmError, "no stream of events"),
}


@pytest.mark.parametrize("case", OWN)
def test_what_is_the_requests_own_fault_or_its_servers_and_no_death(case):
    behave, kind, words = OWN[case]
    _, error, state, _ = at(behave)
    assert isinstance(error, kind)
    assert not isinstance(error, ReplicaLost | ReplicaBusy), "another replica would say the same"
    assert words in str(error)
    assert state.alive


def test_what_only_minillm_knows_is_refused():
    async def go(url):
        async with HttpReplica(url, "west", model="m") as replica:
            with pytest.raises(RequestError, match="deadline_s: the server of replica west is not minillm's"):
                await whole(replica, [1], greedy(1), deadline_s=5.0)
            with pytest.raises(RequestError, match="max_tokens: replica west does not say"):
                await whole(replica, [1], greedy(None))

    with FakeServer(lambda body: [DONE]) as server:
        asyncio.run(go(server.url))
        assert server.seen == []


@pytest.mark.parametrize("said", ["[]", "{}", '{"tokens": "abc"}', '{"tokens": [1, null]}', "<html>"])
def test_a_count_that_is_none_is_told(said):
    async def go(url):
        async with HttpReplica(url, "west", model="m") as replica:
            with pytest.raises(MinillmError, match="/tokenize gives no token ids"):
                await whole(replica, "once", greedy(None))

    with FakeServer(lambda body: (200, {}, said.encode())) as server:
        asyncio.run(go(server.url))


@pytest.mark.parametrize("room", ['"many"', "true", "-1", "1.5"])
def test_a_context_that_is_no_number_is_unknown(room, monkeypatch):
    models = b'{"data": [{"id": "fake", "max_model_len": %s}]}' % room.encode()
    plain = FakeServer._plain

    async def lie(self, writer, status, headers, body):
        return await plain(self, writer, status, headers, models if body.startswith(b'{"data"') else body)

    async def go(url):
        async with HttpReplica(url, "west") as replica:
            assert replica.state().max_model_len is None
            await whole(replica, [1, 2], greedy(4))

    monkeypatch.setattr(FakeServer, "_plain", lie)
    with FakeServer(lambda body: [FIRST, LAST, DONE]) as server:
        asyncio.run(go(server.url))


def test_nobody_is_there():
    with FakeServer() as server:
        url = server.url
    with pytest.raises(MinillmError, match="did not become ready within 0 s"):
        asyncio.run(HttpReplica(url, "west", ready_s=0).start())


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:8000", "http://", "http://[", 7])
def test_an_address_that_is_none(url):
    with pytest.raises(MinillmError, match="url"):
        HttpReplica(url, "west")


@pytest.mark.parametrize("key", ["", "schlüssel", "two\nlines"])
def test_a_key_that_does_not_fit_a_header(key):
    with pytest.raises(MinillmError, match="printable ASCII"):
        HttpReplica("http://127.0.0.1:1", tenant_keys={"a": key})


@pytest.mark.parametrize("mutant", [False, True])
def test_a_reader_that_stalls_stops_the_connection(mutant, monkeypatch):
    """Back-pressure: what is buffered stays bounded, whatever the server has to say. Not so if reading goes on."""
    if mutant:
        monkeypatch.setattr(http, "MOST_BUFFERED", 10**9)

    async def go(url):
        address, batches = Address(url), []
        stream = address.events("/v1/completions", address.fields(), {"max_tokens": 1}, WAIT_S)
        batches.append(await anext(stream))
        if mutant:
            await until(lambda: said and said[-1] == len(lines) - 1, "the server says everything")
        else:
            await until(lambda: paused, "the connection is stopped")
            await asyncio.sleep(0.2)  # the server says what it can
        async for batch in stream:
            batches.append(batch)
        return batches

    class Stopped(Connection):
        """Notes that nothing more is read."""

        def connection_made(self, transport):
            pause = transport.pause_reading
            monkeypatch.setattr(transport, "pause_reading", lambda: (paused.append(1), pause()), raising=False)
            super().connection_made(transport)

    monkeypatch.setattr(http, "Connection", Stopped)

    size = 64 << 10  # of an event: as much as one read brings
    lines = [event({"choices": [], "x": "y" * size, "n": i}) for i in range(3 * MOST_BUFFERED)]
    said, paused = [], []  # numbers of the events that have left the server; one for each time that reading stopped
    note = [lambda n=n: said.append(n) or True for n in range(len(lines))]
    with FakeServer(lambda body: [part for pair in zip(lines, note, strict=True) for part in pair]) as server:
        batches = asyncio.run(go(server.url))
    assert [json.loads(e)["n"] for batch in batches for e in batch] == list(range(len(lines)))
    assert (max(map(len, batches)) <= MOST_BUFFERED + 4) is not mutant


# A real server -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory):
    folder = tiny_model(tiny_folder, tmp_path_factory.mktemp("remote") / "model")
    with serving(folder) as server:
        yield server


def tokens_of(llm):
    """Of all answers that are under way there."""
    return sum(len(r.output_token_ids) for r in list(llm.core.outputs))


def test_silence_is_no_death_while_steps_go_on(server):
    """Asked after each hundredth of a second without a token, and never given up."""

    async def go():
        async with HttpReplica(server.url, silence_s=0.01, answer_s=WAIT_S) as replica:
            asked = 0
            ask = replica._ask

            async def counted():
                nonlocal asked
                asked += 1
                return await ask()

            replica._ask = counted
            return len((await whole(replica, [5, 6], greedy(150))).outputs[0].token_ids), asked

    tokens, _ = asyncio.run(go())
    assert tokens == 150


def test_an_engine_that_hangs_is_death_though_its_server_answers(server, monkeypatch):
    llm = server.state.llm

    async def go():
        async with HttpReplica(server.url, "stuck", silence_s=0.1, answer_s=WAIT_S) as replica:
            outputs = replica.generate([5, 6], greedy(300))
            with held(llm) as steps, monkeypatch.context() as patch:
                first = asyncio.ensure_future(read(outputs, 1))
                await asyncio.to_thread(steps.until, lambda: tokens_of(llm), "it writes")
                await first
                patch.setattr(server.state.lifecycle, "stall_s", 0.2)
                with pytest.raises(ReplicaLost, match="no step has progressed") as caught:
                    await read(outputs, 301)
                assert caught.value.tokens_sent >= 1
                assert not (await replica.refresh()).alive
            while not (await replica.refresh()).alive:  # it goes on
                await asyncio.sleep(0.01)
            assert len((await whole(replica, [5, 6], greedy(3))).outputs[0].token_ids) == 3
            await until(lambda: not llm.core.outputs, "the one that was given up is out")

    asyncio.run(go())


def test_the_state_of_a_server(server, monkeypatch):
    """What /state says, and what a front makes of a server that drains or whose engine has ended."""
    llm, url = server.state.llm, server.url + "/state"

    async def go():
        async with HttpReplica(server.url, "west", answer_s=WAIT_S) as replica:
            good = await replica.refresh()
            monkeypatch.setattr(server.state.lifecycle, "draining", True)
            draining = await replica.refresh()
            with pytest.raises(ReplicaBusy, match="draining") as caught:
                await whole(replica, [5], greedy(1))
            monkeypatch.setattr(server.state.lifecycle, "draining", False)
            assert (await replica.refresh()).ready
            return good, draining, caught.value

    good, draining, refused = asyncio.run(go())
    assert (good.alive, good.ready, good.why, good.model, good.epoch) == (True, True, "", "tiny", llm.epoch)
    assert (good.total_blocks, good.block_size, good.max_model_len) == (64, 16, 512)
    assert (draining.alive, draining.ready, draining.why) == (True, False, "draining")
    assert refused.retry_after_s == 1.0
    dead = ReplicaState("x", alive=False, ready=False, why="the engine has ended: words of somebody's prompt")
    monkeypatch.setattr(app, "snapshot", lambda *_: replace(good, alive=dead.alive, why=dead.why))
    monkeypatch.setattr(server.state.lifecycle, "not_ready", lambda: "the engine has ended")
    told = httpx.get(url)
    assert told.status_code == 200
    assert (told.json()["alive"], told.json()["ready"], told.json()["why"]) == (False, False, "the engine has ended")
    assert "prompt" not in told.text


def test_a_full_queue_sends_a_request_to_the_other(tiny_folder, tmp_path):
    folder = tiny_model(tiny_folder, tmp_path / "model")

    async def go(a, b):
        replicas = [HttpReplica(s.url, name, answer_s=WAIT_S) for s, name in ((a, "a"), (b, "b"))]
        async with DataParallel(replicas, refresh_s=600.0) as both, contextlib.AsyncExitStack() as stack:

            async def writes(name, llm):
                """Its only place is taken for as long as it is held, and it has no queue."""
                steps = stack.enter_context(held(llm))
                outputs = both.replicas[name].generate([5, 6], greedy(400))
                first = asyncio.ensure_future(read(outputs, 1))
                await asyncio.to_thread(steps.until, lambda: tokens_of(llm), "it writes")
                await first
                return outputs

            outputs = await writes("a", a.state.llm)
            both.replicas["a"]._calls.clear()  # as if another front had sent that: it is the least loaded, as far as
            both.replicas["a"]._sent = 0  # this one knows
            got = await whole(both, [7, 8], greedy(5))
            assert both.retried == 1
            assert both.replicas["a"].state().ready
            more = await writes("b", b.state.llm)
            both.replicas["b"]._calls.clear()
            with pytest.raises(ReplicaBusy) as caught:
                await whole(both, [7, 8], greedy(5))
            assert caught.value.retry_after_s >= 1
            await outputs.aclose()
            await more.aclose()
            return got

    one = {"engine": {"max_num_seqs": 1}, "max_queued_requests": 0}
    with serving(folder, **one) as a, serving(folder, **one) as b:
        assert len(asyncio.run(go(a, b)).outputs[0].token_ids) == 5
        for s in (a, b):
            wait_for(lambda s=s: not s.state.llm.core.outputs, "nothing is left")


# Its state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (7, "must be an object"),
        ({"name": 7}, "name must be str"),
        ({"name": "a", "alive": 1}, "alive must be bool"),
        ({"name": "a", "running": True}, "running must be int"),
        ({"name": "a", "waiting": 1.5}, "waiting must be int"),
    ],
)
def test_a_state_that_is_none(data, words):
    with pytest.raises(MinillmError, match=words):
        ReplicaState.from_dict(data)


def test_a_state_of_a_newer_version():
    assert ReplicaState.from_dict({"name": "a", "running": 3, "not_yet": []}) == ReplicaState("a", running=3)


def test_a_front_needs_no_torch():
    """Who only sends requests elsewhere starts at once."""
    code = (
        "import sys, minillm.cluster.data_parallel, minillm.cluster.local_process; "
        "print([m for m in ('torch', 'fastapi', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert out.stdout.strip() == "[]"
