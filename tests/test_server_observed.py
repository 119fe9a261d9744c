"""A whole server, watched: the client's counts are its counters, each request is one trace, and no text comes out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import shutil
import threading
from collections import Counter

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_life import WAIT_S, Wire, wait_for, web
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from minillm import AsyncLLM
from minillm.server.admission import Refusal
from minillm.server.counted import Counted
from minillm.server.local import LocalServer
from minillm.server.trace_file import read_traces
from minillm.server.tracing import CODES, FLAGS, NUMBERS, STAGES

CANARY = "canary7f3a19"
KEY = f"sk-{CANARY}"


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    """A random Qwen3 of 211 words, one of which is the canary."""
    folder = tmp_path_factory.mktemp("observed") / "model"
    shutil.copytree(tiny_folder("qwen3"), folder)
    words = {f"w{i}" if i != 101 else CANARY: i for i in range(211)}
    backend = Backend(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def server(folder, tmp_path):
    with (
        AsyncLLM(folder, num_kv_blocks=12, max_model_len=64, dtype="float32") as llm,
        LocalServer(llm, served_model_name="tiny", api_key=KEY, trace_file=tmp_path / "t.jsonl") as server,
    ):
        yield server


def post(server, body, path="/v1/completions", key=KEY, **headers):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **headers}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(server.url + path, content=content, headers=headers, timeout=WAIT_S)


def settled(server, requests):
    """The records of so many requests. A server records after its last byte: a client may look too soon."""
    wait_for(lambda: server.state.traces.written + server.state.traces.lost >= requests, "they are recorded")
    return list(read_traces(server.config.trace_file))


def counters(server):
    """{(name, value of the label that matters): count}"""
    out = Counter()
    for f in text_string_to_metric_families(web.get(server.url + "/metrics").text):
        for s in f.samples:
            for label in ("kind", "status", "finished_reason", "code"):
                if label in s.labels:
                    out[s.name.removeprefix("minillm:"), s.labels[label]] += s.value
            if set(s.labels) == {"model_name"}:
                out[s.name.removeprefix("minillm:"), ""] += s.value
    return out


def test_the_servers_own_first_generation_is_nobodys(server):
    seen = counters(server)
    assert seen["requests_total", ""] == seen["time_to_first_token_seconds_count", ""] == 0
    assert seen["generation_tokens_total", ""] == 0
    assert seen["ready", ""] == 1


def test_the_clients_counts_are_the_servers(server):
    """C1 and C5: what a client is told, by status, is what was counted; and so are tokens."""
    asked = {"model": "tiny", "prompt": "w5 w6", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    wrong = [
        (asked | {"temperature": 99999}, {}, "format"),
        (asked | {"model": "other"}, {}, "format"),
        (b"{", {}, "format"),
        (asked, {"key": "sk-wrong"}, "auth"),
        (asked | {"prompt": "w5 " * 100}, {}, "format"),
        (asked | {"messages": 3}, {"path": "/v1/chat/completions"}, "format"),
        (
            {"model": "tiny", "messages": [{"role": "user", "content": "w1"}], "tools": [{"type": "function"}]},
            {"path": "/v1/chat/completions"},
            "tool",
        ),
    ]
    told, tokens, kinds = Counter(), Counter(), Counter()
    for _ in range(3):
        done = post(server, asked)
        told[done.status_code] += 1
        tokens.update({k: v for k, v in done.json()["usage"].items() if isinstance(v, int)})
    for body, how, kind in wrong:
        done = post(server, body, **how)
        told[done.status_code] += 1
        kinds[kind] += 1
        assert done.status_code >= 400, body
    settled(server, sum(told.values()))
    wait_for(lambda: sum(of_http(server).values()) >= sum(told.values()), "all are counted")
    seen = counters(server)
    for status, count in told.items():
        assert seen["http_requests_total", str(status)] == count, status
    for kind, count in kinds.items():
        assert seen["request_errors_total", kind] == count, kind
    assert seen["request_success_total", "length"] == seen["requests_total", ""] == told[200] == 3
    assert seen["prompt_tokens_total", ""] == tokens["prompt_tokens"]
    assert seen["generation_tokens_total", ""] == tokens["completion_tokens"] == 12
    assert seen["metric_faults_total", ""] == 0


def test_who_is_turned_away_is_counted_by_code(folder):
    """C1: a rejection is no failure, and no request of the engine's."""

    class Full:
        def admit(self, ask, queue):
            return Refusal(429, "come later", "queue_full", 2.0)

    with (
        AsyncLLM(folder, num_kv_blocks=12, max_model_len=64, dtype="float32") as llm,
        LocalServer(llm, served_model_name="tiny", admission=Full()) as server,
    ):
        body = {"model": "tiny", "prompt": "w5", "max_tokens": 2}
        told = Counter(post(server, body).status_code for _ in range(5))
        assert told == {429: 5}
        wait_for(lambda: sum(of_http(server).values()) >= 5, "all are counted")
        seen = counters(server)
        assert seen["requests_rejected_total", "queue_full"] == seen["http_requests_total", "429"] == 5
        assert sum(v for (name, _), v in seen.items() if name == "request_errors_total") == 0
        assert seen["requests_total", ""] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_each_request_is_one_trace_with_all_its_stages(server, stream):
    """A3: the id that the client has is the id of the record, of the engine's events and of nobody else."""
    body = {"model": "tiny", "prompt": "w5 w6", "max_tokens": 4, "temperature": 0, "stream": stream, "ignore_eos": True}
    mine = post(server, body, **{"X-Request-Id": "mine-1"})
    other = post(server, body)
    lost = post(server, body | {"top_p": 7})
    records = {r["id"]: r for r in settled(server, 3)}
    assert len(records) == 3
    assert mine.headers["x-request-id"] == "mine-1"
    for answer in (mine, other):
        record = records[answer.headers["x-request-id"]]
        assert {s for s, *_ in record["spans"]} == set(STAGES)
        assert all(a[2] == b[1] for a, b in itertools.pairwise(record["spans"]))
        assert sum(e - b for _, b, e in record["spans"]) == record["e2e_ns"]
        assert (record["status"], record["error"], record["finish_reason"]) == (200, None, "length")
        assert (record["prompt_tokens"], record["output_tokens"], record["stream"]) == (2, 4, stream)
    record = records[lost.headers["x-request-id"]]
    assert record["status"] == 400
    assert record["error"]
    assert not {"queue", "prefill", "decode"} & {s for s, *_ in record["spans"]}
    queued = {e.request_id for e in server.state.llm.engine.events.of("queued")}
    assert any("mine-1" in name for name in queued)


