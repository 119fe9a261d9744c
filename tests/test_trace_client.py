"""The load client against a server that does as it is told: order, counts and stamps. Nothing here asserts a time."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
import time

import pytest
from fake_openai import FakeServer, event, piece, usual
from hypothesis import given
from hypothesis import strategies as st

from minillm.cli import main
from minillm.errors import MinillmError
from minillm.trace import client, latency, report, wire
from minillm.trace.apart import load_apart
from minillm.trace.client import Call, Client
from minillm.trace.wire import Events


def send(behave=usual, call=None, **options):
    """One call's stamps, and the server."""
    with FakeServer(behave) as server:
        (one,) = client.load(server.url, [call or Call("hello", 4)], **options)
    return one, server


@pytest.mark.parametrize(
    "prompt", ["hello", [5, 6, 7], [{"role": "user", "content": "hello"}]], ids=["text", "ids", "chat"]
)
def test_a_stream_is_stamped_token_by_token(prompt):
    before = time.perf_counter()
    one, server = send(call=Call(prompt, 4))
    after = time.perf_counter()
    assert one.ok
    assert one.error is None
    assert [n for _, n in one.chunks] == [1, 1, 1, 1]  # neither the role chunk nor finish, usage and [DONE]
    times = [before, one.scheduled, one.sent, *(t for t, _ in one.chunks), one.end, after]
    assert times == sorted(times)
    assert (one.prompt_tokens, one.output_tokens, one.finish_reason, one.request_id) == (5, 4, "length", "cmpl-7")
    chat = isinstance(prompt[0], dict)
    assert server.paths == ["/v1/models", "/v1/chat/completions" if chat else "/v1/completions"]
    body = server.seen[0]
    assert body["messages" if chat else "prompt"] == prompt
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["temperature"]) == ("fake", 0)


@pytest.fixture
def heard(monkeypatch):
    """heard(n): whether the client has read n events. What a server sends after that is read later, on any machine."""
    events, feed = [], Events.feed
    monkeypatch.setattr(Events, "feed", lambda self, data: (found := feed(self, data), events.extend(found))[0])
    return lambda n: lambda: len(events) >= n


def wait_for(true, what):
    end = time.monotonic() + 60  # of a machine that is busy with other things
    while not true():
        assert time.monotonic() < end, f"it never happened: {what}"
        time.sleep(0.002)


def test_pieces_are_gaps_and_pauses_are_order(heard):
    """Two pieces in one write are one arrival each, with one stamp: a gap of zero, never a negative one."""
    one, _ = send(lambda body: [piece("a") + piece("b"), heard(2), piece("c"), event(b"[DONE]")])
    assert len(one.chunks) == 3
    assert one.itl[0] == 0 < one.itl[1]
    assert one.output_tokens is None
    assert one.tokens == 3


