"""Every kernel compiled for every target and judged; the gates on hand-made counts, and on kernels bad on purpose."""

import dataclasses
import json

import pytest
import triton
import triton.language as tl
from minillm.kernels import gates, inspect_code, rms_norm, survey
from minillm.kernels.ahead import Ahead
from minillm.kernels.inspect_code import Code, read_amdgcn, read_cubin, read_ptx, read_ttgir, read_ttir
from minillm.kernels.triton_private import TARGETS, compile_ahead, jit

from minillm.cli import main
from minillm.course.broken import broken
from minillm.errors import MinillmError

# All kernels ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows():
    return survey.check()


def test_every_gate_holds_for_every_variant_of_every_kernel(rows):
    assert [f"{survey_name(r)}: {v}" for r in rows for v in r.verdicts if v.passed is False] == []


def survey_name(row):
    return f"{row.variant.module}/{row.variant.case} {row.variant.target} {row.variant.aligned}"


def test_all_targets_are_covered_aligned_and_not(rows):
    for module, cases in survey.modules().items():
        seen = {(r.variant.target, r.variant.aligned) for r in rows if r.variant.module == module}
        assert seen == {(t, a) for t in TARGETS for a in (True, False)}, module
        dtypes = {t for case in cases.values() for t in case.signature.values()}
        assert {"*bf16", "*fp16"} & dtypes or not any("16" in t for t in dtypes), module


def test_every_verdict_was_reached_by_looking(rows):
    """Gates apply to aligned variants but for reasons that name the kind of kernel, never for lack of a tool."""
    reasons = {v.found for r in rows if r.variant.aligned for v in r.verdicts if v.passed is None}
    assert all(reason.startswith(("not asked of", "not asked: no loop")) for reason in reasons), reasons
    assert all(r.code.registers for r in rows)
    judged = {v.gate for r in rows for v in r.verdicts if v.passed}
    assert judged >= {"registers suffice", "shared memory fits", "16-byte accesses", "offsets of 64 bits"}


def test_a_second_check_compiles_nothing(rows, monkeypatch):
    monkeypatch.setattr(survey, "compile_ahead", None)  # calling it would raise TypeError
    assert survey.check(["rms_norm"]) == [r for r in rows if r.variant.module == "rms_norm"]


# Kernels that are bad on purpose -------------------------------------------------------------------


