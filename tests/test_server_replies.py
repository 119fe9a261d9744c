"""Lesson 13: replies in OpenAI's shapes; a stream is the whole reply in pieces, wherever the pieces are cut."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import sys

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from text_families import FAMILIES

from minillm import AsyncLLM
from minillm.output import OutputProcessor
from minillm.request import CompletionOutput, Request, RequestOutput, TokenLogprob
from minillm.server import replies
from minillm.server.errors import ApiError
from minillm.server.logprobs import FLOOR, CompletionLogprobs, byte_alphabet, token_bytes
from minillm.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_body,
)
from minillm.server.replies import ChatReply, CompletionReply, detokenize_reply, tokenize_reply
from minillm.server.reply_schema import CHUNKS, ERROR, REPLIES, documented

CHAT, TEXT = (ChatCompletionRequest, ChatReply), (CompletionRequest, CompletionReply)
OURS = {"stop_reason"}  # vLLM's field in a choice, which OpenAI has not


def request_for(kind, **more):
    least = {"messages": [{"role": "user", "content": "hi"}]} if kind is ChatCompletionRequest else {"prompt": "hi"}
    return parse_body(json.dumps(least | more).encode(), kind)


def entries_for(tokens, top, size):
    """What a sampler reports: the drawn token, of any rank, and the `top` likeliest."""
    found = []
    for step, token in enumerate(tokens):
        best = [(token * 7 + step * 13 + k * 31) % size for k in range(top)]
        entry = {token: TokenLogprob(token, -0.5 - step, best.index(token) + 1 if token in best else top + 3)}
        for rank, other in enumerate(best, start=1):
            entry.setdefault(other, TokenLogprob(other, -0.1 * rank - step, rank))
        found.append(entry)
    return found


def snapshots(codec, params, tokens, index=0, prompt=(5, 6)):
    """The cumulative outputs of one choice, from before its first token to its end, made by the engine's own code."""
    made = Request("r", list(prompt), params, seed=0, max_tokens=len(tokens))
    processor = OutputProcessor(codec, made)
    entries = entries_for(tokens, params.logprobs or 0, codec.size)
    text, found = "", [CompletionOutput(index, "", [], None, logprobs=None if params.logprobs is None else [])]
    for count, token in enumerate(tokens, start=1):
        text += processor.push(token)
        found.append(
            CompletionOutput(
                index, text, tokens[:count], made.finish_reason, made.stop_reason,
                logprobs=None if params.logprobs is None else entries[:count],
            )
        )  # fmt: skip
        if made.finished:
            return found
    raise AssertionError("max_tokens ends it")


def output_of(choices, prompt=(5, 6), cached=None):
    ended = all(c.finish_reason is not None for c in choices)
    return RequestOutput("r", None, list(prompt), list(choices), ended, num_cached_tokens=cached)


@st.composite
def conversations(draw):
    """(codec, route, request, what each choice gave over time, where the stream is cut)."""
    codec = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    kind, reply = draw(st.sampled_from([CHAT, TEXT]))
    more = {"n": draw(st.integers(1, 3)), "stream": True, "skip_special_tokens": draw(st.booleans())}
    top = draw(st.none() | st.integers(0, 3))
    if top is not None:
        more |= {"logprobs": True, "top_logprobs": top} if kind is ChatCompletionRequest else {"logprobs": top}
    more["stop"] = draw(st.lists(st.sampled_from(["o", "the", "好", " b"]), max_size=2))
    more["stream_options"] = draw(
        st.sampled_from([None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}])
    )
    request = request_for(kind, **more)
    sample = st.lists(st.integers(0, codec.size - 1), min_size=1, max_size=12)
    texts = st.sampled_from(["the end 你好", "a b 👩‍👩‍👧 two", "naïve hello"]).map(codec.encode)
    choices = [
        snapshots(codec, request.sampling_params(), draw(sample | texts), j) for j in range(request.sampling_params().n)
    ]
    steps = []
    at = [0] * len(choices)
    while any(a < len(c) - 1 for a, c in zip(at, choices)):
        at = [min(a + 3 - draw(st.integers(0, 3)), len(c) - 1) for a, c in zip(at, choices)]
        steps.append(output_of([c[a] for a, c in zip(at, choices)]))
    return codec, reply, request, steps