def test_an_event_cut_anywhere_is_one_event():
    whole = b"".join(part for part in usual({"max_tokens": 3}) if isinstance(part, bytes))
    one, _ = send(lambda body: [x for i in range(len(whole)) for x in (whole[i : i + 1], 0)])
    assert one.ok
    assert one.tokens == len(one.chunks) == 3


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_that_ends_by_itself_is_timed_to_its_last_token(chat, heard):
    """The end-of-sequence token is counted in the usage, and what tells of it is the finish reason, without text."""
    end = event({"id": "cmpl-7", "choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}]})
    usage = event({"id": "cmpl-7", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
    parts = [piece("a", chat), heard(1), piece("b", chat), heard(2), end, heard(3), usage, event(b"[DONE]")]
    one, _ = send(lambda body: parts, Call([{"role": "user", "content": "x"}] if chat else "x", 9))
    assert one.ok
    assert len(one.chunks) == 2
    assert one.chunks[-1][0] < one.finished == one.last < one.end
    assert one.tpot == (one.finished - one.first) / 2
    assert one.e2e == one.finished - one.sent


def test_a_server_that_counts_in_every_chunk_is_believed():
    usage = lambda n: {"prompt_tokens": 2, "completion_tokens": n}
    one, _ = send(lambda body: [piece("a", usage=usage(1)), piece("bcd", usage=usage(4)), event(b"[DONE]")])
    assert [n for _, n in one.chunks] == [1, 3]
    assert one.output_tokens == 4


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_is_counted_once_and_not_tried_again(status):
    refusal = json.dumps({"error": {"message": "the queue is full"}}).encode()
    one, server = send(lambda body: (status, {"Retry-After": "7"}, refusal))
    assert (one.status, one.error, one.retry_after_s, one.chunks) == (status, "the queue is full", 7.0, ())
    assert len(server.seen) == 1
    assert report.report([one])["requests"]["rejected"] == 1


def test_retry_after_may_be_a_date_and_nonsense_is_none():
    assert wire.retry_after("12") == 12.0
    assert wire.retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert wire.retry_after("Wed, 21 Oct 2099 07:28:00 GMT") > 1e9
    assert wire.retry_after("soon") is wire.retry_after(None) is wire.retry_after("-3") is None


FAULTS = {
    "an error in the stream": (
        [piece("a"), event({"error": {"message": "the engine has ended"}}), event(b"[DONE]")],
        "ended",
    ),
    "a stream without its end": ([piece("a")], "without [DONE]"),
    "a connection that breaks": ([piece("a"), "hang up"], "broke before the end"),
    "a connection that breaks at once": (["hang up"], "broke before the end"),
    "a chunk that is no JSON": ([event(b"{oops"), event(b"[DONE]")], "no JSON"),
    "a chunk that is too deep": ([event(b"[" * 100_000), event(b"[DONE]")], "no JSON"),
    "a refusal that is too deep": ((500, {}, b"[" * 100_000), "status 500"),
    "a chunk that is a list": ([event(b"[1]"), event(b"[DONE]")], "no JSON"),
    "a chunk of another shape": ([event({"choices": 7}), event(b"[DONE]")], "Error"),
    "an answer that is no stream": ((200, {"content-type": "application/json"}, b"{}"), "event-stream"),
    "a page of a proxy": ((502, {}, b"<html>"), "status 502"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_whatever_a_server_does_is_in_the_stamps(what):
    parts, words = FAULTS[what]
    one, _ = send(lambda body: parts)
    assert not one.ok
    assert words in one.error


def test_a_server_that_says_nothing_is_a_timeout_and_is_left():
    with FakeServer(lambda body: [600.0]) as server:
        errors = []
        while not server.seen:  # on a machine that stands still for so long, the time may be over before it has asked
            (one,) = client.load(server.url, [Call("x", 1)], timeout_s=0.2, model="fake")
            errors.append(one.error)
            assert len(errors) < 100
        wait_for(lambda: server.left == len(server.seen), "the client's leaving is seen")
    assert set(errors) == {"timeout"}


def test_nobody_there_is_in_the_stamps_and_asking_for_a_model_says_so():
    with FakeServer() as server:
        url = server.url
    (one,) = client.load(url, [Call("x", 1)], model="m")
    assert one.status is None
    assert "Error" in one.error
    with pytest.raises(MinillmError, match="is a server there"):
        client.load(url, [Call("x", 1)])


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_client_that_leaves_closes_its_connection(after):
    with FakeServer(lambda body: [*usual(body)[:-2], 600.0]) as server:
        (one,) = client.load(server.url, [Call("x", 5, cancel_after=after)])
        wait_for(lambda: server.left, "the client's leaving is seen")
    assert one.cancelled
    assert not one.ok
    assert one.error is None
    assert after <= len(one.chunks) <= 5
    assert server.left == 1


def test_a_client_that_leaves_at_once_has_sent_all_of_its_request():
    """Mutation: closing at once loses what the socket did not take yet, and the server waits for the rest of a body."""
    with FakeServer(lambda body: [600.0]) as server:
        (one,) = client.load(server.url, [Call("x" * (8 << 20), 1, cancel_after=0)])
        wait_for(lambda: server.left, "the client's leaving is seen")
    assert one.cancelled
    assert [len(body["prompt"]) for body in server.seen] == [8 << 20]
    assert server.left == 1


def test_who_gets_all_before_leaving_has_not_left():
    one, server = send(call=Call("x", 3, cancel_after=99))
    assert one.ok
    assert server.left == 0


def test_a_connection_is_used_again_and_one_left_in_the_middle_is_not():
    async def work(url):
        async with Client(url, "m") as c:
            return [await c.send(Call("x", 2, cancel_after=leave)) for leave in (None, None, 1, None)]

    cut = lambda body: usual(body) if len(server.seen) != 3 else [piece("a"), 600.0]  # it cannot get all of the third
    with FakeServer(cut) as server:
        found = client.run(lambda: work(server.url))
    assert [s.ok for s in found] == [True, True, False, True]
    assert server.connections == 2


def test_an_open_loop_does_not_wait_for_answers_and_a_closed_one_does():
    calls = [Call(f"p{i}", 10, time=0.0) for i in range(8)]
    with FakeServer(lambda body: [lambda: server.most == 8, *usual(body)]) as server:  # none is answered before all ask
        found = client.load(server.url, calls, timeout_s=60)
        assert server.most == 8
    assert all(s.ok for s in found)
    with FakeServer(lambda body: [lambda: server.most == 2, *usual(body)]) as server:
        found = client.load(server.url, calls, concurrency=2, timeout_s=60)
        assert server.most == 2
    assert all(s.ok for s in found)
    assert sorted(b["prompt"] for b in server.seen) == [f"p{i}" for i in range(8)]
    assert [s.sent for s in found] == sorted(s.sent for s in found)  # in the order of the calls
    assert all(s.scheduled == s.sent for s in found)  # nothing is due in a closed loop


def test_an_open_loop_sends_in_the_order_of_time_and_answers_in_the_order_of_calls():
    with FakeServer() as server:
        found = client.load(server.url, [Call("late", 1, time=0.2), Call("early", 2, time=0.0)])
    assert [b["prompt"] for b in server.seen] == ["early", "late"]
    assert [s.tokens for s in found] == [1, 2]
    assert found[0].scheduled - found[1].scheduled == pytest.approx(0.2)
    assert all(s.lateness >= 0 for s in found)


def test_a_limit_makes_requests_late_and_the_schedule_remembers():
    """Coordinated omission in the open: with one at a time, times from `sent` hide the queue in the client."""

    async def work(url):
        async with Client(url, "m") as c:
            return await client.open_loop(c, [Call("x", 5) for _ in range(4)], max_concurrency=1)

    with FakeServer() as server:
        found = client.run(lambda: work(server.url))
        assert server.most == 1
    by_sent = sorted(found, key=lambda s: s.sent)
    assert all(b.sent >= a.last for a, b in itertools.pairwise(by_sent))
    assert all(b.from_schedule().ttft > b.ttft for b in by_sent[1:])


def test_load_works_where_a_loop_runs_already():
    async def notebook(url):
        return client.load(url, [Call("x", 2)])

    with FakeServer() as server:
        (one,) = asyncio.run(notebook(server.url))
    assert one.ok


def test_a_client_apart_gives_the_same_stamps_on_the_same_clock():
    calls = [Call([5, 6], 3, time=0.0), Call([{"role": "user", "content": "x"}], 2, time=0.01, extra={"min_p": 0.5})]
    with FakeServer() as server:
        before = time.perf_counter()
        found = load_apart(server.url, calls, extra={"ignore_eos": True})
        after = time.perf_counter()
    assert [s.tokens for s in found] == [3, 2]
    assert all(before < s.sent < s.chunks[0][0] < s.end < after for s in found)
    assert [b.get("min_p") for b in server.seen] == [None, 0.5]
    assert [b["ignore_eos"] for b in server.seen] == [True, True]


def test_a_client_apart_that_fails_says_why():
    with FakeServer() as server:
        url = server.url
    with pytest.raises(MinillmError, match="is a server there"):
        load_apart(url, [Call("x", 1)])
    with FakeServer(lambda body: [30.0]) as server, pytest.raises(MinillmError, match="not over after"):
        load_apart(server.url, [Call("x", 1)], wait_s=2.0)


@given(st.lists(st.sampled_from(["a", "b\nc", "", "{}", "ü"]), max_size=5), st.integers(0, 99), st.booleans())
def test_events_are_the_same_however_they_are_cut(texts, seed, windows):
    end = b"\r\n" if windows else b"\n"
    raw = b""
    for text in texts:
        raw += b": a comment" + end + b"".join(b"data: " + line.encode() + end for line in text.split("\n")) + end
    rng, events, found = random.Random(seed), Events(), []
    while raw:
        n = rng.randint(1, 9)
        found += events.feed(raw[:n])
        raw = raw[n:]
    assert found == texts


def test_an_endless_event_is_refused():
    events = Events()
    for _ in range(wire.MOST // (1 << 16)):
        assert events.feed(b"x" * (1 << 16)) == []
    with pytest.raises(ValueError, match="more than"):
        events.feed(b"x")


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://x", "http://", "http://[x", "http://x:99999999"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(MinillmError, match="url"):
        Client(url)


def test_a_key_that_would_write_another_header_is_refused_and_not_repeated():
    for key in ("a\r\nX: y", "schlüssel"):
        with pytest.raises(MinillmError) as caught:
            Client("http://127.0.0.1:9", api_key=key)
        assert key not in str(caught.value)


def test_a_progress_bar_counts_requests(monkeypatch):
    counts = []

    class Bar:
        def __init__(self, total, **_):
            self.seen, self.total = 0, total

        def update(self, n=1):
            self.seen += n

        def close(self):
            counts.append((self.seen, self.total))

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    with FakeServer() as server:
        for concurrency in (None, 2):
            client.load(server.url, [Call("x", 1)] * 3, progress=True, concurrency=concurrency)
            client.load(server.url, [Call("x", 1)] * 3, concurrency=concurrency)
    assert counts == [(3, 3), (3, 3)]


def test_paths_go_below_the_url_with_or_without_v1_and_the_key_is_sent():
    for suffix in ("/v1", "/v1/", "/", ""):
        with FakeServer() as server:
            client.load(server.url + "/proxy" + suffix, [Call("x", 1)], api_key="secret")
        assert server.paths == ["/proxy/v1/models", "/proxy/v1/completions"]
        assert server.headers[1]["authorization"] == "Bearer secret"
        assert server.headers[1]["host"] == server.url.removeprefix("http://")


def test_generated_calls_differ_repeat_and_have_their_lengths():
    made = client.calls([0.5, 1.0], prompt_tokens=[3, 9], max_tokens=8, seed=1, cancel=1.0)
    assert [len(c.prompt.split()) for c in made] == [3, 9]
    assert [c.time for c in made] == [0.5, 1.0]
    assert [c.cancel_after for c in made] == [4, 4]
    assert made == client.calls([0.5, 1.0], prompt_tokens=[3, 9], max_tokens=8, seed=1, cancel=1.0)
    assert made[0].prompt != client.calls([0.5], prompt_tokens=3, max_tokens=8, seed=2)[0].prompt
    (chat,) = client.calls([0.0], prompt_tokens=3, max_tokens=8, chat=True, extra={"min_tokens": 8})
    assert chat.chat
    assert chat.extra == {"min_tokens": 8}
    assert chat.cancel_after is None


# HTTP --------------------------------------------------------------------------------------------------------------

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
REPLIES = {
    "chunked": HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0A;x=1\r\n0123456789\r\n0\r\nTrailer: 1\r\n\r\n",
    "with a length": HEAD + b"content-length: 13\r\n\r\nabc0123456789",
    "after a 100": b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Content-Length: 13\r\n\r\nabc0123456789",
}


@given(st.sampled_from(sorted(REPLIES)), st.integers(0, 99))
def test_a_reply_is_the_same_however_it_is_cut(name, seed):
    rng, raw, reply, body = random.Random(seed), REPLIES[name], wire.Reply(), b""
    while raw:
        assert not reply.done
        n = rng.randint(1, 30)
        body += reply.feed(raw[:n])
        raw = raw[n:]
    assert reply.done
    assert reply.keeps_alive
    assert (reply.status, reply.headers["content-type"], body) == (200, "text/plain", b"abc0123456789")


def test_a_reply_without_a_length_ends_with_the_connection_and_others_break_with_it():
    reply = wire.Reply()
    assert reply.feed(HEAD + b"\r\nabc") + reply.feed(b"def") == b"abcdef"
    assert not reply.done
    reply.eof()
    assert reply.done
    assert not reply.keeps_alive
    for raw in REPLIES.values():
        broken = wire.Reply()
        broken.feed(raw[:-1])
        with pytest.raises(ConnectionError):
            broken.eof()


def test_a_server_that_closes_is_not_asked_again_over_the_same_connection():
    for head in (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", b"HTTP/1.0 200 OK\r\n"):
        reply = wire.Reply()
        reply.feed(head + b"Content-Length: 0\r\n\r\n")
        assert reply.done
        assert not reply.keeps_alive


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"x" * (wire.MOST_HEAD + 1),
        HEAD + b"Content-Length: -1\r\n\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffff\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * (wire.MOST_HEAD + 1),
    ],
)  # fmt: skip
def test_what_is_no_http_is_an_error(raw):
    with pytest.raises(ValueError):
        wire.Reply().feed(raw)


# The command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_writes_the_stamps(tmp_path, capsys):
    out = tmp_path / "stamps.jsonl"
    with FakeServer() as server:
        code = main(["load", "--url", server.url, "--requests", "6", "--rate", "200", "--prompt-tokens", "uniform:2:9",
                     "--max-tokens", "3", "--slo", "chat", "--out", str(out)])  # fmt: skip
    assert code == 0
    text = capsys.readouterr().out
    assert "6 requests" in text
    assert "TPOT" in text
    assert "goodput" in text
    every = latency.from_jsonl(out.read_text())
    assert len(every) == 6
    assert all(s.ok and s.tokens == 3 for s in every)
    assert server.seen[0]["ignore_eos"] is True


def test_the_command_in_a_closed_loop_as_json_with_clients_that_leave(capsys, monkeypatch):
    under_way, most, send_one = set(), [], Client.send

    async def counted(self, call, *more, **options):  # by the client: a server hears later that one has left
        under_way.add(mine := object())
        most.append(len(under_way))
        try:
            return await send_one(self, call, *more, **options)
        finally:
            under_way.remove(mine)

    monkeypatch.setattr(Client, "send", counted)
    with FakeServer(lambda body: [*usual(body)[:-2], 600.0]) as server:  # nobody can get all before it leaves
        words = "--requests 5 --concurrency 2 --chat --max-tokens 8 --cancel 1 --eos --json"
        code = main(["load", "--url", server.url, *words.split()])
    found = json.loads(capsys.readouterr().out)
    assert code == 1  # no request was answered to its end
    assert found["requests"] == {"sent": 5, "ok": 0, "rejected": 0, "cancelled": 5, "failed": 0}
    assert max(most) == 2
    assert "ignore_eos" not in server.seen[0]
    assert "messages" in server.seen[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--requests", "0"], "requests"), (["--rate", "-1"], "rate"), (["--rate", "x"], "rate"),
        (["--rate", "1", "--concurrency", "2"], "--concurrency"), (["--concurrency", "0"], "concurrency"),
        (["--arrivals", "odd"], "arrivals"), (["--slo", "soon"], "SLO"), (["--max-tokens", "fixed:x"], "lengths"),
        (["--cancel", "2"], "cancel"), (["--timeout", "0"], "timeout"),
    ],
)  # fmt: skip
def test_the_command_refuses_in_one_line(words, message, capsys):
    assert main(["load", "--url", "http://127.0.0.1:9", "--model", "m", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_the_client_needs_neither_torch_nor_httpx_nor_matplotlib():
    """It runs beside the server, on the same two cores."""
    heavy = "torch httpx numpy matplotlib transformers fastapi uvicorn h11"
    probe = f"""
import sys, minillm.trace.client, minillm.cli
sys.exit(str([m for m in {heavy.split()} if m in sys.modules]))"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(("status", "words"), [(401, "api_key"), (403, "api_key"), (404, "names no model")])
def test_a_server_that_names_no_model_says_why(status, words, monkeypatch):
    async def get(self, path):
        return status, b'{"error": {"message": "no"}}'

    monkeypatch.setattr(Client, "get", get)
    with pytest.raises(MinillmError, match=words):
        asyncio.run(Client("http://127.0.0.1:9").first_model())
