"""Lesson 13: whatever the bytes of a body are, they give a request or an ApiError, at a cost in line with them."""

from __future__ import annotations

import json
import sys
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from server_requests import KINDS, bodies, fault, json_values, judged

from minillm.server import body, fields
from minillm.server.body import load_object
from minillm.server.errors import ApiError
from minillm.server.protocol import ChatCompletionRequest, parse_body

SAY = b'{"messages":[{"role":"user","content":"x"}],'


@pytest.mark.parametrize(
    ("raw", "param", "says"),
    [
        (b"", None, "empty"), (b" \n", None, "empty"), (b"\xef\xbb\xbf", None, "empty"), (b"\0", None, "not JSON"),
        (b"nul", None, "not JSON"), (b"null", None, "object, got null"), (b"[]", None, "got a list"),
        (b'"x"', None, "got a text"), (b"{", None, "not JSON"), (b"\xff\xfe{\0}\0", None, "not UTF-8"),
        (b'{"a":"\xc3"}', None, "not UTF-8"), (b'{"a":"\xed\xa0\x80"}', None, "not UTF-8"),
        (b"[" * 100_000, None, "nested too deeply"), (b'{"a":' * 100_000, None, "nested too deeply"),
        (SAY + b'"stop":' + b"[" * 40 + b"]" * 40 + b"}", None, "nested too deeply"),
        (SAY + b'"temperature":NaN}', None, "NaN"), (SAY + b'"temperature":-Infinity}', None, "Infinity"),
        (SAY + b'"temperature":1e999}', "temperature", "finite"),
        (SAY + b'"chat_template_kwargs":{"a":[-1e999]}}', "chat_template_kwargs", "finite"),
        (SAY + b'"seed":' + b"9" * 10_000 + b"}", None, "too many digits"),
        (SAY + b'"seed":' + b"9" * 4_000 + b"}", "seed", "more than 20 digits"),
        (SAY + b'"temperature":' + b"9" * 4_000 + b"}", "temperature", "more than 20 digits"),
        (SAY + b'"logit_bias":{"1":' + b"9" * 4_000 + b"}}", "logit_bias.1", "more than 20 digits"),
        (SAY + b'"n":1,"n":1}', "n", "twice"),
        (b'{"messages":[{"role":"user","content":"x","content":"y"}]}', "messages[0].content", "twice"),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "messages[0].content", "surrogate"),
        (b'{"messages":[{"role":"user","content":"\\udc00\\ud800"}]}', "messages[0].content", "surrogate"),
        (SAY + b'"stop":["a","\\uDFFF"]}', "stop[1]", "surrogate"),
        (SAY + b'"x":{"\\ud800":1}}', "x", "surrogate"),
        (SAY + b'"\\ud800":1}', None, "surrogate"),
        (SAY + b'"x\\u0000y\\n":1}', "x\\x00y\\n", "unknown field"),
        (b"{" + b",".join(b'"%d":1' % i for i in range(5000)) + b"}", None, "4096 keys"),
    ],
    ids=lambda v: repr(v[:40]) if isinstance(v, bytes) else "",
)  # fmt: skip
def test_hostile_bodies(raw, param, says):
    error = fault(raw)
    assert error.param == param
    assert says in error.message


def test_text_may_hold_nul_emoji_and_a_byte_order_mark_before_it():
    raw = b'\xef\xbb\xbf{"messages":[{"role":"user","content":"\\u0000\\ud83d\\ude00\xf0\x9f\x98\x80\\\\ud800"}]}'
    assert parse_body(raw, ChatCompletionRequest).chat_messages()[0]["content"] == "\0😀😀\\ud800"


@given(st.binary(), st.sampled_from(KINDS))
@settings(max_examples=200)
def test_any_bytes_give_a_request_or_an_error(raw, kind):
    judged(raw, kind)


@given(bodies(), st.data())
@settings(max_examples=200)
def test_any_damaged_json_gives_a_request_or_an_error(case, data):
    kind, sent = case
    raw = bytearray(json.dumps(sent).encode("utf-8", "surrogatepass"))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    judged(bytes(raw), kind)


def depth_of(value):
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + max(map(depth_of, inside), default=0)


