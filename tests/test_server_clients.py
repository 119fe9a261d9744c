"""Clients of other projects talk to the server as they talk to OpenAI.

litellm and langchain-openai live in an environment of their own (`make clients`, which `make test` runs).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from minillm import AsyncLLM
from minillm.server.local import LocalServer

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("MINILLM_CLIENTS_PYTHON", ROOT / ".venv-clients/bin/python"))
APPS = Path(__file__).parent / "client_apps"


@pytest.fixture(scope="module")
def server(embedded_folder):
    with (
        AsyncLLM(embedded_folder, dtype="float32", max_model_len=256, threads=1) as llm,
        LocalServer(llm, served_model_name="smol", api_key="sk-of-a-client") as server,
    ):
        yield server


@pytest.mark.parametrize("app", ["litellm", "langchain"])
def test_a_client_in_its_own_environment(server, app):
    if not PYTHON.is_file():
        pytest.skip("the clients' environment is not there; make clients makes it")
    done = subprocess.run(
        [PYTHON, APPS / f"ask_{app}.py", server.url, "smol"], capture_output=True, text=True, timeout=300,
        env=os.environ | {"NO_PROXY": "127.0.0.1", "LANGSMITH_TRACING": "false"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["text"] == got["streamed"] == "The capital of France is Paris."
    assert got["usage"] == got["stream_usage"] == 37 + 8
    assert "tools" in got["refused"]
