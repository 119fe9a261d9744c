"""One client must not be able to hold up the others, nor be refused because of itself."""

from __future__ import annotations

import contextlib
import json
import selectors
import threading
import time
from collections import Counter

import pytest
from server_life import SMALL, WAIT_S, WORDS, Wire, body, metric, serving, settled, tiny_model, wait_for

from minillm import AsyncLLM
from minillm.errors import RequestError
from minillm.request import SamplingParams
from minillm.server import generation, tokens
from minillm.server.config import ServerConfig
from minillm.server.generation import IN_THREAD
from minillm.server.tokens import CONTEXTS, MAX_WAITING, WORKERS
from minillm.server.trace_file import read_traces

PLACES, QUEUE = 2, 10


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return tiny_model(tiny_folder, tmp_path_factory.mktemp("fair") / "model")


def ask(server, data, path="/v1/completions", headers=""):
    with Wire(server.port) as wire:
        return wire.post(data, path, headers).answer()


def test_many_prompts_of_one_request_are_not_refused_because_of_each_other(folder):
    with serving(folder, engine={"max_num_seqs": PLACES}, max_queued_requests=QUEUE) as server:
        status, _, answer = ask(server, body([[i + 1] for i in range(PLACES + QUEUE)], 2))
        assert status == 200, answer
        assert len(answer["choices"]) == PLACES + QUEUE
        status, _, answer = ask(server, body([[i + 1] for i in range(PLACES + QUEUE + 1)], 2))
        assert (status, answer["error"]["param"]) == (400, "prompt")
        assert metric(server, "requests_rejected_total") == 0
        settled(server)


def test_a_key_that_tokenises_pays_requests(folder, tmp_path):
    file = tmp_path / "tenants.toml"
    file.write_text('[tenants.a]\nkeys = ["sk-aaaaaaaaaaaaaaaaaaaa"]\nrequests_per_minute = 2\n')
    key = "Authorization: Bearer sk-aaaaaaaaaaaaaaaaaaaa\r\n"
    with serving(folder, tenants=file) as server:
        assert ask(server, {"prompt": "w5"}, "/tokenize", key)[0] == 200
        assert ask(server, {"tokens": [5]}, "/detokenize", key)[0] == 200
        status, headers, answer = ask(server, {"prompt": "w5"}, "/tokenize", key)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_requests")
        assert int(headers["retry-after"]) >= 1
        assert ask(server, body(), headers=key)[0] == 429  # it is the same bucket
        assert metric(server, "requests_rejected_total", code="rate_limit_requests") == 2


@pytest.mark.parametrize(("path", "many", "field"), [
    ("/tokenize", lambda n: {"prompt": "w5 " * n, "return_token_strs": True}, "prompt"),
    ("/detokenize", lambda n: {"tokens": [5] * n}, "tokens"),
])  # fmt: skip
def test_a_few_contexts_are_tokenised_and_no_more(folder, path, many, field):
    with serving(folder, engine={"max_model_len": 64}) as server:
        assert ask(server, many(CONTEXTS * 64), path)[0] == 200
        status, _, answer = ask(server, many(CONTEXTS * 64 + 1), path)
        assert (status, answer["error"]["param"]) == (400, field)


def test_replies_of_tokenize_are_made_beside_the_loop(folder, monkeypatch):
    with serving(folder) as server:
        threads, make = [], tokens.to_json
        monkeypatch.setattr(tokens, "to_json", lambda data: (threads.append(threading.current_thread()), make(data))[1])
        monkeypatch.setattr(
            tokens, "tokenized", lambda *a: (threads.append(threading.current_thread()), {"tokens": [1]})[1]
        )
        assert ask(server, {"prompt": "w5"}, "/tokenize")[0] == 200
        assert len(threads) == 2
        assert server._thread not in threads


def test_many_that_tokenise_leave_threads_to_those_that_generate(folder, monkeypatch):
    """As many as may wait, and their work does not end: a long prompt is answered; one more is told to come later."""
    go = threading.Event()
    with serving(folder) as server, contextlib.ExitStack() as held:
        held.callback(go.set)
        monkeypatch.setattr(tokens, "detokenized", lambda *_: go.wait(WAIT_S) and {"prompt": ""})
        wires = [held.enter_context(Wire(server.port)) for _ in range(WORKERS + MAX_WAITING + 1)]
        for wire in wires:
            wire.post({"tokens": [5]}, "/detokenize")
        first = selectors.DefaultSelector()
        for wire in wires:
            first.register(wire.socket, selectors.EVENT_READ, wire)
        ((key, _),) = first.select(WAIT_S)  # one is answered, and it is the one too many
        status, headers, _ = key.data.answer()
        assert (status, headers["retry-after"]) == (429, "1")
        long = ("w5" + " " * 20) * 400
        assert len(long) > IN_THREAD
        assert ask(server, body(long, 2))[0] == 200
        go.set()
        assert [wire.answer()[0] for wire in wires if wire is not key.data] == [200] * (WORKERS + MAX_WAITING)


