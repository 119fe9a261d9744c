"""`minillm serve` as a command: contradicting options, sizes, keys from the environment, one line for a fault."""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from server_life import WAIT_S, lasting_port, tiny_model

from minillm.cli import build_parser, main
from minillm.commands.serve import options, size
from minillm.errors import MinillmError
from minillm.server.command import _order
from minillm.server.config import ServerConfig
from minillm.server.open_files import CONNECTIONS, ROOM, SPARE
from minillm.server.run import listen, shared, url_of


def parsed(*arguments):
    return build_parser().parse_args(["serve", *arguments])


@pytest.mark.parametrize(
    ("text", "want"), [("512M", 512 << 20), ("2G", 2 << 30), ("1.5GiB", 3 << 29), ("100", 100), ("64kb", 64 << 10)]
)
def test_sizes(text, want):
    assert size(text) == want


@pytest.mark.parametrize("text", ["", "M", "-1G", "2X", "nan", "1e30"])
def test_bad_sizes_are_told(text):
    with pytest.raises(argparse.ArgumentTypeError, match="512M or 2G"):
        size(text)


def test_every_option_reaches_one_config(monkeypatch):
    from minillm.engine_config import EngineConfig

    for name in ("MINILLM_API_KEY", "MINILLM_ADMIN_KEY", "MINILLM_HASH_SALT"):
        monkeypatch.delenv(name, raising=False)
    args = parsed()
    server, engine = options(args)
    assert ServerConfig(**server) == ServerConfig()  # the defaults on the command line are the defaults
    _order(engine, {})
    EngineConfig(**engine)
    elsewhere = {"command", "json", "model", "use", "run", "default_of"}
    assert set(vars(args)) - elsewhere <= set(server) | set(engine)


def test_keys_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("MINILLM_API_KEY", "sk-from-the-environment")
    monkeypatch.setenv("MINILLM_ADMIN_KEY", "adm-from-the-environment")
    config = ServerConfig(**options(parsed())[0])
    assert (config.api_key, config.admin_key) == (("sk-from-the-environment",), "adm-from-the-environment")
    assert "environment" not in repr(config)
    assert options(parsed("--api-key", "sk-from-the-line"))[0]["api_key"] == ("sk-from-the-line",)


def test_the_order_of_service():
    made = {}
    for asked, parts in ((None, {}), (None, {"policy": 1}), ("deadline", {})):
        _, engine = options(parsed(*(["--scheduling-policy", asked] if asked else [])))
        _order(engine, parts)
        made[asked, bool(parts)] = (engine["scheduling_policy"], "priority_ageing_s" in engine)
    assert made == {
        (None, False): ("priority", True),
        (None, True): ("fcfs", False),
        ("deadline", False): ("deadline", False),
    }
    with pytest.raises(MinillmError, match="both decide about the order"):
        _order(options(parsed("--scheduling-policy", "deadline"))[1], {"scheduler": 1})


def test_a_port_that_is_taken_is_one_line(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert main(["serve", "--port", str(other.getsockname()[1])]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "--port chooses another" in told


def test_a_port_is_taken_while_its_server_still_loads():
    """Neither listens yet: the second is told now, and not after it has read its weights."""
    with listen(ServerConfig(port=lasting_port())) as first:
        port = first.getsockname()[1]
        with pytest.raises(MinillmError, match="--port chooses another"):
            listen(ServerConfig(port=port))
        shared(first)
        first.listen()
        with socket.create_connection(("127.0.0.1", port)) as client:
            first.accept()[0].close()  # this side closes first, so the kernel keeps the port for a minute
            client.recv(1)
    listen(ServerConfig(port=port)).close()  # for others, not for the next server


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--tenants", "/nowhere.toml"], "/nowhere.toml"),
        (["--api-key", "sk-12345678", "--tenants", "x.toml"], "one of the two"),
        (["--api-key", "sk-12345678", "--admin-key", "sk-12345678"], "differ"),
        (["--port", "70000"], "65535"),
        (["--num-kv-blocks", "10", "--kv-memory", "1G"], "one of the two"),
        (["--kv-memory", "10"], "holds no block"),
        (["--use", "nowhere.ipynb"], "nowhere.ipynb"),
    ],
)
def test_bad_options_are_one_line(arguments, word, capsys):
    assert main(["serve", "--port", "0", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.splitlines()[-1].startswith("minillm: error: ")
    assert word in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("exercise", "line"),
    [
        ("06_paged_attention", "        self.free_ids = list(range(1, num_blocks + 1))"),
        ("13_serving", "        self.max_waiting, self.max_waiting_tokens = max_waiting, max_waiting_tokens"),
    ],
)
def test_a_mounted_answer_that_cannot_be_made_is_one_line(tiny_folder, tmp_path, capsys, exercise, line):
    """An engine's part, and one of the server around it: notebook, cell and line, as `minillm generate` tells it."""
    raw = (Path(__file__).parents[1] / "solutions" / f"{exercise}.ipynb").read_text()
    assert raw.count(line) == 1
    (tmp_path / f"{exercise}.ipynb").write_text(raw.replace(line, "        self.mine = 1 / 0"))
    model = tiny_model(tiny_folder, tmp_path / "model")
    options = ["--model", str(model), "--port", "0", "--max-model-len", "64", "--threads", "1"]
    assert main(["serve", *options, "--use", str(tmp_path / f"{exercise}.ipynb")]) == 2
    told = capsys.readouterr().err
    assert re.search(r"error: .*code cell \d+, line \d+: self\.mine = 1 / 0: ZeroDivisionError: ", told)
    assert "Traceback" not in told


def test_json_lines(embedded_folder):
    """--json: a line when it is ready, a line when it has ended; nothing else on standard output.

    And its limit of open files is raised to what its connections need.
    """
    resource = pytest.importorskip("resource")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (256, int(sys.argv[1]))); "
    with subprocess.Popen(
        [sys.executable, "-c", few + "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])", str(hard), "-m",
         "minillm", "serve", "--port", "0", "--json", "--max-model-len", "128", "--threads", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        ready = json.loads(process.stdout.readline())
        assert ready["event"] == "ready"
        assert ready["url"].startswith("http://127.0.0.1:")
        if hasattr(resource, "prlimit"):  # Linux
            wanted = CONNECTIONS + SPARE + ROOM
            assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE)[0] == (
                wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            )
        process.terminate()
        assert json.loads(process.stdout.readline())["event"] == "ended"
        assert process.stdout.read() == ""
        assert process.wait(WAIT_S) == 0


def test_an_ipv6_address_has_brackets():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    config = ServerConfig(host="::1", port=0)
    try:
        sock = listen(config)
    except Exception as error:
        pytest.skip(f"no IPv6 address here: {error}")
    with sock:
        assert url_of(config, sock) == f"http://[::1]:{sock.getsockname()[1]}"
