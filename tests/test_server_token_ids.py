"""Lesson 14: return_token_ids, vLLM's name and meaning. The ids of a stream are those of the whole reply, in pieces."""

from __future__ import annotations

import jsonschema
import pytest
from server_life import Wire, body, reference, serving, settled, text_of, tiny_model, web
from test_server_replies import CHAT, TEXT, output_of, request_for, snapshots
from text_families import FAMILIES

from minillm import SamplingParams
from minillm.server import replies
from minillm.server.protocol import ChatCompletionRequest, CompletionRequest
from minillm.server.replies import ChatReply
from minillm.server.reply_schema import CHUNKS, REPLIES

CODEC = FAMILIES["byte level"]
TOKENS = CODEC.encode("the end 你好 two")  # of which several are no whole character


def told(route, **more):
    """(prompt ids by choice, answer ids by choice, chunks) of a stream, and (the same, the whole reply)."""
    kind, reply = route
    request = request_for(kind, n=2, return_token_ids=True, stream=True, **more)
    choices = [snapshots(CODEC, request.sampling_params(), TOKENS[: 9 - 2 * j], j) for j in range(2)]
    steps = [output_of([c[min(i, len(c) - 1)] for c in choices]) for i in range(len(choices[0]))]
    streamed = reply("id", "m", request, CODEC)
    chunks = [chunk for step in steps for chunk in streamed.chunks(0, step)]
    prompts, ids = {}, {}
    for chunk in chunks:
        jsonschema.validate(chunk, CHUNKS[kind])
        (choice,) = chunk["choices"]
        place = chunk if reply is ChatReply else choice
        if "prompt_token_ids" in place:
            prompts.setdefault(choice["index"], []).extend(place["prompt_token_ids"])
        assert choice["index"] in prompts, "with the first chunk"
        ids.setdefault(choice["index"], []).extend(choice["token_ids"])
    full = reply("id", "m", request, CODEC).full(steps[-1:])
    jsonschema.validate(full, REPLIES[kind])
    return prompts, ids, chunks, full


@pytest.mark.parametrize("route", [CHAT, TEXT], ids=["chat", "completions"])
def test_a_stream_tells_the_ids_of_the_whole_reply(route):
    prompts, ids, chunks, full = told(route)
    assert prompts == {0: [5, 6], 1: [5, 6]}
    assert ids == {c["index"]: c["token_ids"] for c in full["choices"]} == {0: TOKENS[:9], 1: TOKENS[:7]}
    places = [full] if route is CHAT else full["choices"]
    assert [p["prompt_token_ids"] for p in places] == [[5, 6]] * len(places)
    texts = [c["choices"][0].get("text", c["choices"][0].get("delta", {}).get("content")) for c in chunks]
    assert "" in texts, "a token whose text is held back is told all the same"


@pytest.mark.parametrize("route", [CHAT, TEXT], ids=["chat", "completions"])
def test_the_comparison_notices_ids_that_are_told_again(route, monkeypatch):
    take = replies._Choice.take
    monkeypatch.setattr(replies._Choice, "take", lambda self, out: (take(self, out), setattr(self, "tokens", 0))[0])
    prompts, ids, *_ = told(route)
    assert ids[0] != TOKENS[:9]
    assert (prompts[0] == [5, 6]) is (route is CHAT)  # told once, or before each token


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest])
def test_nobody_gets_ids_who_did_not_ask(kind):
    route = CHAT if kind is ChatCompletionRequest else TEXT
    request = request_for(kind, stream=True)
    (choice,) = [snapshots(CODEC, request.sampling_params(), TOKENS)]
    streamed = route[1]("id", "m", request, CODEC)
    everything = [c for step in choice for c in streamed.chunks(0, output_of([step]))]
    everything.append(route[1]("id", "m", request, CODEC).full([output_of([choice[-1]])]))
    assert "token_ids" not in str(everything)


@pytest.fixture(scope="module")
def server(tiny_folder, tmp_path_factory):
    folder = tiny_model(tiny_folder, tmp_path_factory.mktemp("ids") / "model")
    with serving(folder) as server:
        server.folder = folder
        yield server
        settled(server)


def test_of_several_prompts(server):
    prompts = [[5, 6, 7], [8, 9], [10]]
    asked = body(prompts, 4, return_token_ids=True)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    want = [o.outputs[0].token_ids for o in reference(server.folder).generate(prompts, params, use_tqdm=False)]
    whole = web.post(server.url + "/v1/completions", json=asked).json()["choices"]
    assert [(c["prompt_token_ids"], c["token_ids"]) for c in whole] == list(zip(prompts, want, strict=True))
    with Wire(server.port) as wire:
        events = wire.post(asked | {"stream": True}).answer()[2]
    got: dict[int, list[int]] = {}
    for event in events[:-1]:
        for c in event["choices"]:
            got.setdefault(c["index"], []).extend(c["token_ids"])
    assert [got[i] for i in range(3)] == want
    ends = [c for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
    assert [c["token_ids"] for c in ends] == [[], [], []]


def test_of_a_conversation(server):
    asked = {"messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    whole = web.post(server.url + "/v1/chat/completions", json=asked | {"return_token_ids": True}).json()
    sent = web.post(server.url + "/tokenize", json={"messages": asked["messages"]}).json()["tokens"]
    assert whole["prompt_token_ids"] == sent
    again = web.post(server.url + "/v1/completions", json=body(sent, 5, return_token_ids=True)).json()["choices"][0]
    assert again["token_ids"] == whole["choices"][0]["token_ids"]
    assert len(again["token_ids"]) == 5


def test_the_text_of_a_stream_is_the_same_with_ids(server):
    texts = []
    for more in ({}, {"return_token_ids": True}):
        with Wire(server.port) as wire:
            texts.append(text_of(wire.post(body((5, 6), 8, stream=True, **more)).answer()[2]))
    assert texts[0] == texts[1] != ""
