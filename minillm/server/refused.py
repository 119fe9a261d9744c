"""What OpenAI's and vLLM's APIs have and this server has not: refused by name, never dropped in silence. Lesson 13.

A client that asks for JSON and gets prose has been lied to; so has one whose typing error is ignored. Each field here
says why it is refused, and which values ask for nothing ("neutral") and are therefore accepted. null is always neutral.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from minillm.server.body import printable
from minillm.server.errors import ApiError

UNSUPPORTED = "unsupported_field"  # the error's code


class Refused(NamedTuple):
    why: str
    neutral: tuple[Any, ...] = ()


_TOOLS = "this server calls no tools; describe the format you want in the messages, and parse the text"
_TEXT_ONLY = "this server reads and writes text only"
_FREE_TEXT = "this server does not constrain the text to a grammar; ask for the format in the prompt, and check it"
_NO_REASONING = "this server does not tell reasoning from answer"
_TEMPLATE = "the served model's own chat template is used"
_STORES = "this server stores no requests; keep what you need at the client"
_REPETITION = "this server does not detect repeated patterns; use repetition_penalty or max_tokens"
_PLUGINS = "this server takes no code or arguments for plug-ins from a request"
_CACHE = "prefixes are cached for each tenant (API key) by themselves"

COMMON = {
    "echo": Refused("the prompt is not repeated in the answer; put it before the text at the client", (False,)),
    "use_beam_search": Refused("this server samples; beam search is not offered", (False,)),
    "length_penalty": Refused("it belongs to beam search, which is not offered", (1.0,)),
    "truncate_prompt_tokens": Refused("prompts are never cut; shorten it at the client (see /tokenize)"),
    "prompt_logprobs": Refused("log-probabilities are reported for generated tokens only"),
    "allowed_token_ids": Refused("use logit_bias to favour or ban tokens"),
    "bad_words": Refused("use logit_bias with -100 to ban tokens", ([],)),
    "spaces_between_special_tokens": Refused("the text is what the tokenizer decodes", (True,)),
    "response_format": Refused(_FREE_TEXT, ({"type": "text"},)),
    "structured_outputs": Refused(_FREE_TEXT),
    "guided_json": Refused(_FREE_TEXT),
    "guided_regex": Refused(_FREE_TEXT),
    "guided_choice": Refused(_FREE_TEXT),
    "guided_grammar": Refused(_FREE_TEXT),
    "logits_processors": Refused(_PLUGINS, ([],)),
    "vllm_xargs": Refused(_PLUGINS, ({},)),
    "kv_transfer_params": Refused("prompts are computed and decoded by one engine"),
    "request_id": Refused("the server names its requests; the id is in the reply"),
    "return_tokens_as_token_ids": Refused("use return_token_ids", (False,)),
    "cache_salt": Refused(_CACHE),
    "repetition_detection": Refused(_REPETITION),
    "max_repetition_pattern_size": Refused(_REPETITION, (0,)),
    "min_repetition_pattern_size": Refused(_REPETITION, (0,)),
    "repetition_min_count": Refused(_REPETITION, (0,)),
    "service_tier": Refused("there is one tier; the API key decides the priority", ("auto", "default")),
    "metadata": Refused(_STORES, ({},)),
    "store": Refused(_STORES, (False,)),
}

CHAT = COMMON | {
    "tools": Refused(_TOOLS, ([],)),
    "tool_choice": Refused(_TOOLS, ("none",)),
    "parallel_tool_calls": Refused(_TOOLS, (True, False)),
    "functions": Refused(_TOOLS, ([],)),
    "function_call": Refused(_TOOLS, ("none",)),
    "audio": Refused(_TEXT_ONLY),
    "modalities": Refused(_TEXT_ONLY, (["text"],)),
    "mm_processor_kwargs": Refused(_TEXT_ONLY, ({},)),
    "media_io_kwargs": Refused(_TEXT_ONLY, ({},)),
    "prediction": Refused("predicted outputs are not offered"),
    "moderation": Refused("this server does not moderate; do it at the client"),
    "reasoning_effort": Refused(
        f"{_NO_REASONING}; if the chat template reads such a switch, use chat_template_kwargs", ("none",)
    ),
    "include_reasoning": Refused(_NO_REASONING, (True, False)),
    "thinking_token_budget": Refused(_NO_REASONING),
    "verbosity": Refused("ask for the length you want in the messages", ("medium",)),
    "web_search_options": Refused("this server does not search the web"),
    "prompt_cache_key": Refused(_CACHE),
    "prompt_cache_retention": Refused(_CACHE),
    "prompt_cache_options": Refused(_CACHE),
    "safety_identifier": Refused("use user, of which only a salted hash is kept"),
    "add_special_tokens": Refused("the chat template writes the special tokens", (False,)),
    "continue_final_message": Refused("send the text so far as a prompt to /v1/completions", (False,)),
    "documents": Refused("put the documents' text into the messages", ([],)),
    "chat_template": Refused(_TEMPLATE),
    "chat_template_content_format": Refused(_TEMPLATE, ("auto", "string")),
}

COMPLETION = COMMON | {
    "suffix": Refused("filling in the middle is not offered; write the model's own markers into the prompt", ("",)),
    "prompt_embeds": Refused("send the prompt as text or token ids", ([],)),
    "add_special_tokens": Refused("send token ids to decide about special tokens yourself", (True,)),
    "max_completion_tokens": Refused("/v1/completions calls it max_tokens"),
    "messages": Refused("messages belong to /v1/chat/completions; here it is prompt"),
    "top_logprobs": Refused("/v1/completions calls it logprobs, a whole number"),
}

TOKENIZE = {
    "tools": Refused(_TOOLS, ([],)),
    "continue_final_message": Refused("tokenize the text so far as a prompt", (False,)),
    "chat_template": Refused(_TEMPLATE),
    "mm_processor_kwargs": Refused(_TEXT_ONLY, ({},)),
    "media_io_kwargs": Refused(_TEXT_ONLY, ({},)),
}

MESSAGE = {
    "name": Refused("the chat template has no place for the names of speakers; write them into the content"),
    "tool_calls": Refused(_TOOLS, ([],)),
    "tool_call_id": Refused(_TOOLS),
    "function_call": Refused(_TOOLS),
    "audio": Refused(_TEXT_ONLY),
    "refusal": Refused("put the text of the refusal into the content"),
    "annotations": Refused("put what matters of them into the content", ([],)),
    "reasoning": Refused(f"{_NO_REASONING}; put what matters of it into the content", ("",)),
    "reasoning_content": Refused(f"{_NO_REASONING}; put what matters of it into the content", ("",)),
}

STREAM_OPTIONS = {
    "include_obfuscation": Refused("chunks are not padded", (False,)),
}


def asked(
    data: Mapping[str, Any], known: Collection[str], refused: Mapping[str, Refused], path: str = ""
) -> dict[str, Any]:
    """The fields that ask for something: without null, and without the neutral values of what is not offered.

    path: of the object that holds them, "" or "messages[0]". Raises ApiError for the first field that is refused, or
    that neither this server nor the APIs it follows know.
    """
    found = {}
    for key, value in data.items():
        if key in known:
            if value is not None:
                found[key] = value
        elif key in refused:
            if value is not None and not any(same(value, neutral) for neutral in refused[key].neutral):
                raise wrong(f"{path}.{key}".lstrip("."), f"not supported: {refused[key].why}", code=UNSUPPORTED)
        else:
            raise _unknown(key, known, path)
    return found


def same(a: Any, b: Any) -> bool:
    """Equal as JSON: true is not 1, but 1.0 is."""
    return isinstance(a, bool) == isinstance(b, bool) and type(a) in _LIKE[type(b)] and a == b


_LIKE: dict[type, tuple[type, ...]] = {
    bool: (bool,), int: (int, float), float: (int, float), str: (str,), list: (list,), dict: (dict,),
}  # fmt: skip


def wrong(param: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def _unknown(key: str, known: Collection[str], path: str) -> ApiError:
    name = printable(key)
    near = difflib.get_close_matches(key[:64], known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(sorted(known))}"
    where = f"{path}.{name}".lstrip(".")
    return ApiError(400, f"unknown field {name!r}{f' in {path}' if path else ''}; {hint}", param=where)
