"""OpenAI's own client talks to the server over real sockets. Streams, who is asking, and tenants.

Texts and probabilities are held against the engine; errors against the classes that the client makes of them.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from server_life import WAIT_S, Wire, body, held, serving, settled, tiny_model, wait_for

from minillm import AsyncLLM, SamplingParams
from minillm.server.local import LocalServer
from minillm.stop import StopStrings

openai = pytest.importorskip("openai")
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789"
TENANTS = f"""
[tenants.alice]
keys = ["{ALICE}"]
priority = "interactive"

[tenants.bob]
keys = ["{BOB}"]
priority = "batch"
"""
CHAT = {"model": "smol", "messages": QUESTION, "temperature": 0, "max_tokens": 12}
TEXT = {"model": "smol", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def server(embedded_folder, tmp_path_factory):
    file = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    file.write_text(TENANTS)
    with (
        AsyncLLM(
            embedded_folder, dtype="float32", max_model_len=256, threads=1, scheduling_policy="priority",
            enable_prefix_caching=True,
        ) as llm,
        LocalServer(llm, served_model_name="smol", tenants=file) as server,
    ):  # fmt: skip
        yield server
        settled(server)


def client_of(server, key=ALICE, **options):
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, **({"max_retries": 0} | options))


@pytest.fixture(scope="module")
def client(server):
    with client_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return tiny_model(tiny_folder, tmp_path_factory.mktemp("openai") / "model")


def ask_async(server, route, **asked):
    """The same request through the asynchronous client: the whole reply, or the list of its chunks."""

    async def go():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=ALICE, max_retries=0) as client:
            create = client.chat.completions.create if route == "chat" else client.completions.create
            got = await create(**asked)
            return [chunk async for chunk in got] if asked.get("stream") else got

    return asyncio.run(go())


def ask(client, route, **asked):
    create = client.chat.completions.create if route == "chat" else client.completions.create
    got = create(**asked)
    return list(got) if asked.get("stream") else got


def texts(chunks, n=1):
    """Each choice's text, of a stream of either route."""
    out = [""] * n
    for chunk in chunks:
        for c in chunk.choices:
            out[c.index] += (c.delta.content or "") if hasattr(c, "delta") else c.text
    return out


def text_of(choice):
    return choice.message.content if hasattr(choice, "message") else choice.text


# Whole and streamed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["chat", "text"])
@pytest.mark.parametrize("how", [ask, ask_async], ids=["sync", "async"])
def test_whole_and_streamed_are_the_engines(server, client, llm, route, how):
    asked = CHAT if route == "chat" else TEXT
    params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"])
    own = llm.chat(QUESTION, params, use_tqdm=False) if route == "chat" else llm.generate(TEXT["prompt"], params)
    want, output = own[0], own[0].outputs[0]
    target = client if how is ask else server
    whole = how(target, route, **asked)
    assert text_of(whole.choices[0]) == output.text
    assert whole.choices[0].finish_reason == output.finish_reason
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
        len(want.prompt_token_ids), len(output.token_ids),
    )  # fmt: skip
    chunks = how(target, route, **asked, stream=True)
    assert texts(chunks) == [output.text]
    assert [c.choices[0].finish_reason for c in chunks][-1] == output.finish_reason
    assert {c.id for c in chunks} == {chunks[0].id} != {whole.id}
    assert all(getattr(c, "usage", None) is None for c in chunks)
    if route == "chat":
        assert output.text == ANSWER
        assert [c.choices[0].delta.role for c in chunks if c.choices[0].delta.role] == ["assistant"]


def test_the_usage_chunk_has_no_choices_and_is_the_last(client):
    *chunks, last = ask(client, "chat", **CHAT, stream=True, stream_options={"include_usage": True})
    assert all(len(c.choices) == 1 and c.usage is None for c in chunks)
    assert last.choices == []
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert last.usage.completion_tokens == 8