def test_no_text_of_a_user_comes_out_anywhere(server, caplog, capfd):
    """C8: the canary is in every place where a client can write, in good requests and bad ones."""
    caplog.set_level(logging.DEBUG)
    good = {"model": "tiny", "prompt": f"{CANARY} {CANARY}", "max_tokens": 3, "user": CANARY, "stop": [CANARY]}
    assert post(server, good).status_code == 200
    assert post(server, good | {"stream": True}).status_code == 200
    for body in (
        good | {"model": CANARY}, good | {CANARY: 1}, good | {"top_p": CANARY}, good | {"logit_bias": {CANARY: 1}},
        f'{{"prompt": "{CANARY}'.encode(), good | {"prompt": f"{CANARY} " * 100}, good | {"tools": [CANARY]},
    ):  # fmt: skip
        assert post(server, body).status_code >= 400
    assert post(server, good, key=f"{KEY}-wrong").status_code == 401
    web.get(f"{server.url}/{CANARY}?{CANARY}={CANARY}")
    web.request(CANARY.upper(), server.url + "/v1/models")
    records = settled(server, 10)
    text = web.get(server.url + "/metrics").text
    out, err = capfd.readouterr()
    # The client's own loggers, and one that nobody hears but pytest, which listens to it in spite of this:
    assert not logging.getLogger("uvicorn.access").propagate
    others = ("httpx", "httpcore", "uvicorn.access")
    log = "\n".join(r.getMessage() for r in caplog.records if not r.name.startswith(others))
    places = {"metrics": text, "traces": json.dumps(records), "log": log, "output": out + err}
    assert len(records) == 10
    assert {r["user"] for r in records if "user" in r} == {server.state.traces.hash(CANARY)}
    for where, what in places.items():
        assert CANARY not in what.lower(), where