@jit
def _attend(
    Q, K, TABLE, OUT, stride_block, n,
    ROWS: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Scores times keys over pages of 16 tokens: no attention, but its loads, its loop and its products."""
    row, d, t = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, N)
    q = tl.load(Q + row[:, None] * D + d[None, :])
    acc = tl.zeros((ROWS, D), tl.float32)
    for start in range(0, n, N):
        block = tl.load(TABLE + (start + t) // 16, mask=start + t < n, other=0)
        if WIDE:
            block = block.to(tl.int64)
        at = block * stride_block + (start + t) % 16 * D
        k = tl.load(K + at[:, None] + d[None, :], mask=(start + t < n)[:, None], other=0.0)
        if DOT:
            acc = tl.dot(tl.dot(q, tl.trans(k)).to(k.dtype), k, acc)
        else:
            acc += tl.sum(k, axis=0)[None, :]
    tl.store(OUT + row[:, None] * D + d[None, :], acc.to(OUT.dtype.element_ty))


def attend(kind="decode", rows=16, n=64, d=128, wide=True, dot=True, dtype="bf16", **how):
    types = dict.fromkeys(("Q", "K", "OUT"), f"*{dtype}") | {"TABLE": "*i32", "stride_block": "i32", "n": "i32"}
    constants = {"ROWS": rows, "N": n, "D": d, "WIDE": wide, "DOT": dot}
    return Ahead("attend", _attend, kind, types, constants, loops=True, **how)


def failures(case, target, compiled_aligned=True, judged_aligned=True):
    """{gate: what it says} of the gates that fail."""
    code = survey.examine(case, target, compiled_aligned)
    return {v.gate: str(v) for v in gates.judge(case, code, judged_aligned) if v.passed is False}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_good_kernels_pass(target):
    stages = 2 if target == "gfx942" else 3
    assert failures(attend(num_stages=stages), target) == {}
    assert failures(attend("prefill", rows=128, num_warps=8, num_stages=stages), target) == {}


def test_a_kernel_that_spills():
    case = rms_norm.AHEAD[0]  # a row of 8192 numbers in the registers of one warp
    case = dataclasses.replace(case, constants={**case.constants, "BLOCK": 8192}, num_warps=1)
    bad = failures(case, "sm_90")
    assert set(bad) == {"registers suffice"}
    assert "bytes of stack a thread" in bad["registers suffice"]
    assert "smaller tile, more warps" in bad["registers suffice"]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_a_misaligned_kernel_has_no_asynchronous_copies(target):
    case = attend(num_stages=2 if target == "gfx942" else 3)
    bad = failures(case, target, compiled_aligned=False)
    assert bad.keys() >= {"copies run ahead in loops", "16-byte accesses"}
    assert "addresses known to be multiples of 16" in bad["copies run ahead in loops"]
    # Judged as what it is, that is an exception, said in words.
    assert failures(case, target, compiled_aligned=False, judged_aligned=False) == {}


def test_one_stage_has_no_asynchronous_copies():
    assert set(failures(attend(num_stages=1), "sm_90")) == {"copies run ahead in loops"}


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_offsets_of_32_bits(target):
    bad = failures(attend(wide=False, num_stages=2), target)
    assert set(bad) == {"offsets of 64 bits"}
    assert "Widen one side before the product" in bad["offsets of 64 bits"]


def test_the_mutant_with_32_bit_offsets_fails_the_gate():
    case = rms_norm.AHEAD[-1]
    assert failures(case, "sm_90") == {}
    with broken("rms_norm/int32_offset"):
        bad = failures(dataclasses.replace(case, kernel=rms_norm._rms_norm), "sm_90")
    assert set(bad) == {"offsets of 64 bits"}


def test_a_kernel_without_matrix_instructions():
    assert "none, wanted mma" in failures(attend(dot=False), "sm_90")["matrix instructions"]


def test_a_prefill_tile_too_small_for_wgmma():
    bad = failures(attend("prefill"), "sm_90")
    assert "wanted wgmma on sm_90" in bad["matrix instructions"]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_too_much_shared_memory(target):
    bad = failures(attend(n=128 if target == "gfx942" else 512, d=256, num_warps=8, num_stages=3), target)
    assert f"bytes of shared memory a block, {target} has {gates.SHARED[target]}" in bad["shared memory fits"]


def test_tf32_where_fp32_was_meant():
    assert "TF32" in failures(attend(dtype="fp32", n=32, d=64), "sm_90")["fp32 stays fp32"]


def test_what_does_not_compile_is_a_row_that_says_so():
    case = attend(n=48)  # no power of two
    found = survey._work_on(case, survey.Variant("none", "attend", "sm_90", True))
    row = survey.row(case, survey.Variant("none", "attend", "sm_90", True), found)
    assert not row.passed
    assert "does not compile" in str(row.verdicts[0])
    assert "power of 2" in str(row.verdicts[0])


# Gates on hand-made counts -------------------------------------------------------------------------

GOOD = Code(
    "sm_90", registers=128, stack=0, spills=0, shared=98304, matrix={"wgmma": 12}, copies={"cp.async": 16}, loops=1,
    loop_copies=3, loads16=24, loads=27, stores16=8, stores=8, products64=2,
)  # fmt: skip
PREFILL = attend("prefill")


@pytest.mark.parametrize(
    ("gate", "changes"),
    [
        ("registers suffice", {"stack": 8}),
        ("registers suffice", {"spills": 1}),
        ("registers suffice", {"local": 1}),
        ("shared memory fits", {"shared": 227 * 1024 + 1}),
        ("shared memory fits", {"target": "sm_100", "matrix": {"tcgen05": 4}, "tensor_memory": 1024}),
        ("matrix instructions", {"matrix": {"mma": 64}}),
        ("matrix instructions", {"matrix": {}}),
        ("copies run ahead in loops", {"loop_copies": 0}),
        ("copies run ahead in loops", {"loops": 0}),
        ("copies run ahead in loops", {"target": "gfx942", "matrix": {"mfma": 1}, "shared": 0, "loop_copies": 0}),
        ("16-byte accesses", {"loads16": 0}),
        ("offsets of 64 bits", {"narrow": ("%a = arith.muli %b, %c : i32",)}),
        ("fp32 stays fp32", {"tf32": 1}),
    ],
)
def test_one_bad_count_fails_one_gate(gate, changes):
    assert [v for v in gates.judge(PREFILL, GOOD, True) if not v.passed] == []
    bad = [v for v in gates.judge(PREFILL, dataclasses.replace(GOOD, **changes), True) if v.passed is not True]
    assert [(v.gate, v.passed) for v in bad] == [(gate, False)]
    assert bad[0].found
    assert bad[0].look


def test_exceptions_are_said_in_words():
    missing = dataclasses.replace(GOOD, registers=None, stack=None, spills=None)
    found = {v.gate: v for v in gates.judge(PREFILL, missing, True)}
    assert found["registers suffice"].passed is None
    assert "no cuobjdump" in found["registers suffice"].found
    found = {
        v.gate: v for v in gates.judge(PREFILL, dataclasses.replace(GOOD, stack=64, spills=9, loop_copies=0), False)
    }
    assert "64 bytes of stack" in found["registers suffice"].found
    assert {v.passed for v in found.values()} == {None, True}
    alone = dataclasses.replace(PREFILL, kind="elementwise", loops=False)
    assert gates.judge(alone, dataclasses.replace(GOOD, stores16=0), True)[4].passed is False
    with pytest.raises(MinillmError, match="kind 'fast' is not known"):
        gates.judge(dataclasses.replace(PREFILL, kind="fast"), GOOD, True)


# Reading --------------------------------------------------------------------------------------------


def test_ptx_is_read():
    found = read_ptx("""
        @%p1 cp.async.ca.shared.global [ %r248 + 0 ], [ %rd23 + 0 ], 0x4, %r58;
        cp.async.cg.shared.global [ %r59 + 0 ], [ %rd24 + 0 ], 0x10, %r60;
        cp.async.commit_group;
        cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];
        ld.global.v4.b32 { %r18, %r19, %r20, %r21 }, [ %rd15 + 0 ];   // ld.global.v4.b32 in a comment
        @%p2 ld.global.L1::evict_last.v2.b64 { %rd1, %rd2 }, [ %rd3 + 0 ];
        ld.global.b16 { %rs1 }, [ %rd3 + 0 ];  st.global.v2.b32 [ %rd4 ], { %r1, %r2 };
        ld.param.b64 %rd1, [f_param_0];  ld.local.b32 %r1, [%rd1];  ld.shared.v4.b32 {%r1,%r2,%r3,%r4}, [%r5];
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};
        wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, 1, 1, 1, 0, 0;
        wgmma.commit_group.sync.aligned;  tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, %p1;
    """)
    assert found == {
        "matrix": {"mma": 1, "wgmma": 1, "tcgen05": 1}, "copies": {"cp.async": 2, "bulk": 1}, "local": 1,
        "loads16": 4, "loads": 6, "stores16": 0, "stores": 1,
    }  # fmt: skip


def test_amd_assembly_is_read():
    found = read_amdgcn("""