@given(json_values, st.integers(0, 6))
@example(["[[", {'\\"[[': '"]]'}, "\\"], 2)
def test_depth_is_counted_outside_strings(value, depth):
    for ascii_only in (True, False):
        raw = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
        brackets = body.without_strings(raw).translate(None, body._NO_BRACKETS)
        assert body.deeper_than(depth, brackets) is (depth_of(value) > depth)


N = 20_000
FLOODS = {
    "lists": SAY + b'"stop":[' + b"[]," * N + b"[]]}",
    "objects": SAY + b'"stop":[' + b"{}," * N + b"{}]}",
    "keys": b"{" + b",".join(b'"%d":1' % i for i in range(N)) + b"}",
    "one key": b"{" + b",".join(b'"a":1' for _ in range(N)) + b"}",
    "wrong token ids": SAY + b'"stop_token_ids":[' + b"-1," * N + b"0]}",
    "wrong messages": b'{"messages":[' + b"1," * N + b"1]}",
    "a long key with a long list": SAY + b'"' + b"k" * N + b'":[' + b'"\\ud800",' * (N // 3) + b"1]}",
    "a long key of many values": b'[{"' + b"k" * N + b'":[' + b"1," * N + b'{"a":1,"a":1}]}]',
}


def peak_and_calls(raw, kind):
    """Bytes and calls that judging takes: what grows with a fault of O(n^2), on any machine alike."""
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    tracemalloc.start()
    judged(raw, kind)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    sys.setprofile(count)
    try:
        judged(raw, kind)
    finally:
        sys.setprofile(None)
    return peak, calls


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_costs_what_its_bytes_cost(name):
    raw = FLOODS[name]
    peak, calls = peak_and_calls(raw, ChatCompletionRequest)
    assert peak < 40 * len(raw) + 2**20
    assert calls < 2 * len(raw)


def test_the_bound_notices_a_judge_that_lists_every_fault():
    """As pydantic by itself does: an error for each item."""
    from pydantic import BaseModel, ValidationError

    class EachItem(BaseModel):
        stop_token_ids: list[bool]

    def careless(raw):
        try:
            EachItem.model_validate(json.loads(raw))
        except ValidationError as error:
            return error.errors()[0]

    raw = FLOODS["wrong token ids"]
    tracemalloc.start()
    careless(raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak > 40 * len(raw) + 2**20


def test_lists_and_objects_are_counted_before_any_is_made():
    """Outside of strings, at the bound and beyond it."""
    inside = body.MAX_INSIDE - 2
    for value in ([[]] * inside, [{}] * inside):
        raw = json.dumps({"prompt": value, "text": "[[{{" * 100_000}).encode()
        assert len(load_object(raw)["prompt"]) == inside
        with pytest.raises(ApiError, match="more than 65,536 lists and objects"):
            load_object(raw.replace(b"[[], ", b"[[], [], ").replace(b"[{}, ", b"[{}, {}, "))


def test_the_arguments_of_a_template_are_bounded_as_a_whole():
    head = {"messages": [{"role": "user", "content": "x"}]}
    fits = {"a": "x" * (fields.MAX_TEMPLATE_SIZE - len('{"a": ""}'))}
    for value, good in ((fits, True), ({"a": fits["a"] + "x"}, False), ({"a": [[1]] * 20_000}, False)):
        raw = json.dumps(head | {"chat_template_kwargs": value}).encode()
        if good:
            assert parse_body(raw, ChatCompletionRequest).chat_template_kwargs == value
        else:
            with pytest.raises(ApiError, match="at most 65536 characters") as error:
                parse_body(raw, ChatCompletionRequest)
            assert error.value.param == "chat_template_kwargs"


def test_values_are_counted_before_any_is_made(monkeypatch):
    ids = lambda count: b'{"prompt": [' + b",".join([b"1"] * count) + b"]}"
    body.load_object(ids(body.MAX_COMMAS + 1))
    body.load_object(b'{"prompt": "' + b"," * (body.MAX_COMMAS + 1) + b'"}')  # of a text they are no bound
    monkeypatch.setattr(body.json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(ApiError) as caught:
        body.load_object(ids(body.MAX_COMMAS + 2))
    assert (caught.value.status, "values" in caught.value.message) == (400, True)