def of_http(server):
    """{(route, method, status): count}, what has ended so far."""
    families = text_string_to_metric_families(server.state.metrics.render().decode())
    samples = [s for f in families for s in f.samples if s.name == "minillm:http_requests_total"]
    return {tuple(s.labels[k] for k in ("route", "method", "status")): s.value for s in samples}


def test_every_request_is_counted_by_the_template_of_its_route(server):
    """C1, for all routes: also for what no route takes, and never by a path that a client has made up."""
    head = {"Authorization": f"Bearer {KEY}"}
    for path in ("/health", "/v1/models", "/v1/models/tiny", "/v1/models/nobody", "/openapi.json", f"/{CANARY}", "/"):
        web.get(server.url + path, headers=head)
    web.get(server.url + "/v1/completions")
    web.post(server.url + "/tokenize", headers=head, json={"prompt": "w5"})
    web.post(server.url + "/tokenize", json={"prompt": "w5"})
    web.request(CANARY.upper(), server.url + "/v1/models")
    post(server, {"model": "tiny", "prompt": "w5", "max_tokens": 2})
    want = {
        ("/health", "GET", "200"): 1, ("/v1/models", "GET", "200"): 1, ("/v1/models/{name:path}", "GET", "200"): 1,
        ("/v1/models/{name:path}", "GET", "404"): 1, ("/openapi.json", "GET", "200"): 1, ("none", "GET", "404"): 1,
        ("/", "GET", "200"): 1, ("/v1/completions", "GET", "405"): 1, ("/tokenize", "POST", "200"): 1,
        ("/tokenize", "POST", "401"): 1, ("/v1/models", "other", "405"): 1, ("/v1/completions", "POST", "200"): 1,
    }  # fmt: skip
    wait_for(lambda: sum(of_http(server).values()) >= len(want), "all are counted")
    assert of_http(server) == want


def test_a_connection_too_many_is_counted(folder):
    with (
        AsyncLLM(folder, num_kv_blocks=12, max_model_len=64, dtype="float32") as llm,
        LocalServer(llm, max_connections=1) as server,
        httpx.Client(timeout=WAIT_S) as first,
    ):
        assert first.get(server.url + "/health").status_code == 200
        assert web.get(server.url + "/v1/models").status_code == 503
        assert web.get(server.url + "/health").status_code == 200
        want = {("/health", "GET", "200"): 2, ("none", "GET", "503"): 1}
        wait_for(lambda: sum(of_http(server).values()) >= 3, "all are counted")
        assert of_http(server) == want
        assert "minillm:requests_rejected_total{" in (text := server.state.metrics.render().decode())
        assert 'code="too_many_connections"' in text


def test_an_error_in_a_stream_has_the_status_that_was_sent(server, monkeypatch):
    """The status line said 200. That the answer failed is another counter's."""
    runner = server.state.llm.engine.runner
    forward, steps, begun = runner.forward, [], threading.Event()

    def fails(*args, **kwargs):
        steps.append(1)
        if len(steps) == 4:
            begun.wait(WAIT_S)  # before the first byte it would be a plain 500
            raise RuntimeError("the device is gone")
        return forward(*args, **kwargs)

    monkeypatch.setattr(runner, "forward", fails)
    body = {"model": "tiny", "prompt": "w5 w6", "max_tokens": 20, "temperature": 0, "stream": True, "ignore_eos": True}
    key = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, headers=key, timeout=WAIT_S) as done:
        lines = done.iter_lines()
        text = next(lines)
        begun.set()
        text += "".join(lines)
    assert done.status_code == 200
    assert '"error"' in text
    wait_for(lambda: of_http(server), "it is counted")
    assert of_http(server) == {("/v1/completions", "POST", "200"): 1}
    assert counters(server)["request_errors_total", "engine"] == 1
    (record,) = settled(server, 1)
    assert (record["status"], record["error"]) == (500, "internal_error")