def make(reply, codec, request):
    return reply("id-1", "m", request, codec, created=7, system_fingerprint="fp")


def joined(chunks, reply):
    """A stream put together again: {index: {text, logprobs, finish_reason, stop_reason}}."""
    found: dict[int, dict] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        so_far = found.setdefault(choice["index"], {"text": "", "logprobs": None, "finish_reason": None})
        assert so_far["finish_reason"] is None, "nothing comes after the end"
        so_far["text"] += choice["delta"].get("content", "") if reply is ChatReply else choice["text"]
        if choice["logprobs"] is not None:
            own = so_far["logprobs"] or {}
            so_far["logprobs"] = {k: v if v is None else [*own.get(k, []), *v] for k, v in choice["logprobs"].items()}
        if choice["finish_reason"] is not None:
            so_far |= {k: choice[k] for k in ("finish_reason", "stop_reason")}
    return found


def whole(full, reply):
    return {
        c["index"]: {
            "text": c["message"]["content"] if reply is ChatReply else c["text"],
            **{k: c[k] for k in ("logprobs", "finish_reason", "stop_reason")},
        }
        for c in full["choices"]
    }


def stream_equals_whole(case):
    codec, reply, request, steps = case
    streamed = make(reply, codec, request)
    chunks = [chunk for step in steps for chunk in streamed.chunks(0, step)]
    full = make(reply, codec, request).full(steps[-1:])
    assert streamed.usage_chunk()["usage"] == full["usage"]
    return joined(chunks, reply) == whole(full, reply)


@given(conversations())
@settings(max_examples=200)
def test_a_stream_is_the_whole_reply_in_pieces(case):
    assert stream_equals_whole(case)


def _forgets_text(self, output):
    text, self.characters = output.text[self.characters :], len(output.token_ids)
    begin, self.tokens = self.tokens, len(output.token_ids)
    return text, self.logprobs.of(output.token_ids[begin:], output.logprobs[begin:]) if self.logprobs else None


def _forgets_offsets(self, token_id):
    return 0


@pytest.mark.parametrize("mutant", ["text", "offsets"])
def test_the_comparison_notices_a_stream_that_forgets(mutant, monkeypatch):
    codec = FAMILIES["byte level"]
    request = request_for(CompletionRequest, logprobs=1)
    tokens = codec.encode("the end 你好 two")
    steps = [output_of([c]) for c in snapshots(codec, request.sampling_params(), tokens)]
    case = (codec, CompletionReply, request, steps)
    assert stream_equals_whole(case)
    if mutant == "text":
        monkeypatch.setattr(replies._Choice, "take", _forgets_text)
    else:  # a fresh object for each chunk, which counts from 0 again
        of = CompletionLogprobs.of
        monkeypatch.setattr(
            CompletionLogprobs, "of", lambda self, *a: (setattr(self, "_characters", 0), of(self, *a))[1]
        )
    assert not stream_equals_whole(case)


# Shapes -------------------------------------------------------------------------------------------------------


def extras(model):
    """Fields that openai's type of a reply does not declare, anywhere inside."""
    found = set(model.model_extra or {})
    for value in model.__dict__.values():
        for item in value if isinstance(value, list) else [value]:
            if hasattr(item, "model_extra"):
                found |= extras(item)
    return found


def parsed(kind, sent):
    """sent, as openai's client reads it: nothing missing, nothing changed, nothing more than is known."""
    model = kind.model_validate(json.loads(json.dumps(sent, allow_nan=False)))
    assert extras(model) <= OURS
    assert model.model_dump(exclude_unset=True) == sent
    return model


