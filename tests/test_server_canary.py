"""C8: what a user writes is in no log, no metric, no trace, no timeline and no reply to others, whatever fails."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys

import httpx
import pytest
from server_life import WAIT_S, serving, settled, tiny_model

from minillm.stop import StopStrings


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return tiny_model(tiny_folder, tmp_path_factory.mktemp("canary") / "model")


CANARY = "canary5e1d"
KEY = f"sk-{CANARY}-0123456789"


class Tells(StopStrings):
    """A part that fails with all it knows, when it is asked for something."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asked = args

    def feed(self, text, *args, **kwargs):
        if self.asked[0]:
            raise RuntimeError(f"{self.asked} and {text}")
        return super().feed(text, *args, **kwargs)


def asks(url):
    """A client that writes the canary wherever it can. Returns what others are told meanwhile."""
    head = {"Authorization": f"Bearer {KEY}"}
    good = {"prompt": f"{CANARY} w5", "max_tokens": 3, "user": CANARY, "stop": [CANARY], "temperature": 0}
    chat = {
        "messages": [{"role": "user", "content": CANARY}],
        "max_tokens": 2,
        "chat_template_kwargs": {CANARY: CANARY},
    }
    told = []
    with httpx.Client(base_url=url, headers=head, timeout=WAIT_S) as client:
        for stream in (False, True):
            told.append(client.post("/v1/completions", json=good | {"stream": stream}).status_code)
        told.append(client.post("/v1/chat/completions", json=chat).status_code)
        told.append(client.post("/tokenize", json={"prompt": CANARY}).status_code)
        for wrong in (
            {CANARY: 1},
            good | {"top_p": CANARY},
            good | {"model": CANARY},
            good | {"prompt": f"{CANARY} " * 9999},
        ):
            client.post("/v1/completions", json=wrong)
        client.post("/v1/completions", content=f'{{"prompt": "{CANARY}', headers={"Content-Type": "application/json"})
        client.post("/v1/completions", json=good, headers={"Authorization": f"Bearer {CANARY}"})
        client.post("/v1/completions", json=good, headers={"X-Request-Id": f"{CANARY} {CANARY}"})
        client.get(f"/{CANARY}?{CANARY}={CANARY}", headers={"X-Thing": CANARY})
        client.get(f"/v1/models/{CANARY}")
        client.get(f"/timeline?since={CANARY}")
    with socket.create_connection(url.removeprefix("http://").split(":")) as raw:
        raw.sendall(f"{CANARY} {CANARY} {CANARY}\r\n\r\n".encode())
        raw.recv(1000)
    return told


def told_to_others(url, key):
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=WAIT_S) as other:
        answers = [
            other.get(path)
            for path in ("/metrics", "/timeline", "/v1/models", "/nothing", "/openapi.json", "/ready", "/state")
        ]
        answers.append(other.post("/v1/completions", json={"prompt": "w5", "max_tokens": 100_000, "model": "no"}))
        answers.append(other.post("/v1/completions", json={"prompt": "w5", "max_tokens": 2}))
        answers.append(other.get("/timeline"))
    return "\n".join(a.text + str(a.headers) for a in answers)


OWN_LOGS = ("httpx", "httpcore", "asyncio", "hypothesis")  # of the client, in this process


@pytest.mark.parametrize("parts", [{}, {"stops": Tells}], ids=["it works", "a part fails"])
def test_no_text_of_a_user_is_logged_counted_traced_or_told_to_others(folder, tmp_path, caplog, parts):
    caplog.set_level(logging.DEBUG)
    tenants, traces = tmp_path / "tenants.toml", tmp_path / "traces.jsonl"
    tenants.write_text(f'[tenants.a]\nkeys = ["{KEY}"]\n[tenants.b]\nkeys = ["sk-other-0123456789"]\n')
    with serving(folder, engine={"parts": parts}, tenants=tenants, trace_file=traces) as server:
        told = asks(server.url)
        assert told[0] == (500 if parts else 200)
        others = told_to_others(server.url, "sk-other-0123456789")
        settled(server)
        assert server.state.traces.flush(WAIT_S)
    log = "\n".join(f"{r.getMessage()} {r.exc_text or ''}" for r in caplog.records if not r.name.startswith(OWN_LOGS))
    assert ("failed" in log) is bool(parts)
    if parts:
        assert "in feed" in log  # it says where
    for name, text in {"log": log, "others": others, "traces": traces.read_text()}.items():
        assert text, name
        assert CANARY not in text.lower(), name


def test_nor_is_it_when_a_route_itself_fails(folder, monkeypatch, caplog):
    def fails(self, text, *args, **kwargs):
        raise ValueError(text)

    caplog.set_level(logging.DEBUG)
    with serving(folder) as server:
        monkeypatch.setattr(type(server.state.tokenizer), "encode", fails)
        for path in ("/tokenize", "/v1/completions"):
            answer = httpx.post(server.url + path, json={"prompt": CANARY}, timeout=WAIT_S)
            assert answer.status_code == 500
            assert "its log" in answer.json()["error"]["message"]
            assert CANARY not in answer.text
        monkeypatch.undo()
        settled(server)
    log = "\n".join(f"{r.getMessage()} {r.exc_info and r.exc_info[1]}" for r in caplog.records)
    assert log.count("failed: ValueError") == 2
    assert CANARY not in log


def test_no_text_of_a_user_is_on_the_output_of_the_command(folder, tmp_path):
    traces, environment = tmp_path / "traces.jsonl", os.environ | {"OMP_NUM_THREADS": "1", "MINILLM_API_KEY": KEY}
    command = [sys.executable, "-m", "minillm", "serve", "--json", "--model", str(folder), "--port", "0"]
    command += ["--trace-file", str(traces), "--max-model-len", "512", "--num-kv-blocks", "64", "--dtype", "float32"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as server:
        lines = []
        while not lines or '"ready"' not in lines[-1]:
            line = server.stdout.readline()
            assert line, lines
            lines.append(line)
        url = json.loads(lines[-1])["url"]
        assert asks(url)[0] == 200
        others = told_to_others(url, KEY)
        server.terminate()
        rest = server.stdout.read()
        assert server.wait(WAIT_S) == 0
    for name, text in {"output": "".join(lines) + rest, "others": others, "traces": traces.read_text()}.items():
        assert CANARY not in text.lower(), name
