"""Requests for the tests of the server: the least of each kind, wrong ones with the path at fault, random ones. Not a
test file.
"""

from __future__ import annotations

import contextlib
import copy
import json

import pytest
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from minillm.server.errors import ApiError
from minillm.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_body,
)

KINDS = (ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
ONCE = {"prompt": "Once"}
LEAST = {
    ChatCompletionRequest: HELLO, CompletionRequest: ONCE, TokenizeRequest: ONCE, DetokenizeRequest: {"tokens": [1]},
}  # fmt: skip


def parse(kind, **given_fields):
    return parse_body(json.dumps(LEAST[kind] | given_fields).encode(), kind)


def chat(**given_fields):
    return parse(ChatCompletionRequest, **given_fields)


def completion(**given_fields):
    return parse(CompletionRequest, **given_fields)


def fault(raw, kind=ChatCompletionRequest) -> ApiError:
    raw = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    with pytest.raises(ApiError) as caught:
        parse_body(raw, kind)
    error = caught.value
    assert error.status == 400
    assert error.type == "invalid_request_error"
    assert len(error.message) < 1200
    json.dumps(error.body(), ensure_ascii=False).encode()  # it can be sent
    return error


def judged(raw, kind):
    """The request, or None when it was refused in words that can be sent; anything else fails the test."""
    try:
        return parse_body(raw, kind)
    except ApiError as error:
        json.dumps(error.body() | {"status": error.status}, ensure_ascii=False).encode()
        return None


PATHS = [
    ({}, "messages", "required"),
    ({"messages": None}, "messages", "required"),
    ({"messages": []}, "messages", "1 to"),
    ({"messages": {}}, "messages", "a list"),
    ({"messages": ["a"]}, "messages[0]", "an object"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "nothing"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "nothing"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "nothing"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "empty list"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "got 3"),
    ({"messages": [{"role": "boss", "content": "a"}]}, "messages[0].role", "'boss'"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role", "a list"),
    ({"messages": [{"role": "tool", "content": "a", "tool_call_id": "x"}]}, "messages[0].role", "no tools"),
    ({"messages": [{"role": "function", "content": "a", "name": "x"}]}, "messages[0].role", "no tools"),
    ({"messages": [{"role": "user", "content": "a", "name": "Bo"}]}, "messages[0].name", "not supported"),
    ({"messages": [{"role": "user", "content": "a", "nmae": "Bo"}]}, "messages[0].nmae", "unknown field"),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages[0].tool_calls", "no tools"),
    ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]", "got 3"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0]", "type nothing"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
        "messages[0].content[1]", "image_url",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]", "input_audio"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "nothing"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text", "1"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
        "messages[0].content[0].x", "unknown",
    ),
    (HELLO | {"temprature": 1}, "temprature", "did you mean 'temperature'?"),
    (HELLO | {"quite_other": 1}, "quite_other", "the fields are"),
    (HELLO | {"temperature": "hot"}, "temperature", "expected a number, got a text"),
    (HELLO | {"temperature": True}, "temperature", "expected a number, got true"),
    (HELLO | {"temperature": 101}, "temperature", "at most 100"),
    (HELLO | {"n": 0}, "n", "at least 1"),
    (HELLO | {"n": 2.0}, "n", "whole number"),
    (HELLO | {"n": "2"}, "n", "whole number"),
    (HELLO | {"stream": 1}, "stream", "true or false"),
    (HELLO | {"stop": ["a", "b", ""]}, "stop[2]", "empty"),
    (HELLO | {"stop": ""}, "stop", "empty"),
    (HELLO | {"stop": ["a", 3]}, "stop[1]", "got 3"),
    (HELLO | {"stop": 3}, "stop", "got 3"),
    (HELLO | {"stop": ["a"] * 17}, "stop", "at most 16"),
    (HELLO | {"stop": "a" * 1001}, "stop", "1000 characters"),
    (HELLO | {"stop_token_ids": [1, True]}, "stop_token_ids[1]", "got true"),
    (HELLO | {"stop_token_ids": [1] * 1025}, "stop_token_ids", "at most 1024"),
    (HELLO | {"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    (HELLO | {"logit_bias": {"05": 1}}, "logit_bias", "token ids"),
    (HELLO | {"logit_bias": {"5": 101}}, "logit_bias.5", "-100 to 100"),
    (HELLO | {"logit_bias": {"5": True}}, "logit_bias.5", "got true"),
    (HELLO | {"logit_bias": [5]}, "logit_bias", "an object"),
    (HELLO | {"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    (HELLO | {"max_completion_tokens": 3, "min_tokens": 4}, "min_tokens", "at most 3"),
    (HELLO | {"deadline_s": 0}, "deadline_s", "more than 0"),
    (HELLO | {"priority": 1001}, "priority", "at most 1000"),
    (HELLO | {"user": 5}, "user", "a text"),
    (HELLO | {"user": "u" * 513}, "user", "512"),
    (HELLO | {"model": 5}, "model", "a text"),
    (HELLO | {"chat_template_kwargs": [1]}, "chat_template_kwargs", "an object"),
    (HELLO | {"chat_template_kwargs": {str(i): 1 for i in range(65)}}, "chat_template_kwargs", "64"),
]  # fmt: skip


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.just("user"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


ROLES = st.sampled_from(["user", "assistant", "developer", "tool", "boss"])
PARTS = st.fixed_dictionaries({"type": st.just("text")}, optional={"text": st.text(max_size=3), "x": st.none()})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": ROLES}, optional={"content": st.text(max_size=3) | st.lists(PARTS, max_size=2), "name": st.none()}
    ),
    max_size=2,
)
NEAR = (None, 0, 1, 2, 5, -1, 0.5, 1.5, 100, 128, 2**31, True, False, "a", "", [], ["a"], [1], [[1], [2]], {}, {"5": 1})
WORDS = ({"05": 1}, {"type": "text"}, {"include_usage": True}, {"include_usage": None}, ["text"], "auto", "none")
LIKELY = st.sampled_from(NEAR + WORDS) | MESSAGES


def takes(kind, name):
    """The likely values that `kind` takes for a field when nothing else is asked."""
    found = []
    for value in NEAR + WORDS:
        with contextlib.suppress(ApiError):
            parse_body(json.dumps(LEAST[kind] | {name: value}).encode(), kind)
            found.append(value)
    return found


TAKES = {(kind, name): takes(kind, name) for kind in KINDS for name in [*kind.model_fields, *kind.not_offered]}


@st.composite
def bodies(draw):
    """(kind, body): near enough to a request that most of it is looked at; more than half are requests."""
    kind = draw(st.sampled_from(KINDS))
    found = copy.deepcopy(LEAST[kind]) if draw(st.integers(0, 7)) else {}
    for name in draw(st.lists(st.sampled_from([*kind.model_fields, *kind.not_offered]), max_size=4, unique=True)):
        wild = TAKES[kind, name] == [] or draw(st.integers(0, 7)) == 7
        found[name] = draw(LIKELY | json_values if wild else st.sampled_from(TAKES[kind, name]))
    if draw(st.integers(0, 7)) == 7:
        found[draw(st.text(max_size=8))] = draw(json_values)
    return kind, found