\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
\tglobal_load_dwordx4 v[0:3], v4, s[0:1]
\tglobal_load_ushort v0, v4, s[0:1]
\tbuffer_load_dwordx4 v5, s[8:11], 0 offen lds
\tglobal_load_lds_dword v[0:1], off
\tglobal_store_dwordx2 v0, v[2:3], s[0:1]
\tscratch_store_dword off, v1, s32
    .private_segment_fixed_size: 24
    .vgpr_count:     194
    .vgpr_spill_count: 6
    """)
    assert found == {
        "matrix": {"mfma": 1}, "copies": {"to_lds": 2}, "local": 1, "loads16": 2, "loads": 4, "stores16": 0,
        "stores": 1, "registers": 194, "stack": 24, "spills": 6,
    }  # fmt: skip


def test_copies_count_only_inside_loops():
    found = read_ttgir("""
    %a = ttg.async_copy_global_to_local %p : tensor<64x!tt.ptr<i32>> -> <64xi32> loc(#loc1)
    %l:2 = scf.for %j = %c0 to %n step %c64 iter_args(%x = %y) -> (i32)  : i32 {
      %b = ttg.async_copy_global_to_local %p, %q {contiguity = 8 : i32} : tensor<64x!tt.ptr<i32>> loc(#loc1)
      %c = scf.if %d -> (i32) {
        ttg.local_store %e, %f : tensor<4xf32> -> !ttg.memdesc<4xf32, #s, #smem, mutable> loc(#loc1)
        scf.yield %g : i32 loc(#loc1)
      } else {
        scf.yield %h : i32 loc(#loc1)
      } loc(#loc1)
      scf.yield %c : i32 loc(#loc1)
    } {tt.scheduled_max_stage = 1 : i32} loc(callsite(#loc1 at #loc2))
    ttg.local_store %e, %f : tensor<4xf32> -> !ttg.memdesc<4xf32, #s, #smem, mutable> loc(#loc1)
    """)
    assert found == {"loops": 1, "loop_copies": 1, "loop_stages": 1}


@jit
def _carried(TABLE, X, OUT, stride, n, SIDE: tl.constexpr):
    """A block id that a loop and a branch carry before it is multiplied."""
    block = tl.load(TABLE)
    for i in range(n):
        if i > 3:
            block = tl.load(TABLE + i)
        if SIDE == "wide":
            tl.store(OUT + i, tl.load(X + block.to(tl.int64) * stride))
        elif SIDE == "narrow":
            tl.store(OUT + i, tl.load(X + block * stride))
        else:  # a number, compared and loaded, but in no address
            tl.store(OUT + i, tl.load(X + i) * (block < stride))


@pytest.mark.parametrize(("side", "narrow"), [("wide", 0), ("narrow", 1), ("none", 0)])
def test_block_ids_are_followed_through_loops_and_branches(side, narrow):
    types = {"TABLE": "*i32", "X": "*fp16", "OUT": "*fp16", "stride": "i32", "n": "i32"}
    text = compile_ahead(_carried, types, {"SIDE": side}, "sm_90").asm["ttir"]
    for wide in (("TABLE",), ("stride",), ("TABLE", "stride")):
        assert len(read_ttir(text, list(types), wide)["narrow"]) == narrow, wide
    assert read_ttir(text, list(types), ())["narrow"] == ()


def test_without_the_tools_nothing_is_made_up(monkeypatch):
    compiled = compile_ahead(
        _carried,
        {"TABLE": "*i32", "X": "*fp16", "OUT": "*fp16", "stride": "i32", "n": "i32"},
        {"SIDE": "wide"},
        "sm_90",
    )
    assert read_cubin(compiled.asm["cubin"])["registers"] > 0
    monkeypatch.setattr(inspect_code, "nvidia_tool", lambda name: None)
    assert read_cubin(compiled.asm["cubin"]) == {"registers": None, "stack": None, "spills": None}


def test_a_case_may_differ_by_target():
    case = attend(num_warps=4, by_target={"sm_90": {"num_warps": 8, "N": 32}})
    assert case.on("sm_80") == (case.constants, 4, 3)
    assert case.on("sm_90") == ({**case.constants, "N": 32}, 8, 3)
    assert survey.key(case, "sm_80", True) != survey.key(case, "sm_90", True)
    assert survey.key(case, "sm_80", True) != survey.key(case, "sm_80", False)
    assert survey.key(case, "sm_80", True) != survey.key(attend(num_stages=2), "sm_80", True)


# The command ---------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_json(capsys):
    assert main(["kernels", "check", "--kernel", "rms_norm", "--target", "sm_90", "--target", "gfx942"]) == 0
    text = capsys.readouterr().out
    assert "variant" in text.splitlines()[0]
    assert f"{len(rms_norm.AHEAD) * 2 + 2} variants, every gate holds" in text
    assert "not asked of elementwise kernels" in text
    assert main(["kernels", "check", "--kernel", "rms_norm", "--target", "sm_90", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failed"] == 0
    assert len(found["rows"]) == len(rms_norm.AHEAD) + 1
    assert found["rows"][0]["code"]["registers"] > 0


def test_the_command_fails_in_words(capsys, monkeypatch):
    with broken("rms_norm/int32_offset"):
        case = dataclasses.replace(rms_norm.AHEAD[0], kernel=rms_norm._rms_norm)
    monkeypatch.setattr(rms_norm, "AHEAD", [case])
    assert main(["kernels", "check", "--kernel", "rms_norm", "--target", "sm_90", "--jobs", "1"]) == 1
    text = capsys.readouterr().out
    assert f"FAIL  {case.name} on sm_90, aligned: offsets of 64 bits: 2 products of 32 bits reach addresses" in text
    assert "2 variants, 2 fail" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kernel", "nothing"], "no kernel 'nothing' lists what to compile; there are"),
        (["--kernel", "checks"], "no kernel 'checks'"),
        (["--kernel", "../x"], "no kernel '../x'"),
        (["--kernel", "swiglu.jit"], "no kernel 'swiglu.jit'"),
        (["--kernel", "."], "no kernel '.'"),
        (["--target", "sm_42"], "target 'sm_42' is not known; use one of sm_80"),
        (["--jobs", "0"], "--jobs must be a whole number from 1"),
    ],
)
def test_the_command_refuses_what_is_not_there(arguments, words, capsys):
    assert main(["kernels", "check", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_it_says_which_triton(tmp_path, monkeypatch):
    """Another version's compilations are other compilations."""
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    survey.check(["rms_norm"], ["gfx942"], jobs=1)
    assert [p.name for p in tmp_path.iterdir()] == [f"kernels-triton-{triton.__version__}"]
