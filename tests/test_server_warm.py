"""A first forward pass that fails is tried again, and anybody's step is one; in the end the process says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from server_life import SMALL, WAIT_S, Wire, body, tiny_model, wait_for
from test_server_drain import FLAGS

from minillm import AsyncLLM
from minillm.errors import MinillmError
from minillm.server.lifecycle import TRIES
from minillm.server.local import LocalServer
from minillm.server.metrics import WARM_UP

BROKEN = """
import sys
from minillm.cli import main
from minillm.core import EngineCore
from minillm.server import lifecycle
lifecycle.BACK_OFF_S = 0.001
def fails(*args):
    raise RuntimeError("no kernel for this device")
EngineCore._compute = fails
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return tiny_model(tiny_folder, tmp_path_factory.mktemp("warm") / "model")


@pytest.fixture
def failing(monkeypatch):
    """failing(llm, times, only): so many passes fail; of those that compute the warm-up only, or of all."""

    def install(llm, times, only=False):
        compute, failed = llm.core._compute, []

        def pass_(rows, done):
            mine = any(r.request_id == WARM_UP for r, _ in rows)
            if len(failed) < times and (mine or not only):
                failed.append(mine)
                raise RuntimeError("no kernel for this device")
            return compute(rows, done)

        monkeypatch.setattr(llm.core, "_compute", pass_)
        return failed

    return install


def ready(port):
    with Wire(port) as wire:
        return wire.get("/ready").answer()[0]


def start(llm):
    """A server that need not become ready: it is there when it answers at all."""
    server = LocalServer(llm, served_model_name="tiny")
    server._thread.start()

    def answers():
        try:
            return ready(server.port)
        except ConnectionRefusedError:
            return None

    wait_for(answers, "it listens")
    return server


@pytest.mark.parametrize("times", [1, TRIES - 1])
def test_a_first_pass_that_fails_is_tried_again(folder, failing, monkeypatch, times):
    monkeypatch.setattr("minillm.server.lifecycle.BACK_OFF_S", 0.001)
    with AsyncLLM(folder, **SMALL) as llm:
        failed = failing(llm, times)
        with LocalServer(llm, served_model_name="tiny") as server:
            assert failed == [True] * times
            assert ready(server.port) == 200


def test_a_step_of_anybody_is_a_forward_pass(folder, failing, monkeypatch):
    monkeypatch.setattr("minillm.server.lifecycle.BACK_OFF_S", 3600.0)  # the second try never comes
    told = []
    with AsyncLLM(folder, **SMALL) as llm:
        failed = failing(llm, 10**9, only=True)
        server = start(llm)
        try:
            wait_for(lambda: failed, "the first try has failed")
            told.append(ready(server.port))
            with Wire(server.port) as wire:
                told.append(wire.post(body(max_tokens=2)).answer()[0])
            wait_for(lambda: ready(server.port) == 200, "it is ready")
        finally:
            server.stop()
        assert (told, failed) == ([503, 200], [True])


def test_a_step_that_fails_is_none(folder, failing, monkeypatch):
    """The mutation: if any step counted, this server would be ready."""
    monkeypatch.setattr("minillm.server.lifecycle.BACK_OFF_S", 3600.0)
    with AsyncLLM(folder, **SMALL) as llm:
        failing(llm, 10**9)
        server = start(llm)
        try:
            with Wire(server.port) as wire:
                assert wire.post(body(max_tokens=2)).answer()[0] == 500
            assert ready(server.port) == 503
        finally:
            server.stop()


def test_a_server_in_which_no_pass_succeeds_ends(folder, failing, monkeypatch):
    monkeypatch.setattr("minillm.server.lifecycle.BACK_OFF_S", 0.001)
    with AsyncLLM(folder, **SMALL) as llm:
        failed = failing(llm, 10**9)
        with pytest.raises(MinillmError, match=f"failed {TRIES} times.*no kernel for this device"):
            LocalServer(llm, served_model_name="tiny").__enter__()
        assert failed == [True] * TRIES


def test_its_process_ends_with_1_and_says_why(folder):
    done = subprocess.run(
        [sys.executable, "-c", BROKEN, "serve", "--model", str(folder), "--port", "0", *FLAGS],
        capture_output=True, text=True, check=False, timeout=WAIT_S, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    last = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert last["event"] == "ended"
    assert f"failed {TRIES} times" in last["text"]
    assert "no kernel for this device" in last["text"]
