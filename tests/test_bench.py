"""Benches on tiny settings: they predict, seal, measure and check; on a bare machine; and they notice wrong output."""

import json
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest
import torch

from minillm.bench import account, common, ladder, main, race
from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.models.transformer import Transformer
from minillm.models.weights import random_weights
from minillm.roofline import measure, record
from minillm.roofline.device import Device

TINY = ModelConfig(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position_embeddings=256, dtype="float32",
)  # fmt: skip
FAST = Device(  # far above any machine, so that no tiny measurement reaches its roof
    name="fast", kind="cpu", peak_flops={"float32": 1e18, "bfloat16": 1e18}, read_bandwidth=1e15, copy_bandwidth=1e15,
    triad_bandwidth=1e15, gather_bandwidth=1e15, memory_bytes=1 << 40, call_overhead=1e-7, source="measured",
)  # fmt: skip


@pytest.fixture
def quick(monkeypatch):
    """No ceilings are measured, and the ladder's model is tiny."""
    for module in (ladder, race):
        monkeypatch.setattr(module, "ceilings", lambda options: FAST)
        monkeypatch.setattr(module, "ceilings_after", lambda options: {"read": 1e15})
    monkeypatch.setattr(race, "read_bandwidth", lambda options: lambda: 1e14)
    monkeypatch.setitem(common.PRESETS, "tiny", TINY)


def options(**changes):
    values = {"step": "ladder", "model": "tiny", "device": "cpu", "dtype": "float32", "repeats": 2, "contexts": (8, 20)}
    return common.Options(**(values | {"out": lambda line: None} | changes))


def test_the_ladder_gives_a_record_that_verifies(quick):
    done = ladder.run(options())
    assert record.verify(done) == []
    assert {"naive_8", "prefill_20", "decode_20x32"} <= done["results"].keys()
    assert all(len(r["samples"]) == 2 for r in done["results"].values())
    assert [c["passed"] for c in done["checks"]] == [True, True]
    text = ladder.show(done)
    assert "20 tokens: the cache makes a step" in text
    assert "fitted on every other step" in text


def test_the_steps_measured_are_the_steps_predicted(quick, monkeypatch):
    """Every forward pass has the rows of its prediction: contexts, new tokens and batch."""
    seen = []
    real = Transformer.forward
    monkeypatch.setattr(
        Transformer,
        "forward",
        lambda self, batch, a: seen.append([(r.num_new, r.start) for r in batch.rows]) or real(self, batch, a),
    )
    model = Transformer(TINY, random_weights(TINY), 64)
    for key, work in ladder.plan(options()).items():
        step = ladder.prepare(model, work["rows"], work["kv_cache"], seed=0)
        for _ in range(2):  # and the second time too: the counter went back
            seen.clear()
            step()
            assert seen == [work["rows"]], key


def test_a_broken_cache_fails_the_check(quick, monkeypatch):
    from minillm.cache.contiguous import ContiguousKVCache

    monkeypatch.setattr(ContiguousKVCache, "write", lambda *args: None)
    done = ladder.run(options())
    assert "checks/cached logits equal recomputed ones after 20 tokens" in {f.key for f in record.verify(done)}


def test_too_long_a_context_is_refused(quick):
    with pytest.raises(MinillmError, match="256 positions"):
        ladder.run(options(contexts=(300,)))


BARE = """
    import importlib.abc, sys
    ALLOWED = {"torch", "triton", "transformers", "numpy", "minillm"}
    # What torch itself imports.
    ALLOWED |= {"typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec",
                "setuptools", "_distutils_hack", "pkg_resources", "torchgen", "functorch", "cuda", "nvidia"}

    class Blocker(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            top = name.partition(".")[0]
            if top in ALLOWED or top in sys.stdlib_module_names or top.startswith(("_", "__editable__")):
                return None
            raise ModuleNotFoundError(f"{name} is not on a bare GPU machine", name=name)

    sys.meta_path.insert(0, Blocker())
    from minillm.config import ModelConfig
    from minillm.models import presets
    from minillm.roofline import device, measure
    presets.PRESETS["tiny"] = ModelConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=16, max_position_embeddings=256)
    presets.PRESETS["small"] = ModelConfig(vocab_size=10001, hidden_size=16, intermediate_size=16, num_layers=1,
        num_heads=1, num_kv_heads=1, head_dim=16, max_position_embeddings=2048)
    fast = device.DATASHEET["b200"].to_dict() | {"kind": "cpu", "call_overhead": 1e-7}
    measure.measure = lambda where: device.Device(**fast)
    measure.bandwidths = lambda where, megabytes=None, repeats=8: {"read": [8e12]}
    from minillm.bench.main import main
    code = main(["ladder", "--device", "cpu", "--dtype", "float32", "--model", "tiny", "--contexts", "8,16",
                 "--repeats", "1", "--out", sys.argv[1]])
    code += main(["kernels", "--device", "cpu", "--out", sys.argv[1]])
    code += main(["nano", "--device", "cpu", "--dtype", "float32", "--model", "small", "--requests", "2", "--out",
                  sys.argv[1]])
    heavy = {m for m in ("tqdm", "gguf", "tokenizers", "safetensors", "matplotlib", "IPython") if m in sys.modules}
    sys.exit(f"imported {heavy}" if heavy else code)
"""


