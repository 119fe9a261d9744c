"""Triton's private interfaces as this project uses them, on whichever Triton is installed; traffic, checks, configs."""

import contextlib
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from minillm.kernels import configs, triton_private
from minillm.kernels.checks import expect, expect_whole
from minillm.kernels.traffic import counted
from minillm.kernels.triton_private import TARGETS, compile_ahead, interpret, jit, program, watch_launches, watch_memory
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction

from minillm.errors import MinillmError

# Run on a CPU, compile in the same process -----------------------------------------------------------


@jit
def _twice(x):
    return x + x


@triton.jit
def _plus_one(x):
    return x + 1


@jit
def _nested(X, OUT, N, BLOCK: tl.constexpr):
    """Helpers of both makes, a standard function, and tl.cdiv."""
    i = tl.arange(0, BLOCK)
    x = tl.load(X + i, mask=i < N, other=0.0)
    total = tl.sum(_twice(_plus_one(x)) * (i < N), axis=0)
    tl.store(OUT, total + tl.max(x, axis=0) + tl.cdiv(N, 4))


@triton.jit
def _plain(X, OUT, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + i, _plus_one(tl.load(X + i, mask=i < N)), mask=i < N)


@jit
def _add(X, COUNT, N, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(COUNT + tl.program_id(0) + i * 0, tl.load(X + i, mask=i < N, other=0.0), mask=i < N)


@jit
def _to_fp8(X, Y, BACK, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    y = tl.load(X + i).to(Y.dtype.element_ty)
    tl.store(Y + i, y)
    tl.store(BACK + i, y.to(tl.float32))


NESTED = ({"X": "*fp32", "OUT": "*fp32", "N": "i32"}, {"BLOCK": 16})


def run_nested():
    x, out = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(1)
    _nested[(1,)](x, out, 3, BLOCK=16)
    return float(out)


def test_nested_helpers_are_interpreted_and_then_compiled():
    """The interpreter swaps triton.language out and back; what it forgot to swap back could not be compiled."""
    for _ in range(2):
        assert run_nested() == 2 * (2 + 3 + 4) + 3 + 1
        compiled = compile_ahead(_nested, *NESTED, "sm_90")
        assert "tt.reduce" in compiled.asm["ttir"]
    assert not isinstance(tl.sum, triton_private.interpreter.InterpretedFunction)


def test_a_plain_triton_kernel_can_be_interpreted_and_compiled():
    x, out = torch.arange(10.0), torch.zeros(10)
    interpret(_plain, (2,), x, out, 10, BLOCK=8)
    assert torch.equal(out, x + 1)
    assert compile_ahead(_plain, {"X": "*fp32", "OUT": "*fp32", "N": "i32"}, {"BLOCK": 8}, "sm_80").asm["ptx"]
    with pytest.raises(MinillmError, match="expected a kernel made with @jit"):
        interpret("a kernel", (1,))


def test_the_language_is_whole_again_after_a_kernel_raised():
    call, load = JITFunction.__call__, tl.load
    with pytest.raises(Exception), _no_memory():  # noqa: B017  (whatever Triton wraps it in)
        run_nested()
    assert JITFunction.__call__ is call
    assert tl.load is load
    assert run_nested() == 22
    assert compile_ahead(_nested, *NESTED, "sm_90").asm["ptx"]


def _no_memory():
    def refuse(*_):
        raise ZeroDivisionError("refused")

    return watch_memory(refuse, refuse)


def test_bf16_on_a_cpu_is_refused():
    x, out = torch.zeros(3), torch.zeros(1)
    for args, kwargs in (((x.bfloat16(), out, 3), {}), ((x,), {"OUT": out.bfloat16(), "N": 3})):
        with pytest.raises(MinillmError, match="wrongly in bf16"):
            _nested[(1,)](*args, BLOCK=16, **kwargs)


def test_a_tensor_elsewhere_goes_to_the_compiler_with_fusion_said(monkeypatch):
    seen = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: seen.append(kwargs))
    x = torch.zeros(3, device="meta")
    _nested[(1,)](x, x, 3, BLOCK=16)
    _nested[(1,)](x, x, 3, BLOCK=16, enable_fp_fusion=False)
    assert [s["enable_fp_fusion"] for s in seen] == [True, False]
    assert seen[0]["grid"] == (1,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fp8_rounds_as_torch_does(dtype):
    """The interpreter's own conversion lost the carry: 31.75 became 16."""
    values = torch.cat((
        torch.linspace(-448, 448, 2048), torch.randn(1024, generator=torch.Generator().manual_seed(0)) * 2.0**-6,
        torch.tensor([31.75, 2.0**-9, 2.0**-10, 2.0**-11, 0.0, -0.0, 448.0, -448.0]), torch.zeros(1016),
    )).to(dtype)  # fmt: skip
    stored, back = torch.zeros(4096, dtype=torch.float8_e4m3fn), torch.zeros(4096)
    _to_fp8[(1,)](values, stored, back, COUNT=4096)
    assert torch.equal(stored.view(torch.uint8), values.to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(back, stored.float())


def test_every_fp8_number_is_read_right():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = codes.float()
    numbers[numbers.isnan()] = 0.0  # 0x7f and 0xff
    stored, back = torch.zeros(256, dtype=torch.float8_e4m3fn), torch.zeros(256)
    _to_fp8[(1,)](numbers, stored, back, COUNT=256)
    assert torch.equal(back, numbers)


@jit
def _where_positive(X, SWITCH, OUT, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(OUT + i, tl.load(X + i), mask=(i < 3) & (tl.load(SWITCH) >= 0))


def test_a_scalar_comparison_is_part_of_a_mask():
    """Triton 3.9's interpreter made numbers of it, and then refused them as a mask."""
    for switch, want in ((0, [1.0, 1.0, 1.0, 0.0]), (-1, [0.0] * 4)):
        out = torch.zeros(4)
        _where_positive[(1,)](torch.ones(4), torch.tensor([switch]), out, BLOCK=4)
        assert out.tolist() == want


# Watching ----------------------------------------------------------------------------------------------


def test_hooks_are_gone_after_an_exception():
    builder = triton_private.interpreter.InterpreterBuilder
    names = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
    before = [getattr(builder, name) for name in names]
    with pytest.raises(ZeroDivisionError), counted():
        raise ZeroDivisionError
    with pytest.raises(Exception), _no_memory():  # noqa: B017
        run_nested()
    with pytest.raises(ZeroDivisionError), watch_launches(lambda *_: None):
        raise ZeroDivisionError
    assert [getattr(builder, name) for name in names] == before
    assert triton_private._around_launches == []


@pytest.mark.parametrize("current", [0, 1])
def test_a_launch_goes_to_the_device_of_its_tensors(monkeypatch, current):
    """Triton launches on the current device: tensors on cuda:1 would be addresses of another card there."""
    where, launched = [current], []

    @contextlib.contextmanager
    def device(place):
        where.append(place.index)
        yield
        where.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: where[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(triton_private.Kernel, "run", lambda self, *args, **kwargs: launched.append(where[-1]))
    with FakeTensorMode():  # tensors of a card that is not here, without memory
        x = torch.empty(4, device="cuda:1")
        _nested[(1,)](x, x, 4, BLOCK=4)
    assert launched == [1]
    assert where == [current]


def test_launches_and_programs_are_seen():
    seen, programs = [], []

    class Around:
        def __init__(self, fn, args, kwargs):
            self.name, self.block = fn.__name__, kwargs["BLOCK"]

        def __enter__(self):
            seen.append(("in", self.name, self.block))

        def __exit__(self, *_):
            seen.append(("out", self.name, self.block))

    x = torch.arange(10.0)
    with watch_launches(Around), watch_memory(lambda *_: programs.append(program()), lambda *_: None):
        interpret(_plain, (3,), x, x.clone(), 10, BLOCK=4)
    assert seen == [("in", "_plain", 4), ("out", "_plain", 4)]
    assert [p[0] for p in programs] == [0, 1, 2]


def test_traffic_counts_what_the_masks_let_through():
    x, out = torch.arange(16, dtype=torch.float16), torch.zeros(16, dtype=torch.float16)
    with counted() as traffic:
        interpret(_plain, (2,), x, out, 10, BLOCK=8)
    assert (traffic.loaded, traffic.stored, traffic.loads, traffic.stores) == (20, 20, 2, 2)
    assert (traffic.unique_loaded, traffic.unique_stored, traffic.bytes) == (20, 20, 40)
    with counted() as traffic:
        for _ in range(3):
            interpret(_plain, (2,), x, out, 10, BLOCK=8)
    assert (traffic.loaded, traffic.unique_loaded) == (60, 20)


def test_traffic_of_nested_counts_and_of_none():
    with counted() as outer:
        with counted() as inner:
            run_nested()
        run_nested()
    assert (inner.loaded, inner.stored) == (12, 4)
    assert (outer.loaded, outer.stored) == (24, 8)
    with counted() as nothing:
        pass
    assert (nothing.bytes, nothing.unique_loaded, nothing.unique_stored) == (0, 0, 0)


def test_an_atomic_is_a_load_and_a_store():
    x, count = torch.ones(16), torch.zeros(2)
    with counted() as traffic:
        _add[(2,)](x, count, 10, BLOCK=16)
    assert count.tolist() == [10.0, 10.0]
    assert (traffic.loaded, traffic.stored) == (2 * (40 + 40), 2 * 40)
    assert traffic.unique_stored == 8


def test_watchers_get_arrays_of_addresses():
    x, seen = torch.arange(4.0), []
    with watch_memory(lambda a, m, size: seen.append((a, m, size)), lambda *_: None):
        interpret(_plain, (1,), x, x.clone(), 3, BLOCK=4)
    (addresses, mask, size), = seen  # fmt: skip
    assert size == 4
    assert np.broadcast_to(addresses, mask.shape)[mask].tolist() == [x.data_ptr() + 4 * i for i in range(3)]


# Ahead of time -----------------------------------------------------------------------------------------


def test_compile_ahead_says_what_is_missing():
    with pytest.raises(MinillmError, match="_nested: no type and no value for N, BLOCK"):
        compile_ahead(_nested, {"X": "*fp32", "OUT": "*fp32"}, {}, "sm_90")
    with pytest.raises(MinillmError, match="'sm_42' is not known; use one of sm_80, sm_90, sm_100, gfx942"):
        compile_ahead(_nested, *NESTED, "sm_42")
    with pytest.raises(MinillmError, match="expected a kernel made with @jit"):
        compile_ahead(3, *NESTED, "sm_90")


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_compiles_without_a_gpu(target):
    asm = compile_ahead(_nested, *NESTED, target).asm
    assert ("hsaco" if target.startswith("gfx") else "cubin") in asm


def test_alignment_is_a_promise_the_compiler_uses():
    types, constants = {"X": "*fp32", "OUT": "*fp32", "N": "i32"}, {"BLOCK": 1024}
    wide, narrow = (compile_ahead(_plain, types, constants, "sm_90", aligned=a).asm["ptx"] for a in (True, False))
    assert "ld.global.v4" in wide
    assert "ld.global.v4" not in narrow


def child(code, **env):
    """Run code beside this file, so that it can import kernels from it."""
    command = [
        sys.executable,
        "-c",
        f"import test_triton_private as t; from minillm.errors import MinillmError\n{code}",
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")} | env
    return subprocess.run(
        command, cwd=os.path.dirname(__file__), env=environment, capture_output=True, text=True, timeout=600
    )


def test_triton_interpret_leaves_interpreting_and_refuses_compiling():
    done = child(
        "assert t.run_nested() == 22\n"
        "try:\n    t.compile_ahead(t._nested, *t.NESTED, 'sm_90')\nexcept MinillmError as e:\n    print(e)",
        TRITON_INTERPRET="1",
    )
    assert "TRITON_INTERPRET is set" in done.stdout, done.stderr
    assert "unset it" in done.stdout


def test_compiling_does_not_warn_of_a_default():
    """Triton 3.9 warns where fusion of products and sums is not asked for by name."""
    done = child("assert t.compile_ahead(t._nested, *t.NESTED, 'sm_80').asm['ptx']; print('compiled')")
    assert (done.stdout, done.stderr) == ("compiled\n", "")


# Checks ------------------------------------------------------------------------------------------------


def test_expect_names_what_was_given_and_what_was_wanted():
    x = torch.zeros(2, 3)
    expect("x", x, (2, "width")), expect("x", x, (None, 3), (torch.float32,), like=x)
    expect("x", x.t(), (3, 2), last_stride=False)
    expect("x", torch.zeros(3, 1).expand(3, 1), (3, 1)), expect("x", torch.zeros(5, 0).t(), (0, 5))
    for call, words in (
        (lambda: expect("x", [1.0], (1,)), "x must be a tensor, got list"),
        (lambda: expect("x", x, ("rows", 4)), "x must be [rows, 4], got [2, 3]"),
        (lambda: expect("x", x, (None, None, 3)), "x must be [?, ?, 3], got [2, 3]"),
        (lambda: expect("x", x.double(), (2, 3)), "x must be float16, bfloat16, float32, got float64"),
        (
            lambda: expect("x", x, (2, 3), like=torch.zeros(1, device="meta")),
            "on cpu, but the other tensors are on meta",
        ),
        (lambda: expect("x", x.t(), (3, 2)), "stride 3 in its last dimension, and must have 1; call .contiguous()"),
    ):
        with pytest.raises(MinillmError) as caught:
            call()
        assert words in str(caught.value)


def test_expect_whole_names_the_limits():
    expect_whole("n", 1, 1), expect_whole("n", 4, 1, 4)
    for value, high, words in (
        (0, None, "n must be a whole number of at least 1, got 0"),
        (5, 4, "n must be a whole number from 1 to 4, got 5"),
        (2.0, None, "got 2.0"),
        (True, None, "got True"),
        ("2", 4, "got '2'"),
    ):
        with pytest.raises(MinillmError) as caught:
            expect_whole("n", value, 1, high)
        assert words in str(caught.value)


# Configurations ----------------------------------------------------------------------------------------


def wrong_table(table):
    """Everything that is wrong with a table of configurations, in words."""
    found = []
    for kernel, entries in table.items():
        for entry in entries:
            if set(entry) != {"arch", "when", "config", "from"} or not entry["from"]:
                found.append(f"{kernel}: an entry has the keys {sorted(entry)}")
            if entry["arch"] not in ("any", *TARGETS):
                found.append(f"{kernel}: architecture {entry['arch']}")
            config = entry["config"]
            if not {"num_warps", "num_stages"} <= set(config) or not all(type(v) is int for v in config.values()):
                found.append(f"{kernel}: config {config}")
            if config.get("num_warps", 1) not in (1, 2, 4, 8, 16, 32):
                found.append(f"{kernel}: {config['num_warps']} warps")
            for low, high in entry["when"].values():
                found += [] if low <= high else [f"{kernel}: an empty range {low} to {high}"]
        for sizes in _corners(entries):
            fits = [e["arch"] for e in entries if all(lo <= sizes[n] <= hi for n, (lo, hi) in e["when"].items())]
            found += [] if "any" in fits else [f"{kernel}: nothing for {sizes} on a new architecture"]
    return found


def _corners(entries):
    """Sizes at, and one past, every boundary inside the range that the entries speak of."""
    values = {}
    for entry in entries:
        for name, (low, high) in entry["when"].items():
            values.setdefault(name, set()).update((low, high) if low == high else (low, high, high + 1))
    most = {name: max(e["when"][name][1] for e in entries if name in e["when"]) for name in values}
    kept = {name: sorted(v for v in found if v <= most[name]) for name, found in values.items()}
    return [dict(zip(kept, choice)) for choice in itertools.product(*kept.values())]


def test_the_table_is_well_formed():
    assert configs.table()
    assert wrong_table(configs.table()) == []


def test_a_wrong_table_is_noticed():
    def entry(arch="any", when=None, **config):
        return {
            "arch": arch,
            "when": when or {},
            "config": {"num_warps": 4, "num_stages": 1} | config,
            "from": "a test",
        }

    assert wrong_table({"k": [entry("sm_90", {"D": [1, 8]}), entry()]}) == []
    for entries in (
        [entry("sm_90")],
        [entry("sm_42"), entry()],
        [entry(when={"D": [1, 8]}), entry(when={"D": [10, 16]})],
        [entry(when={"D": [8, 1]}), entry()],
        [entry(num_warps=3)],
        [entry(BLOCK=2.5)],
        [entry() | {"from": ""}],
        [{k: v for k, v in entry().items() if k != "when"} | {"if": {}, "when": {}}],
    ):
        assert wrong_table({"k": entries}) != [], entries


def test_pick_takes_the_first_entry_that_fits(monkeypatch):
    def entry(arch, when, n):
        return {"arch": arch, "when": when, "config": {"n": n}, "from": "a test"}

    entries = [entry("sm_90", {"D": [64, 128]}, 1), entry("any", {"D": [1, 64]}, 2), entry("any", {"D": [1, 256]}, 3)]
    monkeypatch.setattr(configs, "table", lambda: {"k": entries})
    configs._pick.cache_clear()
    cpu = torch.device("cpu")
    assert [configs.pick("k", cpu, D=d)["n"] for d in (64, 65)] == [2, 3]
    assert [configs.pick("k", "sm_90", D=d)["n"] for d in (63, 64, 129)] == [2, 1, 3]
    configs.pick("k", cpu, D=64)["n"] = 99  # a caller's copy
    assert configs.pick("k", cpu, D=64)["n"] == 2
    with pytest.raises(MinillmError, match="no configuration for {'D': 257} on any in configs.json"):
        configs.pick("k", cpu, D=257)
    with pytest.raises(MinillmError, match="kernel 'other' has no configurations in configs.json"):
        configs.pick("other", cpu)
    configs._pick.cache_clear()
