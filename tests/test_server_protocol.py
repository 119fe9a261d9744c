"""Lesson 13: a request is judged to its last field; what is not offered is refused by name."""

from __future__ import annotations

import json
from typing import get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import chat_completion_stream_options_param
from openai.types.chat import completion_create_params as chat_create_params
from server_requests import HELLO, KINDS, LEAST, ONCE, PATHS, chat, completion, fault, parse

from minillm.errors import RequestError
from minillm.request import SamplingParams
from minillm.server import fields, refused
from minillm.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    Generation,
    StreamOptions,
    TokenizeRequest,
    parse_body,
)

# What is honoured ---------------------------------------------------------------------------------------------

HONOURED = {
    "n": (3, 3), "temperature": (0.5, 0.5), "top_p": (0.25, 0.25), "top_k": (7, 7), "min_p": (0.125, 0.125),
    "seed": (11, 11), "stop": (["a", "bc"], ("a", "bc")), "presence_penalty": (1.5, 1.5),
    "frequency_penalty": (-0.5, -0.5), "repetition_penalty": (1.25, 1.25), "logit_bias": ({"5": -3}, {5: -3.0}),
    "stop_token_ids": ([4, 9], (4, 9)), "ignore_eos": (True, True), "min_tokens": (2, 2), "max_tokens": (5, 5),
    "include_stop_str_in_output": (True, True), "skip_special_tokens": (False, False),
}  # fmt: skip
NOT_PARAMS = {
    "model", "messages", "prompt", "stream", "stream_options", "priority", "deadline_s", "user", "logprobs",
    "top_logprobs", "max_completion_tokens", "best_of", "add_generation_prompt", "chat_template_kwargs",
    "return_token_ids",
}  # fmt: skip


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
@pytest.mark.parametrize("name", HONOURED)
def test_sampling_fields_arrive(kind, name):
    sent, wanted = HONOURED[name]
    got = getattr(parse(kind, **{name: sent}).sampling_params(), name)
    assert got == wanted
    assert getattr(parse(kind, **{name: None}).sampling_params(), name) != wanted  # null is "not given"


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_no_field_of_the_models_is_without_a_test_here(kind):
    assert set(kind.model_fields) - NOT_PARAMS == set(HONOURED)
    assert set(SamplingParams.__dataclass_fields__) == set(HONOURED) | {"logprobs"}


def test_defaults_are_those_of_each_route():
    assert chat().sampling_params() == SamplingParams(max_tokens=None)
    assert completion().sampling_params() == SamplingParams(max_tokens=16)
    assert completion(max_tokens=None).sampling_params().max_tokens == 16


def test_max_completion_tokens_is_max_tokens():
    assert chat(max_completion_tokens=9).sampling_params().max_tokens == 9
    assert chat(max_completion_tokens=9, max_tokens=9).sampling_params().max_tokens == 9
    assert fault(HELLO | {"max_completion_tokens": 9, "max_tokens": 8}).param == "max_completion_tokens"


def test_logprobs_of_chat():
    assert chat().sampling_params().logprobs is None
    assert chat(logprobs=True).sampling_params().logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).sampling_params().logprobs == 20
    assert chat(top_logprobs=0).sampling_params().logprobs is None  # asks for nothing
    assert fault(HELLO | {"top_logprobs": 2}).param == "top_logprobs"
    assert fault(HELLO | {"logprobs": True, "top_logprobs": 21}).param == "top_logprobs"
    assert fault(HELLO | {"logprobs": 2}).param == "logprobs"


def test_logprobs_of_completions():
    assert completion(logprobs=0).sampling_params().logprobs == 0
    assert completion(logprobs=5).sampling_params().logprobs == 5
    assert fault(ONCE | {"logprobs": True}, CompletionRequest).param == "logprobs"


def test_best_of_is_n():
    assert completion(best_of=2, n=2).sampling_params().n == 2
    assert completion(best_of=1).sampling_params().n == 1
    for n, best_of in ((1, 2), (2, 1)):
        error = fault(ONCE | {"n": n, "best_of": best_of}, CompletionRequest)
        assert (error.param, error.code) == ("best_of", "unsupported_field")