def test_benches_of_a_bare_machine_need_only_torch_triton_transformers_and_numpy(tmp_path):
    environment = {"MINILLM_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BARE), str(tmp_path)], capture_output=True, text=True, timeout=600,
        env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name in ("ladder-cpu.json", "kernels-cpu.json", "nano-cpu.json"):
        saved = json.loads((tmp_path / name).read_text())
        assert record.verify(saved) == []
        assert str(tmp_path) not in json.dumps(saved)  # a record names no path of the machine


@pytest.fixture(scope="module")
def raced(embedded_folder):
    """`bench single` on the embedded model, as small as it gets."""
    patch = pytest.MonkeyPatch()
    patch.setattr(race, "ceilings", lambda o: FAST)
    patch.setattr(race, "ceilings_after", lambda o: {})
    patch.setattr(race, "read_bandwidth", lambda o: lambda: 1e14)
    order = []
    real = common.clock
    # Of its own time, not of the clock on the wall: a machine that stands still in a term makes that term no larger.
    patch.setattr(account, "time", SimpleNamespace(perf_counter=time.process_time))
    patch.setattr(race, "clock", lambda run, device: order.append(run.__name__) or real(run, device))
    try:
        done = race.run(options(step="single", model="smollm2-135m", prompt=12, new=5, contexts=None))
    finally:
        patch.undo()
    return done, order


@pytest.mark.model
def test_single_races_both_sides_in_alternating_order(raced):
    done, order = raced
    assert order == ["ours", "theirs", "theirs", "ours"]
    assert record.verify(done) == []
    assert len(done["derived"]["ratio"]["samples"]) == 2
    assert done["setup"]["peer"] == "transformers"
    assert {c["name"] for c in done["checks"]} >= {
        "greedy tokens are the peer's",
        "both sides wrote every token asked for",
    }


@pytest.mark.model
def test_the_account_of_a_step_adds_up(raced):
    done, _ = raced
    spent = {t: done["results"][f"account.{t}"]["samples"] for t in (*account.TERMS, "total")}
    for i, total in enumerate(spent["total"]):
        assert sum(spent[t][i] for t in account.TERMS) == pytest.approx(total, rel=1e-6)
    assert all(min(spent[t]) > 1e-7 for t in account.TERMS)  # every wrapper saw its calls
    assert done["results"]["account.linears"]["median"] > done["results"]["account.sampling"]["median"]
    text = race.show(done)
    assert "of the" in text
    assert "linears" in text


@pytest.mark.model
def test_nothing_stays_wrapped(llm):
    from minillm.attention.causal import NoCacheAttention
    from minillm.cache.contiguous import ContiguousKVCache
    from minillm.models import transformer
    from minillm.models.linear import Linear

    owners = (transformer, Linear, ContiguousKVCache, NoCacheAttention, llm.engine.sampler)
    before = [dict(vars(owner)) for owner in owners]
    account.decode_account(llm, [5, 6, 7], 3)
    assert [dict(vars(owner)) for owner in owners] == before
    with pytest.raises(RuntimeError), account.accounting(llm.engine):
        raise RuntimeError("also when something goes wrong inside")
    assert [dict(vars(owner)) for owner in owners] == before


def test_nested_calls_are_taken_off_the_outer_one(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(account.time, "perf_counter", lambda: float(next(now)))
    book = account.Account("cpu")
    inner = book.wrap("inner", lambda: None)
    outer = book.wrap("outer", lambda: [inner(), inner()])
    outer()  # outer 0..5, inner 1..2 and 3..4
    assert dict(book.seconds) == {"inner": 2.0, "outer": 3.0}


@pytest.mark.model
def test_another_model_on_the_other_side_fails_the_check(quick, monkeypatch):
    from minillm.bench.peers import TransformersPeer

    real = TransformersPeer.last_logits
    monkeypatch.setattr(TransformersPeer, "last_logits", lambda self, prompt: real(self, prompt[:-1]))
    done = race.run(options(step="single", model="smollm2-135m", prompt=6, new=2, repeats=1, contexts=None))
    assert "checks/logits after the first prompt agree with the peer's" in {f.key for f in record.verify(done)}


def test_of_bandwidth_is_bytes_over_time_over_rate():
    entry = {"op": "of_bandwidth", "of": ["decode", "read"]}
    results = {"decode": {"samples": [2.0, 4.0]}, "read": {"samples": [10.0, 20.0]}}
    from minillm.roofline.stats import derive

    made = {"results": results, "predictions": {"decode": {"prediction": {"compulsory_bytes": 10}}}}
    assert derive(entry, made) == [0.5, 0.125]


# The command --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["ladder", "--contexts", "12,x"],
        ["ladder", "--contexts", "0"],
        ["ladder", "--repeats", "0"],
        ["ladder", "--peer", "transformers"],
        ["ladder", "--dtype", "int3"],
        ["ladder", "--device", "tpu"],
        ["ladder", "--model", "no-such-model", "--cached-ceilings"],
        ["single", "--peer", "guesswork", "--cached-ceilings"],
        ["single", "--peer", "vllm=python3", "--cached-ceilings"],
        ["throughput", "--peer", "guesswork=python3"],
        ["throughput", "--peer", ","],
        ["throughput", "--peer", "transformers=python3"],
        ["throughput", "--workloads", "W9"],
        ["single", "--workloads", "W1"],
        ["nano", "--requests", "257", "--device", "cpu"],
        ["scheduler", "--model", "x"],
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, capsys, quick):
    assert main.main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert error[-1].startswith("minillm: error: ")
    assert not any("Traceback" in line for line in error)


def test_the_recorded_command_repeats_the_run_and_names_no_folder(monkeypatch, tmp_path, quick, capsys):
    monkeypatch.setattr(sys, "argv", ["x"])
    arguments = [
        "ladder",
        "--model",
        "tiny",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--contexts",
        "8",
        "--repeats",
        "1",
    ]
    assert main.main([*arguments, "--out", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (
        printed["command"]
        == "python3 -m minillm.bench ladder --model tiny --device cpu --dtype float32 --repeats 1 --contexts 8"
    )
    assert printed == json.loads((tmp_path / "ladder-cpu.json").read_text())


def test_a_record_with_a_fault_exits_1(monkeypatch, quick, capsys):
    slow = Device(
        **{
            **FAST.to_dict(),
            "read_bandwidth": 1.0,
            "copy_bandwidth": 1.0,
            "triad_bandwidth": 1.0,
            "gather_bandwidth": 1.0,
        }
    )
    monkeypatch.setattr(ladder, "ceilings", lambda o: slow)
    monkeypatch.setattr(ladder, "ceilings_after", lambda o: {})
    arguments = [
        "ladder",
        "--model",
        "tiny",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--contexts",
        "8",
        "--repeats",
        "1",
    ]
    assert main.main(arguments) == 1
    assert "is above its roof" in capsys.readouterr().err


def test_ceilings_step(monkeypatch):
    from minillm.bench import ceilings

    monkeypatch.setattr(ceilings, "ceilings", lambda o: FAST)
    monkeypatch.setattr(ceilings, "ceilings_after", lambda o: {})
    monkeypatch.setattr(measure, "bandwidths", lambda where: {k: [9e14] for k in ("read", "copy", "triad", "gather")})
    monkeypatch.setattr(measure, "peak_flops", lambda where, dtype, sizes: [1e12, 2e12])
    monkeypatch.setattr(measure, "call_overhead", lambda where: [1e-6])
    done = ceilings.run(options(step="ceilings"))
    assert record.verify(done) == []
    assert "900000 GB/s" in ceilings.show(done) or "9e+05 GB/s" in ceilings.show(done)
    monkeypatch.setattr(measure, "bandwidths", lambda where: {k: [9e12] for k in ("read", "copy", "triad", "gather")})
    assert "checks/the roof is found twice" in {f.key for f in record.verify(ceilings.run(options(step="ceilings")))}


def test_roofline_command(capsys):
    from minillm.cli import main as minillm

    assert (
        minillm(
            ["roofline", "--model", "llama-3.1-8b", "--device", "h200", "--batch", "1", "--context", "4096", "--json"]
        )
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["bound"] == "memory"
    assert report["lower"] <= report["expected"] <= report["upper"]
    assert 300 < report["tokens_per_s"] < 312
    assert minillm(["roofline", "--model", "llama-3.1-70b", "--device", "h200", "--prefill", "2048"]) == 0
    text = capsys.readouterr().out
    assert "bound by  compute" in text
    assert "one is not enough" in text
    for wrong in (
        ["--model", "gpt-9"],
        ["--device", "abacus"],
        ["--batch", "0"],
        ["--dtype", "int4"],
        ["--context", "-1"],
    ):
        assert minillm(["roofline", "--device", "h200", *wrong]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_seeded_tokens_are_the_same_again_and_clear_of_special_ones():
    import random

    first = common.random_tokens(random.Random(3), 500, 49152)
    assert first == common.random_tokens(random.Random(3), 500, 49152)
    assert min(first) >= 100
    assert max(first) < 49152 - 300
    assert torch.tensor(first).unique().numel() > 400
