"""The fields of a request that have more than one form: messages, prompt, stop, logit_bias. Lesson 13.

Each has a function from JSON to its one inner form, which raises ApiError with the path of what is wrong, and its JSON
schema. Neither echoes a text: what people write is theirs, and error messages are logged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from minillm.request import MAX_STOP_STRINGS
from minillm.server.body import all_finite, kind_of
from minillm.server.refused import MESSAGE, asked, wrong
from minillm.server.schema import not_offered

MAX_TOKEN = 2**31 - 1  # of a token id or a number of tokens
MAX_PROMPTS = 2048  # of one request
MAX_MESSAGES = 2048
MAX_STOP_LENGTH = 1000  # characters
MAX_STOP_TOKENS = 1024
MAX_BIASES = 4096
MAX_TEMPLATE_ARGUMENTS = 64
MAX_TEMPLATE_SIZE = 65_536  # characters of all of them as JSON: every value in them is visited before a template runs
RENDERING = {
    "add_generation_prompt": "send it beside chat_template_kwargs",
    "messages": "the messages are those of the request",
    "conversations": "the messages are those of the request",
    "chat_template": "the served model's own is used",
    "return_assistant_tokens_mask": "the reply is text",
    "continue_final_message": "send the text so far as a prompt to /v1/completions",
    "self": "it has this name inside of templates",
}
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
NO_TOOLS = ("tool", "function")

TOKENS_SCHEMA: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN}}
STOP_TOKENS_SCHEMA = TOKENS_SCHEMA | {"maxItems": MAX_STOP_TOKENS}
_IDS = TOKENS_SCHEMA | {"minItems": 1}
_PART = {
    "type": "object", "additionalProperties": False, "required": ["type", "text"],
    "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
}  # fmt: skip
MESSAGES_SCHEMA: dict[str, Any] = {
    "type": "array", "minItems": 1, "maxItems": MAX_MESSAGES,
    "items": {
        "type": "object", "additionalProperties": False, "required": ["role", "content"],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _PART}]},
        } | not_offered(MESSAGE),
    },
}  # fmt: skip
PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"}, _IDS,
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string"}},
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _IDS},
    ]
}  # fmt: skip
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
STOP_SCHEMA: dict[str, Any] = {"anyOf": [_STOP, {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": _STOP}]}
LOGIT_BIAS_SCHEMA: dict[str, Any] = {
    "type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "propertyNames": {"pattern": f"^({TOKEN_ID.pattern})$"}, "maxProperties": MAX_BIASES,
}  # fmt: skip
TEMPLATE_ARGUMENTS_SCHEMA: dict[str, Any] = {
    "type": "object", "maxProperties": MAX_TEMPLATE_ARGUMENTS, "propertyNames": {"not": {"enum": list(RENDERING)}},
}  # fmt: skip


def messages(value: Any) -> list[dict[str, str]]:
    """[{"role": system, user or assistant, "content": text}]; the parts of a content are joined as they stand."""
    if not isinstance(value, list):
        raise wrong("messages", f"expected a list of messages, got {kind_of(value)}")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise wrong("messages", f"expected 1 to {MAX_MESSAGES} messages, got {len(value)}")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(value)]


def _message(value: Any, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong(path, f"expected an object with role and content, got {kind_of(value)}")
    role = value.get("role")
    if role in NO_TOOLS:
        raise wrong(f"{path}.role", f"this server has no tools, and so no {role!r} messages; use {', '.join(ROLES)}")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{path}.role", f"expected one of {', '.join(ROLES)}, got {_short(role)}")
    content = asked(value, ("role", "content"), MESSAGE, path).get("content")
    if isinstance(content, list) and content:
        content = "".join(_part(part, f"{path}.content[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str):
        got = "nothing" if content is None else "an empty list" if content == [] else kind_of(content)
        raise wrong(f"{path}.content", f"expected text or a list of text parts, got {got}")
    return {"role": ROLES[role], "content": content}


def _part(value: Any, path: str) -> str:
    if not isinstance(value, dict):
        raise wrong(path, f'expected {{"type": "text", "text": ...}}, got {kind_of(value)}')
    if value.get("type") != "text":
        raise wrong(path, f"the served model reads text only; got a part of type {_short(value.get('type'))}")
    text = (value if len(value) == 2 else asked(value, ("type", "text"), {}, path)).get("text")
    if not isinstance(text, str):
        raise wrong(f"{path}.text", f"expected text, got {'nothing' if text is None else kind_of(text)}")
    return text


def prompt(value: Any) -> list[str | list[int]]:
    """One entry for each prompt: its text, or its token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        got = "an empty list" if isinstance(value, list) else kind_of(value)
        raise wrong("prompt", f"expected text, a list of token ids, or a list of either, got {got}")
    if isinstance(value[0], int):
        return [_ids(value, "prompt")]
    if len(value) > MAX_PROMPTS:
        raise wrong("prompt", f"at most {MAX_PROMPTS} prompts in one request, got {len(value)}")
    texts = isinstance(value[0], str)
    for i, item in enumerate(value):
        if isinstance(item, str) is not texts or not isinstance(item, str | list):
            expected = "text" if texts else "a list of token ids"
            raise wrong(f"prompt[{i}]", f"expected {expected} like the first prompt, got {kind_of(item)}")
        if isinstance(item, list):
            _ids(item, f"prompt[{i}]")
    return value


