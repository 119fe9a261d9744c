"""`minillm serve --split 1p1d`: two real processes over shared memory give the tokens of one, and one dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
from disagg_pair import GREEDY, PROMPT, SEEDED, alone
from server_life import tiny_model

from minillm import SamplingParams
from minillm.cluster.transport import ChannelClosed, connect
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
    end = time.monotonic() + 120
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
        assert process.wait(120) == 0


def test_a_prefill_server_that_is_told_to_end_finishes_what_it_can_and_gives_the_rest_back(folder):
    """The test is its decode server. Told once, it drains; told again, it does not wait."""
    place = f"unix:@minillm-drain-{os.getpid()}"
    flags = ["--model", str(folder), "--role", "prefill", "--kv-address", place, "--grace-s", "600"]
    with minillm(*flags, env={"MINILLM_KV_KEY": "a secret"}) as (process, _):
        wire = connect(place, b"a secret")

        def hear(kind, of=None):
            """The next message of a kind. What other prompts have to say may come before it."""
            while True:
                received = wire.recv(120.0)
                assert received is not None, f"no {kind} came"
                said = received[0]
                if said["kind"] == kind and of in (None, said.get("id"), said.get("ticket", {}).get("request_id")):
                    return said

        def say(kind, name, **more):
            wire.send({"kind": kind, "id": name, "attempt": 1, **more})

        def submit(name):
            say("submit", name, tokens=PROMPTS[0][:48], tenant="", priority=0, lease_s=600.0, layout=hello["layout"])

        hello = hear("hello")
        for name in ("finished", "left"):
            submit(name)
            hear("reserve", name)
        process.send_signal(signal.SIGTERM)
        hear("draining")
        submit("late")
        assert "is draining" in hear("refused", "late")["why"]
        say("reserved", "finished")
        hear("done", "finished")
        say("ack", "finished")
        assert process.poll() is None, "the other one is waited for"
        process.send_signal(signal.SIGTERM)
        assert "shutting down" in hear("refused", "left")["why"]
        with pytest.raises(ChannelClosed):
            hear("anything else")
        assert process.wait(120) == 0
        last = json.loads(process.stdout.read().splitlines()[-1])
        assert (last["event"], last["given_back"]) == ("ended", 1)
        assert "Traceback" not in process.stderr.read()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_split_that_is_told_to_end_answers_what_it_has_taken(folder):
    """One prefill server is told together with it, as a process manager does that signals all: that one drains too.
    The other lives until the last answer, and computes what it was asked to."""
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    want = alone(folder, PROMPTS[:2], greedy)
    flags = ["--model", str(folder), "--split", "2p1d", "--grace-s", "600", "--kv-lease-s", "600"]
    with minillm(*flags) as (process, ready), ThreadPoolExecutor(2) as pool:
        url, both = ready["url"], children(process.pid)
        waiting = lambda: sum(metric(url, "num_requests_waiting").values())
        try:
            for pid in both:
                os.kill(pid, signal.SIGSTOP)
            answers = []
            for n, prompt in enumerate(PROMPTS[:2], 1):
                answers.append(pool.submit(post, url, prompt, temperature=0))
                until(lambda n=n: waiting() == n)  # each prefill server has one
            os.kill(both[0], signal.SIGTERM)
            process.terminate()
            until(lambda: "draining" in why_not_ready(url))
        finally:
            for pid in both:
                os.kill(pid, signal.SIGCONT)
        assert [answer.result(120) for answer in answers] == want
        assert process.wait(120) == 0
        assert all(map(ended, both))
        log = process.stderr.read()
        assert log.count("is computed here") <= 1, "by the one that was told, if at all"
        assert "Traceback" not in log


def why_not_ready(url):
    try:
        urllib.request.urlopen(url + "/ready")
    except urllib.error.HTTPError as error:
        return error.read().decode()
    return ""


def test_a_split_over_torch_distributed(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    prefill, decode = run_processes(2, "disagg_peer:side", {"folder": str(folder)})
    want = alone(folder, [PROMPT], GREEDY) + alone(folder, [PROMPT], SEEDED)
    assert decode == [want, [["loaded", "", 2]], 0]
    assert prefill == [[2], 0]
