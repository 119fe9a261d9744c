"""Roles of a server: which options belong to which, what a prefill server tells clients, what /metrics tells."""

from __future__ import annotations

import argparse
import json
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
from disagg_pair import GREEDY, PROMPT, Split, until
from server_life import serving, tiny_model

from minillm.cli import main
from minillm.cluster.transport import listen
from minillm.commands.serve import options
from minillm.errors import MinillmError
from minillm.server.config import ServerConfig
from minillm.server.gauges import EngineGauges
from minillm.server.handover import (
    HandoverMetrics,
    Side,
    devices,
    kv_key,
    shares,
    start,
    start_children,
    threads_each,
)

PREFILL = ("unix:@somewhere",)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"role": "draft"}, "one of both, prefill, decode"),
        ({"role": "decode"}, "needs prefill"),
        ({"prefill": PREFILL}, "role decode"),
        ({"role": "decode", "prefill": PREFILL * 2}, "twice"),
        ({"role": "decode", "prefill": ("",)}, "addresses"),
        ({"role": "decode", "prefill": ("127.0.0.1:8100",)}, "unix:@NAME"),
        ({"role": "decode", "prefill": "unix:@a"}, "addresses"),
        ({"role": "decode", "prefill": PREFILL, "kv_address": "unix:@x"}, "role prefill"),
        ({"kv_address": "unix:@x"}, "role prefill"),
        ({"role": "prefill", "kv_address": "somewhere:80"}, "unix:@NAME"),
        ({"role": "prefill", "prefill": PREFILL}, "role decode"),
        ({"role": "prefill", "trace_file": "t.jsonl"}, "gives none"),
        ({"role": "prefill", "tenants": "t.toml"}, "gives none"),
        ({"role": "prefill", "otlp_traces_endpoint": "http://x"}, "gives none"),
        ({"role": "prefill", "kv_lease_s": 3.0}, "decode server's"),
        ({"kv_lease_s": 3.0}, "decode server's"),
        ({"split": "1p1d", "kv_lease_s": 0}, "at most 3600"),
        ({"split": "1p1d", "role": "decode"}, "leave role and prefill out"),
        ({"split": "1p1d", "role": "prefill"}, "leave role and prefill out"),
        ({"split": "1p2d"}, "router"),
        ({"split": "0p1d"}, "written as 1p1d"),
        ({"split": "1p"}, "written as 1p1d"),
    ],
)
def test_options_that_a_role_would_ignore_or_lacks_are_refused(given, words):
    with pytest.raises(MinillmError, match=words):
        ServerConfig(**given)


def test_options_that_fit():
    ServerConfig(role="decode", prefill=("unix:@a", "unix:/b"), kv_lease_s=5.0)
    ServerConfig(role="prefill", kv_address="unix:@a", admin_key="adm")
    ServerConfig(split="2p1d", kv_lease_s=5.0)


@pytest.mark.parametrize("role", [["--role", "prefill"], ["--role", "decode", "--prefill", "unix:@nobody"]])
def test_a_role_without_the_key_is_one_line(role, capsys, monkeypatch):
    monkeypatch.delenv("MINILLM_KV_KEY", raising=False)
    assert main(["serve", "--port", "0", *role]) == 2
    told = capsys.readouterr().err
    assert "MINILLM_KV_KEY" in told
    assert "Traceback" not in told
    monkeypatch.setenv("MINILLM_KV_KEY", "secret")
    assert kv_key() == b"secret"


def test_a_kv_address_that_is_taken_is_told_before_the_weights_are_read(capsys, monkeypatch):
    monkeypatch.setenv("MINILLM_KV_KEY", "secret")
    monkeypatch.setattr("minillm.server.command.AsyncLLM", lambda *_, **__: pytest.fail("it read the weights"))
    other = listen("shared-memory", b"another")
    try:
        assert main(["serve", "--port", "0", "--role", "prefill", "--kv-address", other.address]) == 2
    finally:
        other.close()
    assert f"cannot listen at {other.address}" in capsys.readouterr().err