def test_n_choices_differ_and_a_seed_repeats_them(client):
    asked = CHAT | {"n": 3, "temperature": 1.5, "seed": 11, "messages": [{"role": "user", "content": "Tell a story."}]}
    first = [text_of(c) for c in ask(client, "chat", **asked).choices]
    assert len(set(first)) == 3
    assert [text_of(c) for c in ask(client, "chat", **asked).choices] == first
    assert texts(ask(client, "chat", **asked, stream=True), 3) == first
    assert [text_of(c) for c in ask(client, "chat", **asked | {"seed": 12}).choices] != first


def test_many_prompts_as_texts_and_as_tokens(server, client):
    prompts = ["The capital of France is", "One, two, three,"]
    each = [text_of(ask(client, "text", **TEXT | {"prompt": p}).choices[0]) for p in prompts]
    ids = [server.state.tokenizer.encode(p) for p in prompts]
    for given in (prompts, ids):
        whole = ask(client, "text", **TEXT | {"prompt": given}, n=1)
        assert [c.index for c in whole.choices] == [0, 1]
        assert [text_of(c) for c in whole.choices] == each
        assert whole.usage.prompt_tokens == sum(map(len, ids))
        assert texts(ask(client, "text", **TEXT | {"prompt": given}, stream=True), 2) == each
    assert text_of(ask(client, "text", **TEXT | {"prompt": ids[0]}).choices[0]) == each[0]
    asked = TEXT | {"prompt": prompts, "temperature": 1.0, "seed": 3, "n": 2}
    both = ask(client, "text", **asked)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert texts(ask(client, "text", **asked, stream=True), 4) == [text_of(c) for c in both.choices]


# What a request may ask -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [" France", ["nothing of it", "ance is P"], "T"])
def test_a_stop_string_is_in_no_chunk(client, stop):
    found = [stop] if isinstance(stop, str) else stop
    (end,) = [ANSWER.index(s) for s in found if s in ANSWER]
    whole = ask(client, "chat", **CHAT, stop=stop)
    chunks = ask(client, "chat", **CHAT, stop=stop, stream=True)
    assert text_of(whole.choices[0]) == ANSWER[:end]
    assert whole.choices[0].finish_reason == "stop"
    assert texts(chunks) == [ANSWER[:end]]
    (kept,) = ask(client, "chat", **CHAT, stop=stop, extra_body={"include_stop_str_in_output": True}).choices
    assert text_of(kept) == ANSWER[: end + len(next(s for s in found if s in ANSWER))]


def shifted(values):
    return [*values[1:], values[0]]


def test_logprobs_streamed_whole_and_the_engines_are_the_same(client, llm):
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3)
    output = llm.chat(QUESTION, params, use_tqdm=False)[0].outputs[0]
    own = [lp[t].logprob for lp, t in zip(output.logprobs, output.token_ids, strict=True)]
    asked = CHAT | {"max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    whole = ask(client, "chat", **asked).choices[0].logprobs.content
    parts = [c.choices[0].logprobs for c in ask(client, "chat", **asked, stream=True)]
    streamed = [entry for part in parts if part is not None for entry in part.content]
    assert [e.token for e in streamed] == [e.token for e in whole]
    close = lambda a, b: a == pytest.approx(b, abs=1e-3)  # other chunks, other order of additions
    logprobs = [e.logprob for e in whole]
    assert len(logprobs) == 8
    assert close(logprobs, own)
    assert close([e.logprob for e in streamed], own)
    assert not close(shifted(logprobs), own)
    for entry, lps in zip(whole, output.logprobs, strict=True):
        best = sorted((lp.logprob for lp in lps.values()), reverse=True)[:3]
        assert close([t.logprob for t in entry.top_logprobs], best)
        assert entry.top_logprobs[0].token == entry.token  # greedy
    assert b"".join(bytes(e.bytes) for e in whole).decode().removesuffix("<|im_end|>") == ANSWER


def test_logprobs_of_a_completion(client, llm):
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2)
    output = llm.generate(TEXT["prompt"], params)[0].outputs[0]
    own = [lp[t].logprob for lp, t in zip(output.logprobs, output.token_ids, strict=True)]
    whole = ask(client, "text", **TEXT, logprobs=2).choices[0]
    parts = [c.choices[0].logprobs for c in ask(client, "text", **TEXT, logprobs=2, stream=True)]
    tokens = [t for p in parts if p is not None for t in p.tokens]
    assert tokens == whole.logprobs.tokens
    assert "".join(tokens) == whole.text
    assert [len(t) for t in whole.logprobs.top_logprobs] == [2] * len(own)
    assert whole.logprobs.token_logprobs == pytest.approx(own, abs=1e-3)
    assert shifted(whole.logprobs.token_logprobs) != pytest.approx(own, abs=1e-3)


