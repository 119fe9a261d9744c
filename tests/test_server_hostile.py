"""Input that means harm, over raw sockets: it is refused in OpenAI's words, and nothing is left of it.

After each: the server is healthy and ready, no call is under way, every count is back at zero, the engine is idle.
"""

from __future__ import annotations

import json
import threading

import httpx
import pytest
from measured_server import Measured
from server_life import WAIT_S, Wire, body, serving, settled, tiny_model, wait_for

from minillm.server import generation, tokens

MAX_BODY = 256 << 10
JSON = "Content-Type: application/json\r\n"
PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return tiny_model(tiny_folder, tmp_path_factory.mktemp("hostile") / "model")


@pytest.fixture(scope="module")
def shared(folder):
    with serving(folder, max_body_bytes=MAX_BODY) as server:
        yield server


@pytest.fixture
def server(shared):
    yield shared
    unharmed(shared)


def unharmed(server):
    settled(server)
    with Wire(server.port) as wire:
        assert wire.get("/health").answer()[0] == 200
        assert wire.get("/ready").answer()[0] == 200
        status, _, answer = wire.post(body(max_tokens=2)).answer()
        assert (status, answer["usage"]["completion_tokens"]) == (200, 2)
    settled(server)


def is_error(answer):
    """OpenAI's shape, and nothing else."""
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert isinstance(answer["error"]["message"], str)
    assert answer["error"]["message"]
    return answer["error"]


def sent(server, raw):
    """(status, answer) of raw bytes."""
    with Wire(server.port) as wire:
        wire.socket.sendall(raw)
        status, _, answer = wire.answer()
        return status, answer


def request(path, content, headers=JSON, method="POST"):
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n{headers}\r\n".encode() + content


def refused(server, path, content, headers=JSON, method="POST"):
    status, answer = sent(server, request(path, content, headers, method))
    assert 400 <= status < 500, answer
    return status, is_error(answer)


# Size and time ------------------------------------------------------------------------------------------------------


def pour(wire, total, piece=b"x" * 65536):
    """Send until the server has had enough. Returns how many bytes it let in."""
    done = 0
    try:
        while done < total:
            done += wire.socket.send(piece)
    except (ConnectionError, TimeoutError):
        pass
    return done


@pytest.mark.parametrize("path", PATHS)
def test_a_body_of_100_mb_is_refused_by_its_head(server, path):
    """Before a byte of it has come."""
    with Wire(server.port) as wire:
        wire.socket.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\n{JSON}Content-Length: {100 << 20}\r\n\r\n".encode())
        status, _, answer = wire.answer()
        assert status == 413
        assert f"{MAX_BODY:,}" in is_error(answer)["message"]


def test_what_is_sent_all_the_same_takes_no_memory(folder):
    """In a process of its own: in this one, what the tests before left is given back, and their threads take more."""
    piece, most, long = b"x" * 65536, 50 << 20, f"Content-Length: {100 << 20}"
    ways = {long: piece, "Transfer-Encoding: chunked": b"10000\r\n%s\r\n" % piece}
    with Measured(folder, max_body_bytes=MAX_BODY, body_timeout_s=WAIT_S) as server:

        def send(head, part, total):
            wire.socket.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{JSON}{head}\r\n\r\n".encode())
            pour(wire, total, part)

        with Wire(server.port) as wire:
            assert wire.post(body(max_tokens=2)).answer()[0] == 200
        before = server("resident()")
        for head, part in ways.items():
            with Wire(server.port) as wire:
                send(head, part, 100 << 20)
                assert server("resident()") - before < most
                with Wire(server.port) as other:  # nobody waits for it
                    assert other.get("/health").answer()[0] == 200
        server("vars(server.state.bodies).update(max_bytes=1 << 30, together=1 << 30)")
        with Wire(server.port) as wire:  # one that is let in is seen
            send(long, piece, 99 << 20)
            wait_for(lambda: server("server.state.bodies.held") >= 99 << 20, "most of it is there")
            assert server("resident()") - before > most
        server("settled(server)")