CHECKED = {
    (name, kind): jsonschema.Draft202012Validator(schemas[kind])
    for name, schemas in (("full", REPLIES), ("chunk", CHUNKS))
    for kind in CHUNKS
}


@given(conversations())
@settings(max_examples=60)
def test_everything_has_openais_shape(case):
    codec, reply, request, steps = case
    streamed = make(reply, codec, request)
    chunk_type, full_type = (ChatCompletionChunk, ChatCompletion) if reply is ChatReply else (Completion, Completion)
    chunks = [chunk for step in steps for chunk in streamed.chunks(0, step)]
    for chunk in [*chunks, streamed.usage_chunk()]:
        CHECKED["chunk", type(request)].validate(chunk)
        if reply is ChatReply:
            parsed(chunk_type, chunk)
        else:  # openai's type has no unfinished choice, though its streams do
            parsed(chunk_type, chunk | {"choices": [c | {"finish_reason": "stop"} for c in chunk["choices"]]})
        assert (chunk["id"], chunk["created"], chunk["model"]) == ("id-1", 7, "m")
        assert chunk["system_fingerprint"] == "fp"
        assert chunk["object"] == ("chat.completion.chunk" if reply is ChatReply else "text_completion")
    for chunk in chunks:
        assert ("usage" in chunk) is request.include_usage
        assert (chunk.get("usage") is not None) is request.continuous_usage
    full = make(reply, codec, request).full(steps[-1:])
    parsed(full_type, full)
    CHECKED["full", type(request)].validate(full)
    assert (full["id"], full["created"], full["system_fingerprint"]) == ("id-1", 7, "fp")


def test_the_parser_notices_a_field_that_openai_has_not():
    with pytest.raises(AssertionError):
        parsed(Completion, {"id": "a", "object": "text_completion", "created": 1, "model": "m", "choices": [], "x": 1})


@pytest.mark.parametrize("kind", REPLIES)
def test_the_schemas_of_replies_can_stand_in_a_document_and_are_closed(kind):
    found = documented(kind, 400)["responses"]
    schemas = [REPLIES[kind], CHUNKS.get(kind, {}), ERROR]
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
    assert found[200]["content"]["application/json"]["schema"] is REPLIES[kind]
    assert ("text/event-stream" in found[200]["content"]) is (kind in CHUNKS)
    assert found[400]["content"]["application/json"]["schema"] is ERROR
    jsonschema.validate(ApiError(400, "a", param="b").body(), ERROR)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(ApiError(400, "a").body() | {"more": 1}, ERROR)


def test_tokens_and_back(tokenizer):
    ids = tokenizer.encode("hello <|im_end|> 你好")
    plain = tokenize_reply(ids, 99, tokenizer)
    assert plain == {"count": len(ids), "max_model_len": 99, "tokens": ids, "token_strs": None}
    spelled = tokenize_reply(ids, 99, tokenizer, strings=True)
    assert spelled["token_strs"] == [tokenizer.id_to_token(t) for t in ids]
    back = detokenize_reply(ids, tokenizer)
    assert back == {"prompt": "hello <|im_end|> 你好"}
    for reply, kind in ((plain, TokenizeRequest), (spelled, TokenizeRequest), (back, DetokenizeRequest)):
        jsonschema.validate(reply, REPLIES[kind])
    with pytest.raises(ApiError) as caught:
        detokenize_reply([1, tokenizer.vocab_size], tokenizer)
    assert caught.value.param == "tokens[1]"


def simple_steps(reply_kind, codec=FAMILIES["byte level"], text="hello", **more):
    kind, reply = reply_kind
    request = request_for(kind, **more)
    made = snapshots(codec, request.sampling_params(), codec.encode(text))
    return make(reply, codec, request), [output_of([c]) for c in made]


