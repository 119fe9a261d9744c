"""The server's OpenAPI: JSON schemas of what its routes take, made from what judges the requests. Lesson 13.

A schema that allows less than the judge hides a feature, and one that allows more is a promise that is not kept. Six
rules are beyond JSON schema and stand in words: stream_options needs stream, top_logprobs needs logprobs, the two names
of max_tokens must agree, min_tokens is at most max_tokens, best_of is n, and /tokenize takes a prompt or messages. And
one is JSON schema's own: there, 5.0 is a whole number, and here it is not.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from minillm.server.refused import Refused


def openapi_body(kind: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI's requestBody for a route that takes `kind`."""
    return {"required": True, "content": {"application/json": {"schema": body_schema(kind)}}}


@functools.cache
def body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """JSON schema of what `kind` takes, without references: it can stand anywhere in a document."""
    made = kind.model_json_schema()
    definitions = made.pop("$defs", {})
    return {key: _resolved(value, definitions) for key, value in made.items()}


def _resolved(node: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_resolved(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _resolved(definitions[node["$ref"].rsplit("/", 1)[-1]], definitions)
    return {key: _resolved(value, definitions) for key, value in node.items()}


def completed(schema: dict[str, Any], refused: Mapping[str, Refused]) -> None:
    """What pydantic does not know of an object's fields: null is "not given", and the neutral values are accepted."""
    properties, required = schema["properties"], schema.get("required", [])
    for name, value in properties.items():
        value.pop("title", None)
        if name not in required and {"type": "null"} not in value.get("anyOf", []):
            outside = {key: value.pop(key) for key in ("description", "default") if key in value}
            properties[name] = {**outside, "anyOf": [value, {"type": "null"}]}
    properties.update(not_offered(refused))


def not_offered(refused: Mapping[str, Refused]) -> dict[str, Any]:
    """The schema of each field that is refused unless it asks for nothing."""
    return {
        name: {"enum": [None, *field.neutral], "description": f"Not supported: {field.why}."}
        for name, field in refused.items()
    }