def test_clients_get_the_answer_although_their_body_is_too_long(server):
    """A client that sends first and reads later must not lose the answer to a reset."""
    for _ in range(5):
        answer = httpx.post(server.url + "/v1/completions", json={"prompt": "x" * (3 * MAX_BODY)}, timeout=60)
        assert answer.status_code == 413
        is_error(answer.json())


def test_a_chunked_body_beyond_the_limit(server):
    piece = b"x" * 65536
    with Wire(server.port) as wire:
        wire.socket.sendall(f"POST /tokenize HTTP/1.1\r\nHost: x\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(MAX_BODY // len(piece) + 1):
            wire.socket.sendall(b"10000\r\n" + piece + b"\r\n")
        status, _, answer = wire.answer()
        assert status == 413
        is_error(answer)


def test_a_body_that_is_announced_and_never_sent(folder):
    with serving(folder, body_timeout_s=0.3) as server:
        for path in PATHS:
            with Wire(server.port) as wire:
                wire.socket.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\n{JSON}Content-Length: 100\r\n\r\n{{".encode())
                status, _, answer = wire.answer()
                assert status == 408
                is_error(answer)
        unharmed(server)


# Bodies ---------------------------------------------------------------------------------------------------------------

DEEP = 80_000
BROKEN = {
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "a text": b'"x"',
    "cut": b'{"prompt": "x"',
    "NUL": b'{"prompt\x00": 1}',
    "only NUL": b"\x00" * 100,
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "half a pair": b'{"prompt": "\\ud800"}',
    "half a pair as a key": b'{"\\ud800": 1}',
    "NaN": b'{"prompt": "x", "top_p": NaN}',
    "Infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "1e999": b'{"prompt": "x", "temperature": 1e999}',
    "digits": b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    "2**64": b'{"prompt": "x", "seed": 18446744073709551616}',
    "lists": b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "open lists": b"[" * DEEP,
    "objects": b'{"a":' * (DEEP // 3) + b"1" + b"}" * (DEEP // 3),
    "twice": b'{"prompt": "x", "prompt": "y"}',
    "proto": b'{"__proto__": {"admin": true}, "prompt": "x"}',
    "class": b'{"prompt": "x", "__class__": "y"}',
    "a number as a prompt": b'{"prompt": 1e308}',
    "true as a token": b'{"prompt": [true]}',
    "negative": b'{"prompt": [-1]}',
    "beyond the vocabulary": b'{"prompt": [2147483647]}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_bodies(server, name):
    for path in PATHS:
        status, error = refused(server, path, BROKEN[name])
        assert status == 400, (path, error)
        assert len(error["message"]) < 2000


MANY = {
    "stop strings": body(stop=["s"] * 10_000), "long stop string": body(stop="s" * 100_000),
    "biases": body(logit_bias={str(i): 1 for i in range(20_000)}), "stop tokens": body(stop_token_ids=[1] * 20_000),
    "prompts": body(prompt=["w"] * 20_000), "n": body(n=10**6), "max_tokens": body(max_tokens=10**12),
    "top_logprobs": body(logprobs=10**6), "keys": body() | {f"key{i}": 1 for i in range(10_000)},
    "a long user": body(user="u" * 100_000), "a long model": body(model="m" * 100_000),
    "token ids": body(prompt=[5] * 60_000), "text": body(prompt="w5 " * 60_000),
}  # fmt: skip


@pytest.mark.parametrize("name", MANY)
def test_too_many_of_a_thing(server, name):
    status, error = refused(server, "/v1/completions", json.dumps(MANY[name]).encode())
    assert status == (404 if name == "a long model" else 400)
    assert len(error["message"]) < 2000


def test_large_bodies_do_not_hold_up_the_others(folder, monkeypatch):
    """While each is judged, /health is asked and answered."""
    messages = [{"role": "user", "content": "w5"}] * 100_000
    large = [
        ({"messages": messages}, "/v1/chat/completions"),
        (body(logit_bias={str(i): 1 for i in range(200_000)}), "/v1/completions"),
        ({"prompt": "w5 " * 1_000_000}, "/tokenize"),
        (body(prompt=["w5"] * 500_000), "/v1/completions"),
    ]
    health, judged, over = [], [], threading.Event()

    def beside(parse):
        def judge(raw, kind):
            before = len(health)
            wait_for(lambda: len(health) >= before + 2, "others are answered")  # the second has asked since
            judged.append(len(raw))
            return parse(raw, kind)

        return judge

    with serving(folder, max_body_bytes=4 << 20) as server:

        def probe():
            with Wire(server.port) as wire:
                while not over.is_set():
                    health.append(wire.get("/health").answer()[0])

        for module in (generation, tokens):
            monkeypatch.setattr(module, "parse_body", beside(module.parse_body))
        thread, sizes = threading.Thread(target=probe), []
        thread.start()
        try:
            for data, path in large:
                raw = json.dumps(data).encode()
                sizes.append(len(raw))
                assert len(raw) < server.state.bodies.max_bytes
                assert sent(server, request(path, raw))[0] in (200, 400)
        finally:
            over.set()
            thread.join()
        monkeypatch.undo()
        assert judged == sizes
        assert set(health) == {200}
        unharmed(server)


# HTTP -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "text/json"]
)
def test_a_form_of_another_page_cannot_generate(server, kind):
    """CSRF: a browser sends these types to another host without asking; application/json it does not."""
    queued = len(server.state.llm.engine.events.of("queued"))
    for path in PATHS:
        headers = f"Content-Type: {kind}\r\nOrigin: http://evil.example\r\n" if kind else ""
        status, error = refused(server, path, json.dumps(body()).encode(), headers)
        assert status == 415
        assert "application/json" in error["message"]
    assert len(server.state.llm.engine.events.of("queued")) == queued
    wants = ("Origin: http://evil.example", "Access-Control-Request-Method: POST",
             "Access-Control-Request-Headers: content-type")  # fmt: skip
    ask = "".join(f"{line}\r\n" for line in wants)
    with Wire(server.port) as wire:  # and when it asks, it is not allowed
        wire.socket.sendall(request("/v1/completions", b"", ask, "OPTIONS"))
        status, headers, answer = wire.answer()
        assert status == 405
        is_error(answer)
        assert not [name for name in headers if name.startswith("access-control-")]


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "TRACE", "BREW", "HEAD"])
def test_methods_that_no_route_has(server, method):
    for path in ("/v1/completions", "/health", "/page.js"):
        with Wire(server.port) as wire:
            wire.socket.sendall(request(path, b"", "", method))
            status, headers = wire.head()
            assert status == 405
            assert headers["allow"] in ("POST", "GET")
            if method != "HEAD":
                raw = wire.until(b"}}")
                is_error(json.loads(raw + b"}}"))


TRAVERSALS = [
    "/../etc/passwd", "/page.js/../../../etc/passwd", "/..%2f..%2fetc%2fpasswd", "/%2e%2e/%2e%2e/etc/passwd",
    "/page.js%00.html", "/page.js/", "/%2fpage.js", "//etc/passwd", "/static/page.js", "/page.js%2f..%2fpage.html",
    "/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/v1/models/%ff%fe", "/v1/models/%00",
    "/v1/models/" + "a" * 5000, "/v1/models/", "/v1/models/tiny%0d%0aSet-Cookie:%20x=1", "/timeline?since=-1",
    "/timeline?since=%F0%9F%92%A9", "/timeline?since=" + "9" * 500, "/" + "%41" * 3000,
]  # fmt: skip


@pytest.mark.parametrize("path", TRAVERSALS, ids=lambda p: p[:40])
def test_paths_that_lead_elsewhere(server, path):
    with Wire(server.port) as wire:
        status, headers, answer = wire.get(path).answer()
        assert status in (400, 404)
        assert len(is_error(answer)["message"]) < 400
        assert "set-cookie" not in headers


BAD_HTTP = {
    "rubbish": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" * 9 + b"\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two lengths": b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a negative length": b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "a length of many digits": b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    "a NUL in a header": b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\x00b\r\n\r\n",
    "a header flood": b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-A: b\r\n" * 20_000 + b"\r\n",
    "a long header": b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"b" * 200_000 + b"\r\n\r\n",
    "a long address": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD_HTTP)
def test_what_is_no_http(server, name):
    """400 in OpenAI's shape, and the connection is closed."""
    with Wire(server.port) as wire:
        pour(wire, 1, BAD_HTTP[name])
        status, headers = wire.head()
        assert status == 400
        assert headers["connection"] == "close"
        wire.closed()
        is_error(json.loads(wire.bytes))


@pytest.mark.parametrize("name", ["a b", "a/b", "x" * 129, "é", "<script>", "a;b", "\"'", "..%2f", "\t", " "])
def test_ids_of_requests_with_odd_characters(server, name):
    raw = b"X-Request-Id: " + name.encode() + b"\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    content = json.dumps(body()).encode()
    with Wire(server.port) as wire:
        wire.socket.sendall(head + raw + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        status, headers, answer = wire.answer()
        assert status == 400
        assert is_error(answer)["param"] == "X-Request-Id"
        assert name not in headers.get("x-request-id", "") or not name.strip()


def test_expect_100_continue(server):
    content = json.dumps(body()).encode()
    with Wire(server.port) as wire:
        head = request("/v1/completions", content, f"{JSON}Expect: 100-continue\r\n").removesuffix(content)
        wire.socket.sendall(head)
        assert wire.until(b"\r\n\r\n").startswith(b"HTTP/1.1 100")
        wire.socket.sendall(content)
        assert wire.answer()[0] == 200
    with Wire(server.port) as wire:  # one that is too long is told at once
        wire.socket.sendall(head.replace(str(len(content)).encode(), str(100 << 20).encode()))
        status, _, answer = wire.answer()
        assert status == 413
        is_error(answer)


def test_http_1_0_and_pipelined_requests(server):
    content = json.dumps(body(max_tokens=2)).encode()
    with Wire(server.port) as wire:
        wire.socket.sendall(request("/v1/completions", content).replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert wire.answer()[0] == 200
        assert wire.closed()
    with Wire(server.port) as wire:  # a stream of unknown length ends with its connection
        stream = json.dumps(body(max_tokens=2, stream=True)).encode()
        wire.socket.sendall(request("/v1/completions", stream).replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert wire.head()[0] == 200
        wire.closed()
        assert b"data: [DONE]" in wire.bytes
    with Wire(server.port) as wire:
        wire.socket.sendall((request("/v1/completions", content) + request("/tokenize", b"{")) * 5)
        assert [wire.answer()[0] for _ in range(10)] == [200, 400] * 5


def test_a_template_cannot_be_talked_out_of_its_sandbox(folder, tmp_path):
    """The variables are the client's, the template is the model's: it loops over what it gets, and reads attributes."""
    import shutil

    own = shutil.copytree(folder, tmp_path / "model")
    template = "{% for i in range(turns or 1) %}{{ messages[0].content }} {% endfor %}{{ who.__class__.__mro__ }}"
    (own / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with serving(own) as server:
        say = {"messages": [{"role": "user", "content": "w5"}], "max_tokens": 2}
        attacks = [{"turns": 10**9}, {"turns": "x"}, {"turns": -1, "who": "x"}, {"turns": {"__class__": 1}},
                   {"who": []}, {"cycler": 1}, {"messages": []}, {"chat_template": "{{ 1 }}"}, {"tokenize": True},
                   {"self": 1}, {"raise_exception": 1}, {"": 1}, {"a b": 1}, {"conversations": []}]  # fmt: skip
        for variables in attacks:
            status, error = sent(
                server, request(PATHS[0], json.dumps(say | {"chat_template_kwargs": variables}).encode())
            )
            assert status in (200, 400), (variables, error)
            assert "<class" not in json.dumps(error)
        unharmed(server)