def test_an_id_belongs_to_nobody(folder):
    """Two clients with one id, at once: both are answered, and neither learns that there is another."""
    with serving(folder) as server, Wire(server.port) as first:
        head = "X-Request-Id: same\r\n"
        events = first.post(body(max_tokens=400, stream=True), headers=head)
        assert events.head()[1]["x-request-id"] == "same"
        status, headers, answer = ask(server, body(n=2, temperature=1.0), headers=head)
        assert (status, headers["x-request-id"], answer["id"]) == (200, "same", "cmpl-same")
        first.close()
        settled(server)
        names = {e.request_id for e in server.state.llm.engine.events.of("queued")}
        mine = {name for name in names if name.startswith("same~")}
        assert len(mine) == 3
        assert len({name.split("-")[0] for name in mine}) == 2


def test_all_bodies_together_are_bounded(folder):
    with serving(folder) as server, Wire(server.port) as slow:
        server.state.bodies.together = 400
        raw = json.dumps(body("w5 " * 60)).encode()
        slow.post(body("w5 " * 60), cut=-1)
        wait_for(lambda: server.state.bodies.held > len(raw) - 100, "most of it is there")
        status, headers, answer = ask(server, body("w5 " * 60))
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "too_many_bodies", "1")
        assert ask(server, body())[0] == 200  # a short one has room
        slow.socket.sendall(raw[-1:])
        assert slow.answer()[0] == 200
        assert server.state.bodies.held == 0
        assert ask(server, body("w5 " * 60))[0] == 200


def test_a_long_body_is_parsed_beside_the_loop(folder, monkeypatch):
    with serving(folder) as server:
        threads, parse = [], generation.parse_body
        monkeypatch.setattr(
            generation, "parse_body", lambda *a: (threads.append(threading.current_thread()), parse(*a))[1]
        )
        assert ask(server, body())[0] == 200
        assert ask(server, body("w5" + " " * IN_THREAD))[0] == 200
        assert [t is server._thread for t in threads] == [True, False]


@pytest.mark.parametrize(("given", "context", "longest", "expected"), [
    (None, 8192, 16, 4 * 8192 * 16), (None, 512, 4, 64 << 10), (None, 131_072, 128, 1 << 20),
    (None, 512, None, 1 << 20), (4 << 20, 512, 4, 4 << 20), (100, 512, 4, 100),
])  # fmt: skip
def test_how_long_a_body_may_be_follows_from_the_context(given, context, longest, expected):
    assert ServerConfig(max_body_bytes=given).body_bytes(context, longest) == expected


def test_each_stage_has_the_time_of_its_work(folder, monkeypatch, tmp_path):
    """Each piece of work sleeps for another time. Only what a stage must have at least is asserted."""

    class Slow:
        def admit(self, ask, queue):
            time.sleep(0.2)

    def slowly(work, seconds):
        return lambda *a, **k: (time.sleep(seconds), work(*a, **k))[1]

    with serving(folder, admission=Slow(), trace_file=tmp_path / "traces") as server:
        tokenizer = server.state.tokenizer
        monkeypatch.setattr(generation, "parse_body", slowly(generation.parse_body, 0.3))
        monkeypatch.setattr(tokenizer, "render_chat", slowly(tokenizer.render_chat, 0.3))
        monkeypatch.setattr(tokenizer, "encode", slowly(tokenizer.encode, 0.3))
        chat = {"messages": [{"role": "user", "content": "w5"}], "max_tokens": 2}
        assert ask(server, chat, "/v1/chat/completions")[0] == 200
        settled(server)
        assert server.state.traces.flush(WAIT_S)
        (record,) = read_traces(tmp_path / "traces")
    took = Counter()
    for stage, begin, end in record["spans"]:
        took[stage] += end - begin
    assert took["preprocess"] >= 0.9e9  # parsed, templated, tokenised: none of it is anybody else's
    assert took["admit"] >= 0.4e9
    assert took.total() == record["e2e_ns"]


def test_the_ids_of_a_prompt_are_judged_once_for_all_its_completions(folder):
    """128 completions of a long prompt would otherwise hold up the loop for a million checks."""
    judged = []

    class Token(int):
        """No plain int, so each is looked at alone."""

        def __ge__(self, other):
            judged.append(self)
            return int(self) >= other

        def __le__(self, other):
            judged.append(self)
            return int(self) <= other

    with AsyncLLM(folder, **SMALL) as llm:
        requests = llm._requests([Token(5), Token(6)], SamplingParams(n=16, max_tokens=1))
        assert len(requests) == 16
        assert len(judged) == 2
        assert all(r.prompt_token_ids is requests[0].prompt_token_ids for r in requests)
        assert list(map(type, requests[0].prompt_token_ids)) == [int, int]
        for wrong in ([WORDS], [-1], [True], [1.0], ["1"], [1, None], []):
            with pytest.raises(RequestError, match="prompt"):
                llm._requests(wrong, SamplingParams(n=2))
