"""Lesson 13: a live server is held against the OpenAPI document that it gives, by a tool that knows neither.

schemathesis makes requests from the document, good ones and broken ones, and judges each reply by it: no failure of the
server, a status that the route documents, the documented content type, and a body of the documented form.
"""

from __future__ import annotations

import re
from collections import Counter

import jsonschema
import pytest
from hypothesis import Phase, given, settings
from server_life import WORDS, serving, settled, tiny_model, web

schemathesis = pytest.importorskip("schemathesis")
from schemathesis import GenerationMode, checks  # noqa: E402

JUDGES = [
    checks.not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
    checks.response_schema_conformance,
]  # fmt: skip
KEY = "sk-of-the-schema-test"
LONGEST = 4  # tokens of an answer
# route -> how many good requests, and broken ones, and what the good ones may be told
ROUTES = {
    ("POST", "/v1/chat/completions"): (60, 80, {200, 400}), ("POST", "/v1/completions"): (60, 80, {200, 400}),
    ("POST", "/tokenize"): (15, 25, {200, 400}), ("POST", "/detokenize"): (15, 25, {200}),
    ("GET", "/v1/models"): (3, 0, {200}), ("GET", "/v1/models/{name}"): (15, 0, {200, 404}),
    ("GET", "/timeline"): (15, 15, {200}), ("GET", "/health"): (3, 0, {200}), ("GET", "/ready"): (3, 0, {200}),
    ("GET", "/metrics"): (3, 0, {200}), ("GET", "/state"): (3, 0, {200}), ("POST", "/drain"): (3, 0, {403}),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory):
    folder = tiny_model(tiny_folder, tmp_path_factory.mktemp("schema") / "model")
    with serving(folder, api_key=KEY) as server:
        yield server
        settled(server)


@pytest.fixture(scope="module")
def schema(server):
    return schemathesis.openapi.from_url(server.url + "/openapi.json")


def within_reach(body, generates):
    """A good body with the names and token ids of this model, and a short answer. It is still good."""
    body = {k: ids_of(v) if k in ("prompt", "tokens", "stop_token_ids") else whole(v) for k, v in body.items()}
    if generates:
        for name in ("best_of", "logit_bias", "min_tokens", "max_completion_tokens", "deadline_s"):
            body.pop(name, None)
        body |= {"max_tokens": LONGEST, "n": min(body.get("n") or 1, 2)}
        body |= {} if body.get("stream") else {"stream_options": None}
    elif "tokens" not in body and (body.get("prompt") is None) is (body.get("messages") is None):
        body |= {"prompt": "w5 w6", "messages": None}
    return body | {"model": "tiny"}


def whole(value):
    """For JSON schema 5.0 is a whole number; this server asks for 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def ids_of(value):
    if isinstance(value, list):
        return [ids_of(v) for v in value[:3]]
    value = whole(value)
    return value % WORDS if isinstance(value, int) and not isinstance(value, bool) else value


def ask(schema, route, mode, count, change=lambda case: None, judges=JUDGES):
    """Make requests for a route and judge the replies. Returns how often each status came."""
    method, path = route
    told = Counter()

    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=count, derandomize=True, database=None, phases=[Phase.generate])
    def each(case):
        change(case)
        case.headers = {**(case.headers or {}), "Authorization": f"Bearer {KEY}"}
        response = case.call(timeout=60)
        told[response.status_code] += 1
        case.validate_response(response, checks=judges)

    each()
    return told


def test_every_route_of_the_document_is_held_against_it(schema):
    assert {(o.ok().method.upper(), o.ok().path) for o in schema.get_all_operations()} == set(ROUTES)


@pytest.mark.parametrize("route", ROUTES, ids=lambda r: r[1])
def test_good_requests(server, schema, route):
    def change(case):
        if isinstance(case.body, dict):
            case.body = within_reach(case.body, route[1].startswith("/v1"))
        if "name" in case.path_parameters and len(case.path_parameters["name"]) > 2:
            case.path_parameters = {"name": "tiny"}

    good, _, may = ROUTES[route]
    told = ask(schema, route, GenerationMode.POSITIVE, good, change)
    assert set(told) <= may, told
    assert told[min(may)] >= sum(told.values()) / 4, told  # it is not refusals alone that were judged


@pytest.mark.parametrize("route", [r for r, (_, broken, _) in ROUTES.items() if broken], ids=lambda r: r[1])
def test_broken_requests(server, schema, route):
    told = ask(schema, route, GenerationMode.NEGATIVE, ROUTES[route][1])
    unread = {200} if route[0] == "GET" else set()  # a parameter of an address that nobody reads
    assert set(told) <= {400, 404, 415} | unread, told
    assert told[400] > 1


def test_without_a_key(server, schema):
    for method, path in ROUTES:
        if path in ("/health", "/ready", "/metrics", "/state", "/drain"):
            continue
        answer = web.request(method, server.url + path.replace("{name}", "tiny"), json={} if method == "POST" else None)
        assert answer.status_code == 401
        found = schema.raw_schema["paths"][path][method.lower()]["responses"]["401"]
        jsonschema.validate(answer.json(), found["content"]["application/json"]["schema"])


def test_the_judges_notice(server, schema, monkeypatch):
    """A field that the document does not have, and a status that it does not have."""
    card = type(server.state).card
    monkeypatch.setattr(type(server.state), "card", lambda self: card(self) | {"more": 1})
    with pytest.raises(checks.FailureGroup, match="chema"):
        ask(schema, ("GET", "/v1/models"), GenerationMode.POSITIVE, 1)
    monkeypatch.undo()
    monkeypatch.setattr(type(server.state), "check_model", lambda self, name: 1 / 0)
    with pytest.raises(checks.FailureGroup, match="(?i)server error"):
        ask(schema, ("GET", "/v1/models/{name}"), GenerationMode.POSITIVE, 1)


def test_nothing_comes_from_another_host(server):
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        answer = web.get(server.url + path)
        assert answer.status_code == 404
        assert "/openapi.json" in answer.json()["error"]["message"]
    wrong = web.get(server.url + "/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert "/openapi.json" in wrong.json()["error"]["message"]
    assert not re.search(r"https?://", web.get(server.url + "/openapi.json").text)