def _ids(value: list[Any], path: str) -> list[int]:
    if not value:
        raise wrong(path, "it has no tokens; give at least one token id")
    return token_ids(value, path)


def token_ids(value: Any, path: str, at_most: int | None = None) -> list[int]:
    if not isinstance(value, list):
        raise wrong(path, f"expected a list of token ids, got {kind_of(value)}")
    if at_most is not None and len(value) > at_most:
        raise wrong(path, f"expected at most {at_most} token ids, got {len(value)}")
    if set(map(type, value)) <= {int} and (not value or (min(value) >= 0 and max(value) <= MAX_TOKEN)):
        return value
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN:
            raise wrong(f"{path}[{i}]", f"expected a token id (0 to {MAX_TOKEN}), got {kind_of(token)}")
    return value


def tokens(value: Any) -> list[int]:
    return token_ids(value, "tokens")


def stop_token_ids(value: Any) -> list[int]:
    return token_ids(value, "stop_token_ids", MAX_STOP_TOKENS)


def stop(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise wrong("stop", f"expected text or a list of texts, got {kind_of(value)}")
    if len(stops) > MAX_STOP_STRINGS:
        raise wrong("stop", f"at most {MAX_STOP_STRINGS} stop strings, got {len(stops)}")
    for i, item in enumerate(stops):
        path = "stop" if isinstance(value, str) else f"stop[{i}]"
        if not isinstance(item, str) or not item:
            raise wrong(path, f"expected text that is not empty, got {kind_of(item) if item != '' else 'empty text'}")
        if len(item) > MAX_STOP_LENGTH:
            raise wrong(path, f"a stop string may have {MAX_STOP_LENGTH} characters, this one has {len(item)}")
    return stops


def logit_bias(value: Any) -> dict[str, float]:
    """Only one spelling of an id is taken ("7", not "07"), so that none can be given twice."""
    if not isinstance(value, Mapping):
        raise wrong("logit_bias", f"expected an object of token ids to numbers, got {kind_of(value)}")
    if len(value) > MAX_BIASES:
        raise wrong("logit_bias", f"at most {MAX_BIASES} tokens, got {len(value)}")
    for key, bias in value.items():
        if not isinstance(key, str) or not TOKEN_ID.fullmatch(key):
            raise wrong("logit_bias", f"its keys are token ids such as '42', got {_short(key)}")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise wrong(f"logit_bias.{key}", f"expected a number from -100 to 100, got {kind_of(bias)}")
    return {key: float(bias) for key, bias in value.items()}


def template_arguments(value: Any) -> dict[str, Any]:
    """Variables for a template: any JSON, which the template may do with what it likes."""
    if not isinstance(value, dict):
        raise wrong("chat_template_kwargs", f"expected an object, got {kind_of(value)}")
    if len(value) > MAX_TEMPLATE_ARGUMENTS:
        raise wrong("chat_template_kwargs", f"at most {MAX_TEMPLATE_ARGUMENTS} variables, got {len(value)}")
    for key in RENDERING:
        if key in value:
            raise wrong(f"chat_template_kwargs.{key}", f"{RENDERING[key]}; it is no variable of a template")
    if not all_finite(value):
        raise wrong("chat_template_kwargs", "expected finite numbers")
    if (size := len(json.dumps(value))) > MAX_TEMPLATE_SIZE:
        raise wrong("chat_template_kwargs", f"at most {MAX_TEMPLATE_SIZE} characters of JSON, got {size}")
    return value


def _short(value: Any) -> str:
    """A word of the protocol that is not one of its words."""
    return ascii(value[:40]) if isinstance(value, str) else "nothing" if value is None else kind_of(value)