def test_stream_options():
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={"include_usage": None, "include_obfuscation": False}).include_usage
    assert not chat(stream=True).include_usage
    assert not chat(stream_options=None).stream
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert chat(stream=True, stream_options=both).continuous_usage
    lone = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert fault(HELLO | lone).param == "stream_options.continuous_usage_stats"
    assert fault(HELLO | {"stream_options": {"include_usage": True}}).param == "stream_options"
    bad = {"include_obfuscation": True}
    assert fault(HELLO | {"stream": True, "stream_options": bad}).param == "stream_options.include_obfuscation"
    error = fault(HELLO | {"stream": True, "stream_options": {"include_usages": True}})
    assert error.param == "stream_options.include_usages"
    assert "include_usage" in error.message
    assert fault(HELLO | {"stream": True, "stream_options": [1]}).param == "stream_options"


def test_what_is_for_the_server():
    request = chat(model="m", user="u", priority=-3, deadline_s=2, chat_template_kwargs={"a": [1]})
    assert (request.model, request.user, request.priority, request.deadline_s) == ("m", "u", -3, 2.0)
    assert request.chat_template_kwargs == {"a": [1]}
    assert request.add_generation_prompt
    assert not chat(add_generation_prompt=False).add_generation_prompt
    assert chat().priority is None
    assert chat().model is None
    assert fault(HELLO | {"chat_template_kwargs": {"add_generation_prompt": False}}).param == (
        "chat_template_kwargs.add_generation_prompt"
    )


def test_messages():
    parts = [{"type": "text", "text": "a\0"}, {"type": "text", "text": "b"}]
    sent = [
        {"role": "developer", "content": "be kind", "name": None},
        {"role": "system", "content": ""},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "audio": None, "annotations": []},
    ]
    assert chat(messages=sent).chat_messages() == [
        {"role": "system", "content": "be kind"}, {"role": "system", "content": ""},
        {"role": "user", "content": "a\0b"}, {"role": "assistant", "content": "c"},
    ]  # fmt: skip


def test_a_message_of_the_openai_client_can_be_sent_back():
    from openai.types.chat import ChatCompletionMessage

    dumped = ChatCompletionMessage(role="assistant", content="hi").model_dump()
    assert chat(messages=[*HELLO["messages"], dumped]).chat_messages()[1] == {"role": "assistant", "content": "hi"}


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [("a", ["a"]), ("", [""]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts(sent, wanted):
    assert completion(prompt=sent).prompts() == wanted


def test_tokenize_takes_a_prompt_or_messages():
    assert parse_body(json.dumps({"prompt": "a"}).encode(), TokenizeRequest).special_tokens
    request = parse_body(json.dumps(HELLO).encode(), TokenizeRequest)
    assert request.chat_messages() == HELLO["messages"]
    assert not request.special_tokens
    assert not parse(TokenizeRequest, add_special_tokens=False).special_tokens
    assert fault({}, TokenizeRequest).param == "prompt"
    assert fault(HELLO | ONCE, TokenizeRequest).param == "prompt"


# What is not ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sent", "param", "says"), PATHS, ids=lambda v: v if isinstance(v, str) else "")
def test_the_field_at_fault_is_named(sent, param, says):
    error = fault(sent)
    assert error.param == param
    assert says in error.message


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"), ([], "prompt"), ({}, "prompt"), (3, "prompt"), ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"), (["a", [1]], "prompt[1]"), ([[1], "a"], "prompt[1]"), ([[1], []], "prompt[1]"),
        ([[1], [2, -1]], "prompt[1][1]"), ([1, True], "prompt[1]"), ([True], "prompt[0]"), ([None], "prompt[0]"),
        ([1.0], "prompt[0]"), ([2**31], "prompt[0]"), (["a"] * 2049, "prompt"),
    ],
)  # fmt: skip
def test_prompts_that_are_none(prompt, param):
    assert fault({"prompt": prompt}, CompletionRequest).param == param


def test_no_text_of_the_client_is_in_a_message():
    secret = "the secret of the client"
    for sent in (
        HELLO | {"messages": [{"role": "user", "content": {"a": secret}}]},
        HELLO | {"temperature": secret},
        HELLO | {"stop": {"a": secret}},
        HELLO | {"mesages": secret},
        HELLO | {"tools": secret},
        HELLO | {"chat_template_kwargs": secret},
    ):
        assert secret not in fault(sent).message


