"""The server end to end: a real engine behind uvicorn, a real client in front."""

from __future__ import annotations

import pytest
from server_life import web

from minillm import AsyncLLM, SamplingParams

openai = pytest.importorskip("openai")
from minillm.server.local import LocalServer  # noqa: E402

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(embedded_folder):
    with AsyncLLM(
        embedded_folder, dtype="float32", max_model_len=256, threads=1, scheduling_policy="priority",
        enable_prefix_caching=True,
    ) as llm, LocalServer(llm, served_model_name="smol") as server:  # fmt: skip
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0) as client:
        yield client


def test_a_whole_answer_and_its_stream_are_the_engines(server, client, llm):
    want = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0]
    asked = {"model": "smol", "messages": QUESTION, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == want.outputs[0].text
    assert whole.usage.prompt_tokens == len(want.prompt_token_ids)
    assert whole.usage.completion_tokens == len(want.outputs[0].token_ids)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == want.outputs[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == want.outputs[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_operations(server):
    assert web.get(server.url + "/health").json() == {"status": "ok"}
    assert web.get(server.url + "/ready").json() == {"status": "ready"}
    assert 'minillm:requests_total{model_name="smol"}' in web.get(server.url + "/metrics").text
    refused = web.post(server.url + "/drain")
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")


def test_tokenize_and_back(server):
    text = "Schöne Grüße, 世界"
    tokens = web.post(server.url + "/tokenize", json={"prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert web.post(server.url + "/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": text}