def test_a_bias_forces_a_token_and_bans_one(server, client):
    paris = server.state.tokenizer.encode(" Paris")
    assert len(paris) == 1
    forced = ask(client, "text", **TEXT, logit_bias={str(paris[0]): 100})
    assert text_of(forced.choices[0]) == " Paris" * 8
    assert "Paris" in text_of(ask(client, "text", **TEXT).choices[0])
    assert "Paris" not in text_of(ask(client, "text", **TEXT, logit_bias={str(paris[0]): -100}).choices[0])


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a_penalty_is_the_engines(client, llm, name):
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 24}
    asked = TEXT | params | {"prompt": "One, two, one, two, one,"}
    with_it, without = (
        llm.generate(asked["prompt"], SamplingParams(**params, **more), use_tqdm=False)[0].outputs[0].text
        for more in ({name: 1.9}, {})
    )
    extra = {"extra_body": {name: 1.9}} if name.startswith("repetition") else {name: 1.9}
    assert text_of(ask(client, "text", **asked, **extra).choices[0]) == with_it != without


def test_the_extra_fields_of_vllm(server, client):
    """min_p, top_k: at a high temperature only the best token is left. The rest: who ends an answer."""
    plain = text_of(ask(client, "text", **TEXT).choices[0])
    for extra in ({"top_k": 1}, {"min_p": 1.0}):
        got = ask(client, "text", **TEXT | {"temperature": 1.9, "seed": 5}, extra_body=extra)
        assert text_of(got.choices[0]) == plain
    assert text_of(ask(client, "text", **TEXT | {"temperature": 1.9, "seed": 5}).choices[0]) != plain
    is_ = server.state.tokenizer.encode(" is")[0]
    (ended,) = ask(client, "chat", **CHAT, extra_body={"stop_token_ids": [is_]}).choices
    assert (ended.finish_reason, ended.stop_reason) == ("stop", is_)
    assert text_of(ended) == ANSWER.partition(" is")[0]
    (on,) = ask(client, "chat", **CHAT, extra_body={"ignore_eos": True}).choices
    assert (on.finish_reason, text_of(on)[: len(ANSWER)]) == ("length", ANSWER)
    usage = ask(client, "chat", **CHAT, extra_body={"ignore_eos": True}).usage
    assert usage.completion_tokens == CHAT["max_tokens"]


def test_max_completion_tokens_is_max_tokens(client):
    asked = {k: v for k, v in CHAT.items() if k != "max_tokens"}
    whole = ask(client, "chat", **asked, max_completion_tokens=3)
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (3, "length")
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, "chat", **CHAT, max_completion_tokens=3)
    assert error.value.param == "max_completion_tokens"


# What is refused ----------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
REFUSED = [
    ({"tools": [TOOL]}, "tools", "unsupported_field"),
    ({"tool_choice": "auto"}, "tool_choice", "unsupported_field"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_field"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_field"),
    ({"messages": []}, "messages", None),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].role", None),
    ({"temperature": -1}, "temperature", None),
    ({"top_logprobs": 2}, "top_logprobs", None),
    ({"extra_body": {"temprature": 1}}, "temprature", None),
    ({"messages": [{"role": "user", "content": "word " * 300}]}, "messages", "context_length_exceeded"),
]