def test_the_engines_complaints_get_the_clients_names():
    error = chat(max_completion_tokens=4).api_error(RequestError("max_tokens", "too many"))
    assert (error.param, error.message) == ("max_completion_tokens", "max_completion_tokens: too many")
    assert chat(max_tokens=4).api_error(RequestError("max_tokens", "too many")).param == "max_tokens"
    assert chat().api_error(RequestError("prompt", "it has 9 tokens")).param == "messages"
    assert completion().api_error(RequestError("prompt", "it has 9 tokens")).param == "prompt"


# Nothing is accepted and ignored -------------------------------------------------------------------------------

VLLM_BOTH = {
    "add_special_tokens", "allowed_token_ids", "cache_salt", "echo", "ignore_eos", "include_stop_str_in_output",
    "kv_transfer_params", "length_penalty", "logits_processors", "max_repetition_pattern_size", "min_p",
    "min_repetition_pattern_size", "min_tokens", "priority", "prompt_logprobs", "repetition_min_count",
    "repetition_penalty", "request_id", "response_format", "return_token_ids", "return_tokens_as_token_ids",
    "skip_special_tokens", "spaces_between_special_tokens", "stop_token_ids", "structured_outputs", "top_k",
    "truncate_prompt_tokens", "use_beam_search", "vllm_xargs",
}  # fmt: skip
VLLM_CHAT = VLLM_BOTH | {
    "add_generation_prompt", "bad_words", "chat_template", "chat_template_kwargs", "continue_final_message",
    "documents", "include_reasoning", "mm_processor_kwargs",
}  # fmt: skip
VLLM_COMPLETION = VLLM_BOTH | {"prompt_embeds"}


def unheard(kind, names):
    return sorted(set(names) - set(kind.model_fields) - set(kind.not_offered))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (ChatCompletionRequest, get_type_hints(chat_create_params.CompletionCreateParamsStreaming)),
        (ChatCompletionRequest, VLLM_CHAT),
        (CompletionRequest, get_type_hints(completion_create_params.CompletionCreateParamsStreaming)),
        (CompletionRequest, VLLM_COMPLETION),
        (StreamOptions, get_type_hints(chat_completion_stream_options_param.ChatCompletionStreamOptionsParam)),
    ],
)
def test_every_field_of_openai_and_vllm_is_honoured_or_refused_by_name(kind, names, monkeypatch):
    names = list(names)
    assert unheard(kind, names) == []
    if kind is ChatCompletionRequest:  # the check would notice one that is missing
        monkeypatch.setattr(kind, "not_offered", {k: v for k, v in refused.CHAT.items() if k != names[-1]})
        monkeypatch.delitem(kind.model_fields, names[-1], raising=False)
        assert unheard(kind, names) == [names[-1]]


@pytest.mark.parametrize(
    ("kind", "name"),
    [(k, n) for k in (ChatCompletionRequest, CompletionRequest, TokenizeRequest) for n in k.not_offered],
)
def test_what_is_not_offered_is_refused_unless_it_asks_for_nothing(kind, name):
    for neutral in (None, *kind.not_offered[name].neutral):
        parse(kind, **{name: neutral})
    error = fault(LEAST[kind] | {name: {"asked": "for"}}, kind)
    assert error.param == name
    assert error.code == "unsupported_field"
    assert kind.not_offered[name].why in error.message


def test_neutral_means_the_same_json():
    assert refused.same(1.0, 1)
    assert not refused.same(True, 1)
    assert not refused.same(0, False)
    assert not refused.same([], {})
    assert fault(HELLO | {"store": 0}).param == "store"
    assert fault(HELLO | {"tools": {}}).param == "tools"
    assert fault(HELLO | {"response_format": {"type": "json_object"}}).param == "response_format"


@pytest.mark.parametrize("kind", KINDS)
def test_the_honoured_and_the_refused_do_not_overlap(kind):
    assert not set(kind.model_fields) & set(kind.not_offered)


def test_a_fault_in_the_judge_is_not_hidden(monkeypatch):
    """Only what a client sent becomes an ApiError; a bug of ours stays what it is."""

    def broken(self):
        raise ZeroDivisionError

    monkeypatch.setattr(Generation, "_max_tokens", broken)
    with pytest.raises(ZeroDivisionError):
        completion()


def test_roles_are_openais_without_tools():
    assert set(fields.ROLES) | set(fields.NO_TOOLS) == {
        "system", "developer", "user", "assistant", "tool", "function",
    }  # fmt: skip