def test_a_prefill_server_that_cannot_load_leaves_its_address(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("MINILLM_KV_KEY", "secret")
    place = f"unix:{tmp_path}/door"
    assert main(["serve", "--port", "0", "--role", "prefill", "--kv-address", place, "--model", str(tmp_path)]) == 2
    assert not (tmp_path / "door").exists()


def parsed(*arguments):
    from minillm.commands import serve

    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return parser.parse_args(["serve", *arguments])


def test_what_a_prefill_child_is_started_with(monkeypatch):
    """The same engine, none of the server's own options, and no key in its command line."""
    started = []
    monkeypatch.setattr("minillm.server.handover.PrefillChild", lambda command, env: started.append((command, env)))
    monkeypatch.setenv("MINILLM_API_KEY", "sk-1")
    monkeypatch.setenv("MINILLM_CACHE", "/where/the/models/are")
    args = parsed(
        "--split", "2p1d", "--dtype", "float32", "--no-enable-prefix-caching", "--kv-disk-path", "here", "--threads",
        "3", "--api-key", "sk-2", "--enforce-eager",
    )  # fmt: skip
    server, engine = options(args)
    children, key = start_children(ServerConfig(**server), args, engine)
    assert list(children) == ["p0", "p1"]
    command, env = started[0]
    text = " ".join(command[3:])
    assert text.startswith("serve --model smollm2-135m --role prefill --port 0 --json")
    assert "--dtype float32" in text
    assert "--no-enable-prefix-caching" in text
    assert "--enforce-eager" in text
    assert "--threads 3" in text
    assert "disk" not in text
    assert "sk-" not in text
    assert key.decode() not in text
    assert env["MINILLM_KV_KEY"] == key.decode()
    assert "MINILLM_API_KEY" not in env
    assert env["MINILLM_CACHE"] == "/where/the/models/are"


def test_the_threads_of_a_cpu_are_divided(monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    args = lambda **given: SimpleNamespace(**({"threads": None, "device": "cpu"} | given))
    assert threads_each(args(), 1) == 4
    assert threads_each(args(), 9) == 1
    assert threads_each(args(threads=6), 1) == 6
    assert threads_each(args(device="cuda"), 1) is None


def test_each_engine_of_a_split_has_cards_of_its_own_where_there_are_enough(monkeypatch):
    assert devices(1, 2, 1) == {}, "there is no GPU here"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices(1, 2, 2) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert devices(2, 3, 1) == {"CUDA_VISIBLE_DEVICES": "2"}
    assert devices(1, 3, 2) == {}, "six are needed: they share"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    assert devices(1, 2, 1) == {"CUDA_VISIBLE_DEVICES": "5"}


def test_engines_of_a_split_that_share_a_device_are_told_how_many_they_are(monkeypatch):
    """Each would take half of what it finds free, and they look at about the same time."""
    args = lambda device="auto": SimpleNamespace(device=device, threads=None)
    assert shares(args("cpu"), {}, 2)["engines_on_device"] == 3
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert shares(args(), {}, 2) == {"engines_on_device": 3}
    assert shares(args(), {"tensor_parallel_size": 2}, 1) == {"engines_on_device": 2}
    assert shares(args(), {}, 1) == {}, "each has a card of its own"
    assert shares(args("cuda:1"), {}, 1) == {"engines_on_device": 2}, "this one was asked for, for all"
    assert shares(args(), {"num_kv_blocks": 8}, 2) == {}
    assert shares(args(), {"kv_cache_memory_bytes": 8}, 2) == {}
    assert shares(args("cpu"), {}, 2).keys() == {"threads", "engines_on_device"}
    assert shares(args("cpu"), {"num_kv_blocks": 8}, 2).keys() == {"threads"}


def test_a_prefill_server_is_told_of_the_memory_it_shares_and_takes_a_card_that_was_asked_for(monkeypatch):
    started = []
    monkeypatch.setattr("minillm.server.handover.PrefillChild", lambda command, env: started.append((command, env)))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for device in ("cuda", "cuda:1"):
        args = parsed("--split", "1p1d", "--device", device)
        server, engine = options(args)
        start_children(ServerConfig(**server), args, engine)
    (own, own_env), (shared, shared_env) = started
    assert own_env["CUDA_VISIBLE_DEVICES"] == "1"
    assert "--engines-on-device" not in own
    assert "CUDA_VISIBLE_DEVICES" not in shared_env
    assert options(parsed(*shared[4:]))[1]["engines_on_device"] == 2


def test_a_prefill_server_listens_though_nobody_opened_its_door_before(monkeypatch):
    monkeypatch.setenv("MINILLM_KV_KEY", "secret")
    listened = []
    monkeypatch.setattr("minillm.server.handover.PrefillWorker", lambda llm, door: listened.append(door))
    side = start(ServerConfig(role="prefill"), SimpleNamespace())
    try:
        assert side is not None
        assert side.address == listened[0].address
    finally:
        for door in listened:
            door.close()


def test_a_split_under_torchrun_is_refused(monkeypatch):
    monkeypatch.setattr("minillm.parallel.launch.started_by_torchrun", lambda: 0)
    with pytest.raises(MinillmError, match="torchrun"):
        start_children(ServerConfig(split="1p1d"), parsed("--split", "1p1d"), {})


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return tiny_model(tiny_folder, tmp_path_factory.mktemp("roles") / "model")


def test_a_prefill_server_refuses_completions_in_words_and_tells_its_health(folder):
    with serving(folder, role="prefill") as server:
        for path, body in (
            ("/v1/completions", {"prompt": "w1 w2"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w1"}]}),
        ):  # fmt: skip
            request = urllib.request.Request(
                server.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with pytest.raises(urllib.error.HTTPError) as raised:
                urllib.request.urlopen(request)
            assert raised.value.code == 403
            error = json.load(raised.value)["error"]
            assert error["code"] == "prefill_role"
            assert "decode server" in error["message"]
        for path in ("/health", "/ready", "/metrics"):
            assert urllib.request.urlopen(server.url + path).status == 200
        with pytest.raises(urllib.error.HTTPError, match="404"):  # a page whose every message could only be refused
            urllib.request.urlopen(server.url + "/")


def samples(side):
    found = {}
    for family in HandoverMetrics(side, "minillm:", "m").collect():
        for s in family.samples:
            labels = {k: v for k, v in s.labels.items() if k != "model_name"}
            found[s.name.removeprefix("minillm:"), *labels.values()] = s.value
    return found


def test_a_held_request_is_in_the_queues_gauge(folder):
    split = Split(folder, faults_p={1: "delay"}).ready()
    try:
        thread = threading.Thread(target=split.tokens)
        thread.start()
        until(lambda: split.wires[0][0].struck)
        assert EngineGauges(split.d.engine, "", "m", print)._waiting() == 1
        split.wires[0][0].release()
        thread.join()
        assert EngineGauges(split.d.engine, "", "m", print)._waiting() == 0
    finally:
        split.close()


def test_metrics_of_both_sides(folder):
    split = Split(folder, faults_p={9: "corrupt"}).ready()
    try:
        split.tokens(PROMPT, GREEDY)
        split.settled()
        split.tokens([*PROMPT[1:], 5], GREEDY)
        split.settled()
        decode, prefill = Side(split.d), Side(split.p)
        decode.remote, prefill.worker = split.remote, split.worker
        d, p = samples(decode), samples(prefill)
        assert d["kv_transfers_total", "loaded", ""] == 1
        assert d["kv_transfers_total", "recompute", "corrupt"] == 1
        assert p["kv_transfers_total", "acked", ""] == 1
        size = 64 * split.remote.layout.token_bytes
        assert d["kv_transfer_bytes_total",] >= size
        assert p["kv_transfer_bytes_total",] == 2 * size
        assert d["kv_transfer_seconds_total",] >= d["kv_transfer_exposed_seconds_total",] >= 0
        assert d["prefill_servers", "ready"] == 1
        assert p["kv_transfer_kept_bytes",] == 0
    finally:
        split.close()