@pytest.mark.parametrize(("changes", "param", "code"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_honoured_is_a_bad_request_that_names_the_field(client, changes, param, code, stream):
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, "chat", **CHAT | changes, stream=stream)
    assert (error.value.param, error.value.code) == (param, code)
    assert error.value.type == "invalid_request_error"
    assert (param if code != "context_length_exceeded" else "context is 256") in error.value.body["message"]


def test_the_prompt_of_a_completion_that_is_too_long(client):
    for prompt in ("word " * 300, [5] * 300, ["fine", "word " * 300]):
        with pytest.raises(openai.BadRequestError) as error:
            ask(client, "text", **TEXT | {"prompt": prompt})
        assert (error.value.param, error.value.code) == ("prompt", "context_length_exceeded")


def test_who_may_not(server, client):
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(client, "chat", **CHAT | {"model": "gpt-9"})
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    for key in ("sk-nobody-0123456789", "x"):
        with client_of(server, key) as stranger, pytest.raises(openai.AuthenticationError) as error:
            ask(stranger, "chat", **CHAT)
        assert error.value.code == "invalid_api_key"
        assert key not in error.value.body["message"].split()
    with client_of(server, BOB) as bob, pytest.raises(openai.PermissionDeniedError) as error:
        ask(bob, "chat", **CHAT, extra_body={"priority": 0})
    assert (error.value.code, error.value.param) == ("priority_not_allowed", "priority")


def test_models(server, client):
    (card,) = client.models.list().data
    assert (card.id, card.object, card.max_model_len) == ("smol", "model", 256)
    assert client.models.retrieve("smol") == card
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")
    with client_of(server, "sk-nobody-0123456789") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_the_id_of_a_request_is_the_clients(client):
    for name in ("mine-1", "a.B:c_" + "9" * 100):
        raw = client.chat.completions.with_raw_response.create(**CHAT, extra_headers={"X-Request-Id": name})
        assert raw.headers["x-request-id"] == name
        assert raw.parse().id == f"chatcmpl-{name}"
        assert raw.parse()._request_id == name
    raw = client.chat.completions.with_raw_response.create(**CHAT)
    assert raw.parse().id == f"chatcmpl-{raw.headers['x-request-id']}"


# Tenants ------------------------------------------------------------------------------------------------------------


def cached(client, prompt, **more):
    usage = ask(client, "text", **TEXT | {"prompt": prompt, "max_tokens": 1}, **more).usage
    return usage.prompt_tokens_details.cached_tokens


def test_a_tenants_prefixes_are_its_own(server):
    """D7: what another has asked cannot be told from the cache."""
    prompt = "A secret that only one of the two has ever sent to this server. " * 3
    with client_of(server) as alice, client_of(server, BOB) as bob:
        assert cached(alice, prompt) == 0
        assert cached(alice, prompt) > 16
        assert cached(bob, prompt) == 0
        assert cached(bob, prompt) > 16


FORGED = [
    {"extra_headers": {"X-Tenant": "alice", "X-Priority": "0", "OpenAI-Organization": "alice", "X-Api-Key": ALICE}},
    {"extra_headers": {"OpenAI-Project": "alice", "X-Forwarded-User": "alice", "Cookie": f"key={ALICE}"}},
    {"extra_query": {"api_key": ALICE, "tenant": "alice", "priority": "0"}},
    {"user": "alice"},
]


def test_headers_and_fields_do_not_change_who_is_asking(server):
    """A9: the key alone says whose request it is and of which class."""
    prompt = "Another secret that only one of the two has ever sent to it. " * 3
    with client_of(server) as alice, client_of(server, BOB) as bob:
        cached(alice, prompt)
        assert cached(alice, prompt) > 16
        queued = lambda: server.state.llm.engine.events.of("queued")[-1].data
        assert (queued()["tenant"], queued()["priority"]) == ("alice", 0)
        hits = [cached(bob, prompt, **forged) for forged in FORGED]
        assert hits[0] == 0  # and the others hit what bob himself left
        assert (queued()["tenant"], queued()["priority"]) == ("bob", 10)
        for forged in FORGED:
            ask(bob, "text", **TEXT | {"max_tokens": 1}, **forged)
            assert (queued()["tenant"], queued()["priority"]) == ("bob", 10)
        for extra in ({"tenant": "alice"}, {"cache_salt": "alice"}, {"api_key": ALICE}):
            with pytest.raises(openai.BadRequestError):
                ask(bob, "text", **TEXT, extra_body=extra)


# Overload and failure -----------------------------------------------------------------------------------------------


def test_a_full_queue_is_told_with_a_time_and_the_clients_own_retry_gets_in(folder, monkeypatch):
    slept, told = [], []
    with serving(folder, engine={"max_num_seqs": 1}, max_queued_requests=1) as server, ExitStack() as stack:
        holds, waits = Wire(server.port), Wire(server.port)
        core, steps = server.state.llm.core, stack.enter_context(held(server))
        holds.post(body(max_tokens=100, stream=True))
        steps.until(lambda: core.scheduler.running, "the place is taken")
        waits.post(body((7, 8), 100, stream=True))
        steps.hear()
        assert core.scheduler.num_waiting == 1

        def sleep(seconds):
            slept.append(seconds)
            holds.close()
            waits.close()
            wait_for(lambda: not server.state.lifecycle.calls, "the server has heard that they left")
            steps.close()
            wait_for(lambda: not core.outputs, "the queue is empty")

        asked = {"model": "tiny", "prompt": [3, 4], "max_tokens": 2}
        with client_of(server, "-") as hasty, pytest.raises(openai.RateLimitError) as error:
            hasty.completions.create(**asked)
        assert error.value.code == "queue_full"
        wait = int(error.value.response.headers["retry-after"])
        assert 1 <= wait <= 60  # the client honours no longer one
        with client_of(server, "-", max_retries=2) as patient:
            hear = lambda r: told.append((r.status_code, r.headers.get("retry-after")))
            patient._client.event_hooks["response"] = [hear]
            monkeypatch.setattr("openai._base_client.time", SimpleNamespace(sleep=sleep, time=time.time))
            got = patient.completions.create(**asked)
            monkeypatch.undo()
        assert got.usage.completion_tokens == 2
        assert [status for status, _ in told] == [429, 200]
        assert slept == [float(told[0][1])]
        settled(server)


class Breaks(StopStrings):
    """A part that fails after some tokens, of the requests that name a stop string."""

    go = threading.Event()  # the client has read something

    def __init__(self, *args):
        super().__init__(*args)
        self.fed, self.breaks = 0, bool(args[0])

    def feed(self, text, *args, **kwargs):
        self.fed += 1
        if self.breaks and self.fed == 3:
            assert self.go.wait(WAIT_S)
            raise RuntimeError("a part of a learner")
        return super().feed(text, *args, **kwargs)


def test_an_error_inside_a_stream_is_raised_with_the_servers_words(folder):
    asked = {"model": "tiny", "prompt": [3, 4], "max_tokens": 8, "temperature": 0}
    with serving(folder, engine={"parts": {"stops": Breaks}}) as server, client_of(server, "-") as client:
        chunks, stream = [], client.completions.create(**asked, stop="nowhere", stream=True)
        chunks.append(next(stream))
        Breaks.go.set()
        with pytest.raises(openai.APIError, match="the server failed .* its log") as error:
            chunks.extend(stream)
        assert "a part of a learner" not in json.dumps(error.value.body)
        assert error.value.code == "internal_error"
        with pytest.raises(openai.InternalServerError, match="its log"):
            client.completions.create(**asked, stop="nowhere")
        assert client.completions.create(**asked).usage.completion_tokens == 8  # nobody else notices
        settled(server)
