"""Peers: how they are named, the worker behind a pipe, and weights in their containers. No peer is needed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from minillm.bench import gguf_files, main, peers
from minillm.errors import MinillmError

FAKE = Path(__file__).with_name("fake_peer.py")
LINUX = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def state(pid: int) -> str:
    """The state of a process, a letter: T is stopped; "" when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def becomes(pid: int, states: tuple[str, ...], polls: int = 6000) -> bool:
    """Whether the process is in one of these states soon: a signal takes effect when the kernel gets to it."""
    for _ in range(polls):
        if state(pid) in states:
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def start(monkeypatch):
    """start(mode) gives a worker; all are closed at the end."""
    made = []
    monkeypatch.setattr(peers.WorkerPeer, "_idle_cores", lambda self: 0.0)

    def make(mode=""):
        made.append(peers.WorkerPeer("fake", sys.executable, FAKE, {"threads": 1, "mode": mode}))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


def test_a_worker_answers_whatever_its_peer_prints(start):
    peer = start()
    assert peer.about["version"] == "1.2"
    tokens, seconds = peer.run([[5, 6], [7]], [3, 2])
    assert tokens == [[107] * 3, [108] * 2]  # prepare() was called once
    assert seconds > 0
    assert peer.run([[5, 6], [7]], [3, 2])[0] == [[108] * 3, [109] * 2]


@LINUX
def test_a_worker_and_its_children_stand_still_between_turns(start):
    peer = start()
    both = peer._process.pid, peer.about["how"]["child"]
    peer.run([[5]], [1])
    assert all(becomes(pid, ("T",)) for pid in both)
    peer.close()
    assert all(becomes(pid, ("", "Z")) for pid in both)


@LINUX
def test_without_the_signal_it_would_not_stand_still(start, monkeypatch):
    """Mutation: the check above must see a worker that idles instead of stopping."""
    monkeypatch.setattr(peers.signal, "SIGSTOP", 0)
    peer = start()
    peer.run([[5]], [1])
    assert not becomes(peer._process.pid, ("T",), 20)


@pytest.mark.parametrize(
    ("mode", "message"),
    [("raises", "RuntimeError: out of luck"), ("dies", "last words"), ("refuses", "ValueError: no such weights")],
)
def test_a_fault_of_a_worker_is_told_in_its_own_words(start, mode, message):
    with pytest.raises(MinillmError, match=message):
        start(mode).run([[5]], [1])


def test_a_worker_that_failed_once_works_again(start):
    peer = start("raises")
    for _ in range(2):
        with pytest.raises(MinillmError, match="out of luck"):
            peer.run([[5]], [1])


def test_a_silent_worker_is_given_up(start, monkeypatch):
    peer = start()
    monkeypatch.setattr(peers, "PATIENCE", 0.05)
    monkeypatch.setattr(peers.WorkerPeer, "_signal", lambda self, number: True)  # it stays stopped and cannot answer
    with pytest.raises(MinillmError, match=r"no answer in 0 s"):
        peer.run([[5]], [1])
    monkeypatch.undo()


def test_no_python_there_is_one_line():
    with pytest.raises(MinillmError, match="nowhere/python cannot be started"):
        peers.start("vllm", "nowhere/python", {"threads": 1})


@pytest.mark.parametrize("script", peers.WORKERS.values())
def test_a_worker_script_needs_nothing_of_minillm(script):
    """It starts in an empty environment with the standard library alone, and answers a wrong message."""
    path = Path(peers.__file__).parent / "peer_workers" / script
    done = subprocess.run(
        [sys.executable, "-S", str(path)], input='{"odd": 1}\n', capture_output=True, text=True, check=True,
        env={"PATH": os.defpath}, timeout=300,
    )  # fmt: skip
    assert list(json.loads(done.stdout)) == ["error"]


def test_peers_are_named_with_their_python():
    named = peers.named("transformers, vllm=/a/python,llama.cpp")
    assert named == {"transformers": sys.executable, "vllm": "/a/python", "llama.cpp": sys.executable}


def test_a_record_names_no_folder():
    given = {"peer": "transformers,vllm=/home/me/python", "gguf": "/home/me/x.gguf", "requests": 4}
    command = main.command_line("throughput", given)
    expected = "throughput --peer transformers,vllm=PYTHON --requests 4 --gguf FILE"
    assert command == f"python3 -m minillm.bench {expected}"


# GGUF ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def quantised(tmp_path):
    """A GGUF file with a Q4_1 matrix, a vector and metadata."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    values = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    writer = GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    packed = quantize(values, GGMLQuantizationType.Q4_1)
    writer.add_tensor("w.weight", packed, raw_dtype=GGMLQuantizationType.Q4_1)
    writer.add_tensor("norm.weight", np.linspace(0.1, 1, 7, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "q.gguf"


def read(path):
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    tensors = {t.name: (t.tensor_type.name, dequantize(t.data, t.tensor_type).reshape(-1)) for t in reader.tensors}
    return {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}, tensors


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "BF16"), ("float32", "F32"), ("float16", "F16")])
def test_a_gguf_in_another_dtype_holds_the_numbers_rounded_to_bf16(quantised, tmp_path, monkeypatch, dtype, kind):
    import torch

    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    path = gguf_files.in_dtype(quantised, dtype)
    (meta, tensors), (_, before) = read(path), read(quantised)
    assert meta["llama.block_count"] == 2
    assert meta["tokenizer.ggml.tokens"] == ["a", "b"]
    assert tensors["w.weight"][0] == kind
    assert tensors["norm.weight"][0] == "F32"
    for name, (_, values) in tensors.items():
        rounded = torch.from_numpy(before[name][1].copy()).bfloat16().float().numpy()
        np.testing.assert_array_equal(values, rounded)
    assert not np.array_equal(tensors["w.weight"][1], before["w.weight"][1])  # rounding was seen to do something
    made = path.stat().st_mtime_ns
    assert gguf_files.in_dtype(quantised, dtype).stat().st_mtime_ns == made  # made once


def test_what_is_no_gguf_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "x.gguf").write_text("not one")
    with pytest.raises(MinillmError, match="cannot be read as GGUF"):
        gguf_files.in_dtype(tmp_path / "x.gguf", "bfloat16")
    with pytest.raises(MinillmError, match="give a GGUF file"):
        gguf_files.in_dtype(tmp_path / "none.gguf", "bfloat16")
