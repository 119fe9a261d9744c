"""Lesson 13: the OpenAPI schema of a request says what the judge does, and its bounds are the engine's."""

from __future__ import annotations

import copy
import json

import jsonschema
import pytest
from hypothesis import given, settings
from server_requests import HELLO, KINDS, ONCE, PATHS, bodies, chat, completion, fault

from minillm.errors import RequestError
from minillm.request import SamplingParams
from minillm.server import body
from minillm.server.errors import ApiError
from minillm.server.protocol import ChatCompletionRequest, CompletionRequest, parse_body
from minillm.server.schema import body_schema, openapi_body


def checker(kind):
    strict = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
    )
    return jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=strict)(body_schema(kind))


CHECKERS = {kind: checker(kind) for kind in KINDS}
BEYOND = (
    "stream_options: it belongs",
    "top_logprobs: it needs",
    "max_completion_tokens: got",
    "best_of: not",
    "send either",
)


def agree(kind, sent):
    """Whether schema and judge say the same of a body, or the judge's reason is beyond JSON schema."""
    by_schema = CHECKERS[kind].is_valid(sent)
    try:
        parse_body(json.dumps(sent).encode(), kind)
    except ApiError as error:
        beyond = any(words in error.message for words in BEYOND) or error.param == "min_tokens"
        return not by_schema or beyond or "surrogate" in error.message
    return by_schema


@given(bodies())
@settings(max_examples=300)
def test_schema_and_judge_agree(case):
    kind, sent = case
    if body.all_finite(sent):
        assert agree(kind, sent)


@pytest.mark.parametrize(("sent", "param", "says"), PATHS, ids=lambda v: v if isinstance(v, str) else "")
def test_schema_and_judge_agree_on_the_faults(sent, param, says):
    assert agree(ChatCompletionRequest, sent)


def test_the_agreement_notices_a_bound_that_the_schema_has_not(monkeypatch):
    loose = copy.deepcopy(body_schema(ChatCompletionRequest))
    del loose["properties"]["temperature"]["anyOf"][0]["maximum"]
    monkeypatch.setitem(CHECKERS, ChatCompletionRequest, jsonschema.Draft202012Validator(loose))
    assert not agree(ChatCompletionRequest, HELLO | {"temperature": 101})


EDGES = [
    ("n", 1, 0), ("n", 128, 129), ("temperature", 0, -0.001), ("temperature", 100, 100.001), ("top_p", 1e-9, 0),
    ("top_p", 1, 1.001), ("top_k", -1, -2), ("min_p", 0, -0.001), ("min_p", 1, 1.001), ("seed", 0, -1),
    ("seed", 2**63 - 1, 2**63), ("presence_penalty", -2, -2.001), ("presence_penalty", 2, 2.001),
    ("frequency_penalty", -2, -2.001), ("frequency_penalty", 2, 2.001), ("repetition_penalty", 1e-9, 0),
    ("repetition_penalty", 100, 100.001), ("max_tokens", 1, 0), ("min_tokens", 0, -1), ("logprobs", 0, -1),
    ("logprobs", 20, 21),
]  # fmt: skip


@pytest.mark.parametrize(("name", "inside", "outside"), EDGES)
def test_the_bounds_are_those_of_the_engine(name, inside, outside):
    completion(**{name: inside})
    SamplingParams(**{name: inside})
    assert fault(ONCE | {name: outside}, CompletionRequest).param == name
    with pytest.raises(RequestError):
        SamplingParams(**{name: outside})


def test_priority_and_deadline_have_the_engines_bounds():
    from minillm.engine import PRIORITIES

    assert [chat(priority=p).priority for p in (PRIORITIES[0], PRIORITIES[-1])] == [PRIORITIES[0], PRIORITIES[-1]]
    assert fault(HELLO | {"priority": PRIORITIES[0] - 1}).param == "priority"
    assert fault(HELLO | {"deadline_s": 1e9}).param == "deadline_s"


@pytest.mark.parametrize("kind", KINDS)
def test_the_schema_can_stand_in_a_document(kind):
    found = openapi_body(kind)
    assert found["required"] is True
    schema = found["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator.check_schema(schema)
    assert "$ref" not in json.dumps(schema)
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(kind.model_fields) | set(kind.not_offered)
