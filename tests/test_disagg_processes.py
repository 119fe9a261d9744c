"""`minillm serve --split 1p1d`: two real processes over shared memory give the tokens of one, and one dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
from disagg_pair import GREEDY, PROMPT, SEEDED, alone
from server_life import tiny_model

from minillm import SamplingParams
from minillm.parallel.processes import run_processes

PROMPTS = [[(7 * i + j) % 200 + 5 for i in range(60 + 11 * j)] for j in range(4)]
OPTIONS = ("--dtype", "float32", "--num-kv-blocks", "64", "--max-model-len", "256", "--threads", "1", "--json")


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return tiny_model(tiny_folder, tmp_path_factory.mktemp("processes") / "model")


@contextlib.contextmanager
def minillm(*arguments, env=None):
    process = subprocess.Popen(
        [sys.executable, "-m", "minillm", "serve", "--port", "0", *OPTIONS, *arguments], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})},
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, json.loads(line)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def post(url, prompt, **body):
    body = {"prompt": prompt, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True, **body}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)["choices"][0]["token_ids"]


def metric(url, name):
    text = urllib.request.urlopen(url + "/metrics").read().decode()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("minillm:" + name)
    }


def ended(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def until(holds):
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(n) for n in file.read().split()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_split_of_real_processes_the_death_of_one_and_of_all(folder):
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    want = alone(folder, PROMPTS, greedy), alone(folder, PROMPTS, greedy.replace(temperature=1.0, seed=5))
    with minillm("--model", str(folder), "--split", "2p1d") as (process, ready):
        url = ready["url"]
        assert [post(url, p, temperature=0) for p in PROMPTS[:2]] == want[0][:2]
        assert post(url, PROMPTS[2], temperature=1.0, seed=5) == want[1][2]
        (loaded,) = metric(url, "kv_transfers_total").items()
        assert 'outcome="loaded"' in loaded[0]
        assert loaded[1] == 3
        first, second = children(process.pid)
        os.kill(first, signal.SIGKILL)
        until(lambda: any(v for k, v in metric(url, "prefill_servers").items() if '"ended"' in k))
        assert post(url, PROMPTS[3], temperature=0) == want[0][3], "the other one does it"
        assert metric(url, "kv_transfers_total") == {loaded[0]: 4}
        process.kill()
        process.wait()
        until(lambda: ended(second))
        assert "its prompts are computed here" in process.stderr.read()


def test_a_prefill_server_of_ones_own_that_comes_back(folder):
    place, env = f"unix:@minillm-test-{os.getpid()}", {"MINILLM_KV_KEY": "a secret"}
    roles = ["--model", str(folder), "--role", "decode", "--prefill", place]
    prefill = ["--model", str(folder), "--role", "prefill", "--kv-address", place]
    want = alone(folder, PROMPTS, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    with minillm(*roles, env=env) as (process, ready):
        url = ready["url"]
        assert post(url, PROMPTS[0], temperature=0) == want[0], "nobody is there yet"
        assert not metric(url, "kv_transfers_total")
        with minillm(*prefill, env=env) as (_, told):
            assert told["kv_address"] == place
            until(lambda: any(v for k, v in metric(url, "prefill_servers").items() if '"ready"' in k))
            assert post(url, PROMPTS[1], temperature=0) == want[1]
            assert list(metric(url, "kv_transfers_total").values()) == [1]
            assert any(v > 0 for k, v in metric(told["url"], "kv_transfer_bytes").items())
        until(lambda: any(v for k, v in metric(url, "prefill_servers").items() if '"unreachable"' in k))
        assert post(url, PROMPTS[2], temperature=0) == want[2], "it goes on alone"
        process.terminate()
        assert process.wait(60) == 0


def test_a_split_over_torch_distributed(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    prefill, decode = run_processes(2, "disagg_peer:side", {"folder": str(folder)})
    want = alone(folder, [PROMPT], GREEDY) + alone(folder, [PROMPT], SEEDED)
    assert decode == [want, [["loaded", "", 2]], 0]
    assert prefill == [[2], 0]