@pytest.mark.parametrize("stream", [False, True])
def test_every_field_of_a_record_is_known_to_somebody(server, stream):
    body = {"model": "tiny", "prompt": "w5 w6", "max_tokens": 4, "temperature": 0, "stream": stream, "ignore_eos": True}
    done = post(server, body)
    (record,) = settled(server, 1)
    assert {*NUMBERS, *FLAGS, *CODES} <= set(record)
    assert record["max_tokens"] == 4
    assert record["request_bytes"] == len(json.dumps(body))
    assert record["response_bytes"] == len(done.content) > 0


FAILURES = {
    "wrong key": (lambda s: post(s, {"prompt": "w5"}, key="sk-no"), ["auth"]),
    "leaves in its body": (lambda s: half_a_body(s), ["auth", "ingress"]),
    "no JSON": (lambda s: post(s, b"{"), ["auth", "ingress", "preprocess"]),
    "too long": (lambda s: post(s, {"prompt": [5] * 64}), ["auth", "ingress", "preprocess", "admit"]),
    "deadline over": (lambda s: post(s, {"prompt": "w5", "deadline_s": 1e-9}), ["auth", "ingress", "preprocess"]),
}


def half_a_body(server):
    with Wire(server.port) as wire:
        wire.post({"prompt": "w5"}, headers=f"Authorization: Bearer {KEY}\r\n", cut=-3)


@pytest.mark.parametrize("case", list(FAILURES))
def test_who_fails_fails_in_a_stage(server, case):
    """What took the time of a request that failed is the stage in which it failed, not the sending of the error."""
    fail, stages = FAILURES[case]
    fail(server)
    (record,) = settled(server, 1)
    assert record["error"]
    assert [stage for stage, *_ in record["spans"]] == [*stages, "post"]


def test_a_failure_has_bytes_too(server):
    done = post(server, {"model": "other", "prompt": "w5"})
    (record,) = settled(server, 1)
    assert record["response_bytes"] == len(done.content)
    assert "max_tokens" not in record


def test_what_is_not_http_is_counted(server):
    with Wire(server.port) as wire:
        wire.socket.sendall(b"\x16\x03\x01\r\n\r\n")
        assert wire.head()[0] == 400
    wait_for(lambda: of_http(server), "it is counted")
    assert of_http(server) == {("none", "other", "400"): 1}


@pytest.mark.parametrize(
    ("sends", "raises", "status"),
    [
        ((201,), None, 201),
        ((), None, 499),
        ((), ValueError(), 500),
        ((200,), ValueError(), 200),
        ((200, 500), None, 200),
    ],
)
def test_the_status_that_counts_is_the_one_that_was_sent(sends, raises, status):
    """Nothing sent and nothing raised: the client had left. A second head is refused by the ASGI server."""
    counted, sent = [], []

    async def app(scope, receive, send):
        for code in sends:
            await send({"type": "http.response.start", "status": code, "headers": []})
        if raises is not None:
            raise raises

    async def send(message):
        sent.append(message["status"])

    call = Counted(app, lambda *what: counted.append(what))({"type": "http", "method": "GET", "path": "/"}, None, send)
    with contextlib.suppress(ValueError):
        asyncio.run(call)
    assert [c[:3] for c in counted] == [(None, "GET", status)]
    assert counted[0][3] >= 0
    assert sent == list(sends)