def test_a_chat_stream_opens_with_the_role_and_closes_with_the_reason():
    reply, steps = simple_steps(CHAT)
    first = reply.chunks(0, steps[0])
    assert [c["choices"][0]["delta"] for c in first] == [{"role": "assistant", "content": ""}]
    rest = [c["choices"][0] for step in steps[1:] for c in reply.chunks(0, step)]
    assert rest[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    assert all(set(c["delta"]) == {"content"} for c in rest[:-1])
    assert reply.chunks(0, steps[-1]) == []  # asked again, there is nothing new


def test_stop_reason_is_vllms():
    reply, steps = simple_steps(CHAT, text="hello the end", stop=["the"])
    last = reply.full(steps[-1:])["choices"][0]
    assert (last["finish_reason"], last["stop_reason"], last["message"]["content"]) == ("stop", "the", "hello ")


def test_choices_are_numbered_over_prompts():
    codec, request = FAMILIES["byte level"], request_for(CompletionRequest, prompt=["a", "b"], n=2)
    made = [
        [snapshots(codec, request.sampling_params(), codec.encode(t), j)[-1] for j in (0, 1)] for t in ("one", "two")
    ]
    results = [output_of(c) for c in made]
    full = make(CompletionReply, codec, request).full(results)
    assert [(c["index"], c["text"]) for c in full["choices"]] == [(0, "one"), (1, "one"), (2, "two"), (3, "two")]
    streamed = make(CompletionReply, codec, request)
    indices = [c["choices"][0]["index"] for i in (1, 0) for c in streamed.chunks(i, results[i])]
    assert indices == [2, 2, 3, 3, 0, 0, 1, 1]


def test_usage_counts_a_prompt_once():
    codec, request = FAMILIES["byte level"], request_for(CompletionRequest, prompt=["a", "b"], n=2)
    choices = [CompletionOutput(j, "x", [1, 2, 3], "length") for j in (0, 1)]
    results = [output_of(choices, prompt=range(10), cached=4), output_of(choices, prompt=range(5), cached=0)]
    want = {
        "prompt_tokens": 15, "completion_tokens": 12, "total_tokens": 27, "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip
    assert make(CompletionReply, codec, request).full(results)["usage"] == want
    streamed = make(CompletionReply, codec, request)
    for i in (1, 0):
        streamed.chunks(i, results[i])
    assert streamed.usage_chunk()["usage"] == want
    unknown = make(CompletionReply, codec, request).full([output_of(choices)])["usage"]
    assert unknown["prompt_tokens_details"] is None  # not 0: nobody counted


@pytest.mark.parametrize(("reason", "status"), [("error", 500), ("abort", 504)])
def test_a_choice_that_failed_is_no_chunk(reason, status):
    for kind in (CHAT, TEXT):
        reply, _ = simple_steps(kind)
        failed = output_of([CompletionOutput(0, "so far", [1, 2], reason, "why")])
        chunks = reply.chunks(0, failed)
        assert "so far" in json.dumps(chunks)
        assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
        assert reply.chunks(0, failed) == []
        with pytest.raises(ApiError) as caught:
            simple_steps(kind)[0].full([failed])
        assert caught.value.status == status


# Logprobs --------------------------------------------------------------------------------------------------------


def test_the_byte_alphabet_is_the_librarys():
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert set(alphabet) == set(ByteLevel.alphabet())
    pre = ByteLevel(add_prefix_space=False, use_regex=False)
    for code in [*range(0x250), 0x20AC, 0x4F60, 0x1F600]:
        text = chr(code)
        ((spelled, _),) = pre.pre_tokenize_str(text)
        assert bytes(alphabet[c] for c in spelled) == text.encode()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_bytes_are_those_that_a_token_adds_to_a_text(family):
    """decode(prefix + token) is decode(prefix) and the token's bytes, for every token of every kind of vocabulary."""
    codec = FAMILIES[family]
    table = token_bytes(codec)
    prefix = codec.encode("hello")
    before = codec.decode(prefix, False)
    for token in range(codec.size):
        assert codec.decode([*prefix, token], False) == before + table[token].decode(errors="replace"), token
    for text in ("a b 👩‍👩‍👧", "你好 naïve", "Ġ literally"):
        ids = codec.encode(text)
        raw = b"".join(table[t] for t in [*prefix, *ids]).removeprefix(b" ")
        assert raw.decode() == codec.decode([*prefix, *ids], False).removeprefix(" ")


def test_bytes_of_the_embedded_model(tokenizer):
    table = token_bytes(tokenizer)
    assert table is token_bytes(tokenizer)
    wrong = [
        t for t in range(tokenizer.vocab_size) if table[t].decode(errors="replace") != tokenizer.decode([t], False)
    ]
    assert wrong == []
    smile = tokenizer.encode("😀")
    assert len(smile) > 1
    assert b"".join(table[t] for t in smile).decode() == "😀"
    assert "\ufffd" in tokenizer.decode(smile[:1])  # which its text could not have told


def test_chat_logprobs():
    codec = FAMILIES["byte level"]
    request = request_for(ChatCompletionRequest, logprobs=True, top_logprobs=2)
    h, e, l = codec.encode("h") + codec.encode("e") + codec.encode("l")
    entry = {h: TokenLogprob(h, -3.0, 9), e: TokenLogprob(e, -0.25, 1), l: TokenLogprob(l, -math.inf, 2)}
    choice = CompletionOutput(0, "h", [h], "length", logprobs=[entry])
    got = make(ChatReply, codec, request).full([output_of([choice])])["choices"][0]["logprobs"]
    assert got == {
        "content": [
            {
                "token": "h", "bytes": [104], "logprob": -3.0,
                "top_logprobs": [
                    {"token": "e", "bytes": [101], "logprob": -0.25}, {"token": "l", "bytes": [108], "logprob": FLOOR},
                ],
            }
        ],
        "refusal": None,
    }  # fmt: skip
    entry[l].logprob = math.nan  # of a sampler of one's own; JSON has none
    got = make(ChatReply, codec, request).full([output_of([choice])])["choices"][0]["logprobs"]
    assert got["content"][0]["top_logprobs"][1]["logprob"] == FLOOR
    none = request_for(ChatCompletionRequest, logprobs=True)
    got = make(ChatReply, codec, none).full([output_of([choice])])["choices"][0]["logprobs"]
    assert got["content"][0]["top_logprobs"] == []


def test_completion_logprobs():
    codec = FAMILIES["byte level"]
    request = request_for(CompletionRequest, logprobs=1)
    h, e = codec.encode("h") + codec.encode("e")
    half = next(t for t in range(codec.size) if token_bytes(codec)[t] == b"\xe4")
    entries = [{h: TokenLogprob(h, -3.0, 9), half: TokenLogprob(half, -0.25, 1)}, {e: TokenLogprob(e, -0.5, 1)}]
    choice = CompletionOutput(0, "he", [h, e], "length", logprobs=entries)
    assert make(CompletionReply, codec, request).full([output_of([choice])])["choices"][0]["logprobs"] == {
        "tokens": ["h", "e"], "token_logprobs": [-3.0, -0.5], "text_offset": [0, 1],
        "top_logprobs": [{"bytes:\\xe4": -0.25, "h": -3.0}, {"e": -0.5}],
    }  # fmt: skip


def test_the_chosen_token_keeps_its_logprob_when_another_is_spelled_like_it():
    codec = FAMILIES["gemma"]
    letter, spelled = codec.special("a"), codec.special("<0x61>")
    entry = {letter: TokenLogprob(letter, -4.0, 7), spelled: TokenLogprob(spelled, -0.5, 1)}
    assert CompletionLogprobs(codec).of([letter], [entry])["top_logprobs"] == [{"a": -4.0}]


@given(
    st.sampled_from(["byte level", "gemma"]),
    st.lists(st.sampled_from(["the", "你好", "👩‍👩‍👧", " a", "é"]), max_size=6),
)
def test_text_offsets_point_to_where_tokens_begin(family, words):
    codec = FAMILIES[family]
    text = "hello" + "".join(words)
    tokens = codec.encode(text)
    got = CompletionLogprobs(codec).of(tokens, entries_for(tokens, 0, codec.size))
    raw = b""
    for token, offset in zip(tokens, got["text_offset"], strict=True):
        begun = raw.decode(errors="ignore")
        assert offset == len(begun)  # a character that has begun and is not whole is the next one
        raw += token_bytes(codec)[token]
    assert raw.decode() == text


def test_a_hidden_token_takes_no_room():
    codec = FAMILIES["byte level"]
    eos, a = codec.special("<eos>"), codec.encode("a")[0]
    entries = entries_for([a, eos, a], 0, codec.size)
    for hidden, want in ((codec.special_ids, [0, 1, 1]), (frozenset(), [0, 1, 6])):
        assert CompletionLogprobs(codec, hidden).of([a, eos, a], entries)["text_offset"] == want


# Cost ------------------------------------------------------------------------------------------------------------


def calls_of(action):
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # a collection in the middle calls what others have asked it to
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.mark.parametrize("kind", [CHAT, TEXT])
def test_a_chunk_costs_the_same_early_and_late(kind):
    reply, steps = simple_steps(kind, text="a b " * 300, max_tokens=2000)
    costs = [calls_of(lambda step=step: reply.chunks(0, step)) for step in steps[1:-1]]
    assert max(costs[5:]) == min(costs[5:])
    assert max(costs[5:]) < 20  # dicts of what is new, and no model of a schema


# The engine ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(embedded_folder):
    with AsyncLLM(embedded_folder, dtype="float32", max_model_len=128, enable_prefix_caching=True) as llm:
        yield llm


def run(engine, reply, request, prompt):
    """(the chunks of a stream, its last one, the engine's last output)"""

    async def go():
        stream, chunks = make(reply, engine.get_tokenizer(), request), []
        async for output in engine.generate(prompt, request.sampling_params()):
            chunks += stream.chunks(0, output)
        return chunks, stream.usage_chunk(), output

    return asyncio.run(go())


@pytest.mark.model
@pytest.mark.parametrize("kind", [CHAT, TEXT])
def test_the_engines_stream_is_its_whole_reply(kind, engine):
    request_kind, reply = kind
    more = {"logprobs": True, "top_logprobs": 2} if kind is CHAT else {"logprobs": 2}
    request = request_for(request_kind, n=2, seed=5, max_tokens=8, temperature=1.5, **more)
    chunks, last, output = run(engine, reply, request, "Emoji: 😀👩‍👩‍👧")
    full = make(reply, engine.get_tokenizer(), request).full([output])
    assert joined(chunks, reply) == whole(full, reply)
    assert last["usage"] == full["usage"]
    given = sum(len(c.token_ids) for c in output.outputs)
    assert full["usage"]["completion_tokens"] == given > 2


@pytest.mark.model
def test_outputs_count_what_the_cache_had(engine):
    request = request_for(CompletionRequest, max_tokens=1)
    first, second = (run(engine, CompletionReply, request, list(range(100, 180)))[1] for _ in range(2))
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert 48 <= second["usage"]["prompt_tokens_details"]["cached_tokens"] < 80


def test_usage_so_far_is_in_every_chunk_that_asks_for_it(tokenizer):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "stream_options": options}
    reply = ChatReply("id", "m", ChatCompletionRequest.model_validate(body), tokenizer)
    counts = []
    for n in (1, 2, 5):
        given = CompletionOutput(0, "a" * n, list(range(n)), "stop" if n == 5 else None)
        for chunk in reply.chunks(0, RequestOutput("id", None, [1, 2, 3], [given], n == 5)):
            assert chunk["usage"]["prompt_tokens"] == 3
            counts.append(chunk["usage"]["completion_tokens"])
    assert counts == [1, 1, 2, 5, 5]
    assert reply.usage_chunk()["usage"]["completion_tokens"] == 5
