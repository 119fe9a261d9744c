"""The server's OpenAPI, the other half: JSON schemas of what the routes give. Lesson 13.

They are closed (no other fields), so that a test can hold every reply against them, and a client can rely on them.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from minillm.server.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from minillm.server.schema import openapi_body

TEXT, NUMBER, COUNT = {"type": "string"}, {"type": "number"}, {"type": "integer", "minimum": 0}


def _null_or(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _object(optional: dict[str, Any] | None = None, /, **fields: Any) -> dict[str, Any]:
    """A closed object; a field given as text or None is that constant."""
    properties = {k: v if isinstance(v, dict) else {"const": v} for k, v in fields.items()}
    return {
        "type": "object", "properties": properties | (optional or {}), "required": list(fields),
        "additionalProperties": False,
    }  # fmt: skip


ERROR = _object(error=_object(message=TEXT, type=TEXT, param=_null_or(TEXT), code=_null_or(TEXT)))

_BYTES = _list({"type": "integer", "minimum": 0, "maximum": 255})
_TOP = _list(_object(token=TEXT, bytes=_BYTES, logprob=NUMBER))
_CHAT_LOGPROBS = _null_or(
    _object(content=_list(_object(token=TEXT, bytes=_BYTES, logprob=NUMBER, top_logprobs=_TOP)), refusal=None)
)
_TEXT_LOGPROBS = _null_or(
    _object(
        tokens=_list(TEXT),
        token_logprobs=_list(NUMBER),
        text_offset=_list(COUNT),
        top_logprobs=_list({"type": "object", "additionalProperties": NUMBER}),
    )
)
_USAGE = _object(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=_null_or(_object(cached_tokens=COUNT)),
)
_REASON = {"enum": ["stop", "length"]}
_STOP_REASON = {"stop_reason": _null_or({"type": ["string", "integer"]})}


def _reply(name: str, usage: dict[str, Any] | None, optional: dict[str, Any] | None = None, **choice: Any) -> Any:
    """usage None: it is no field that must be there. Token ids are there if return_token_ids asks for them."""
    ids, prompt = {"token_ids": _list(COUNT)}, {"prompt_token_ids": _list(COUNT)}
    of_choice = _STOP_REASON | ids | (prompt if "text" in choice else {})
    optional = (optional or {}) | ({} if "text" in choice else prompt)
    return _object(
        optional,
        id=TEXT,
        object=name,
        created=COUNT,
        model=TEXT,
        choices=_list(_object(of_choice, index=COUNT, **choice)),
        system_fingerprint=_null_or(TEXT),
        **({"usage": usage} if usage else {}),
    )


_CHUNK_USAGE = {"usage": _null_or(_USAGE)}
_MESSAGE = _object(role="assistant", content=TEXT, refusal=None)
_DELTA = _object({"role": {"const": "assistant"}, "content": TEXT})

REPLIES: dict[type[BaseModel], dict[str, Any]] = {
    ChatCompletionRequest: _reply(
        "chat.completion", _USAGE, message=_MESSAGE, logprobs=_CHAT_LOGPROBS, finish_reason=_REASON
    ),
    CompletionRequest: _reply("text_completion", _USAGE, text=TEXT, logprobs=_TEXT_LOGPROBS, finish_reason=_REASON),
    TokenizeRequest: _object(count=COUNT, max_model_len=COUNT, tokens=_list(COUNT), token_strs=_null_or(_list(TEXT))),
    DetokenizeRequest: _object(prompt=TEXT),
}
CHUNKS: dict[type[BaseModel], dict[str, Any]] = {
    ChatCompletionRequest: _reply(
        "chat.completion.chunk", None, _CHUNK_USAGE,
        delta=_DELTA, logprobs=_CHAT_LOGPROBS, finish_reason=_null_or(_REASON),
    ),
    CompletionRequest: _reply(
        "text_completion", None, _CHUNK_USAGE, text=TEXT, logprobs=_TEXT_LOGPROBS, finish_reason=_null_or(_REASON)
    ),
}  # fmt: skip
CARD = _object(id=TEXT, object="model", created=COUNT, owned_by="minillm", max_model_len=COUNT)
MODELS = _object(object="list", data=_list(CARD))
DRAINING = _object(status="draining", running=COUNT, grace_s=NUMBER)
STATE = _object(
    dict.fromkeys(("waiting_tokens", "free_blocks", "cached_blocks", "total_blocks", "block_size", "steps"), COUNT),
    name=TEXT, alive={"type": "boolean"}, ready={"type": "boolean"}, why=TEXT, epoch=TEXT, model=TEXT,
    waiting=COUNT, running=COUNT, max_model_len=COUNT, max_num_seqs=COUNT,
)  # fmt: skip
_STEP = _object(
    dict.fromkeys(("waiting", "running", "free", "cached", "live"), COUNT),
    number=COUNT, time=NUMBER, seconds=NUMBER, others=COUNT,
    rows=_list({"type": "array", "items": {"type": ["string", "integer"]}, "minItems": 3, "maxItems": 3}),
)  # fmt: skip
TIMELINE = _object(next=COUNT, steps=_list(_STEP))
WRONG = {
    400: "The request cannot be honoured; `param` names the field.", 401: "No API key, or an unknown one.",
    403: "The key may not do this.", 404: "No such model.", 408: "The body came too slowly.",
    413: "The body is too long.", 415: "Not application/json.",
    429: "The queue is full, or a quota is used up; Retry-After says when to try again.",
    500: "The server failed.", 503: "Draining, not ready, or the engine has ended.",
    504: "A deadline passed.",
}  # fmt: skip


def status(word: str) -> dict[str, Any]:
    return _object(status=word)


def documented(what: dict[str, Any] | type[BaseModel], *errors: int) -> dict[str, Any]:
    """FastAPI's arguments for a route that gives `what`, or one of these statuses. what: the reply's schema, or the
    kind of body that the route takes."""
    extra, schema = ({}, what) if isinstance(what, dict) else ({"requestBody": openapi_body(what)}, REPLIES[what])
    content = {"text/plain" if what is TEXT else "application/json": {"schema": schema}}
    chunk = None if isinstance(what, dict) else CHUNKS.get(what)
    if chunk is not None:
        data = TEXT | {"contentMediaType": "application/json", "contentSchema": chunk}  # the last is [DONE]
        item = {"type": "object", "required": ["data"], "properties": {"data": data}}
        content["text/event-stream"] = {"itemSchema": item}  # OpenAPI 3.2, "Server-Sent Event Streams"
    error = {"application/json": {"schema": ERROR}}
    return {
        "response_model": None, "response_class": Response if chunk or what is TEXT else JSONResponse,
        "openapi_extra": extra,
        "responses": {
            200: {"description": "What was asked for.", "content": content},
            **{code: {"description": WRONG[code], "content": error} for code in errors},
        },
    }  # fmt: skip


def openapi(app: FastAPI) -> dict[str, Any]:
    """The whole document. FastAPI adds a 422 to every route with a parameter, which this server never gives."""
    if not app.openapi_schema:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for operations in made["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        made.pop("components", None)
        app.openapi_schema = made
    return app.openapi_schema
