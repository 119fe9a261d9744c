"""Answers that hold Triton kernels: scored in a notebook and in the sandbox alike, guarded, and not easily faked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minillm.course import notebook as nbk
from minillm.course.candidate import Candidate, local
from minillm.course.checks.lesson_04 import READ
from minillm.course.checks.triton_cases import KERNELS, kernel_case, traffic_case
from minillm.course.session import Limits, Session, Source
from minillm.course.tasks import Case, Lesson, Task, evaluate

X = torch.arange(300.0).reshape(3, 100)


def double(x):
    return 2 * x


def rows_bytes(x):
    return x.numel() * x.element_size(), x.numel() * x.element_size()


CASES = [
    kernel_case("plain", lambda: (X.clone(),)),
    kernel_case("with gaps", lambda: (X.clone(),), gaps={0: 3}),
    traffic_case("bytes", lambda: (X.clone(),), rows_bytes, gaps={0: 3}, hints={(2, 1): "each element once"}),
]
LESSON = Lesson(
    "04",
    "test",
    [
        Task("04.1", "double", "", double, CASES, limit_s=60),
        Task("04.2", "twice", "", double, [Case("plain", lambda: (X.clone(),))], limit_s=60),
    ],
    allow=KERNELS,
)
SETUP = "import torch, triton\nimport triton.language as tl\nfrom minillm.kernels import jit\n"
GOOD = """
@jit
def _double(X, Y, stride, D, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    mask = columns < D
    x = tl.load(X + row * stride + columns, mask=mask)
    tl.store(Y + row * D + columns, 2 * x, mask=mask)

def double(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(x.shape)
    _double[(len(x),)](x, y, x.stride(0), x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return y
"""
PLAIN = "\ndef twice(x):\n    return 2 * x\n"


def graded(*cells: str, limits: Limits = Limits(total_s=600, cell_s=120)):  # noqa: B008
    sources = [Source(i, text) for i, text in enumerate(cells, 1)]
    with Session(LESSON, sources, limits) as session:
        for task in LESSON.tasks:
            assert task.id in session.found, session.problems
        return [evaluate(t, Candidate(session, t.id, min(t.limit_s, limits.call_s))) for t in LESSON.tasks], session


def here(source: str, tmp_path) -> Candidate:
    """The answer of task 04.1 as a notebook's check cell runs it."""
    path = tmp_path / "cell.py"  # Triton reads sources
    path.write_text(SETUP + source)
    space = {"__name__": "cell"}
    exec(compile(path.read_text(), str(path), "exec"), space)
    return local(space["double"])


def notes(result) -> str:
    return " | ".join(f"{o.problem} {o.hint}" for o in result.outcomes)


def test_a_kernel_scores_in_the_sandbox_and_in_a_notebook(tmp_path):
    results, session = graded(SETUP, GOOD, PLAIN)
    assert [r.status for r in results] == ["full", "full"], [notes(r) for r in results]
    assert session.problems == []
    assert evaluate(LESSON.tasks[0], here(GOOD, tmp_path)).status == "full"


WRONG = {  # edit of GOOD: (old, new, points, what is said)
    "no mask on the load": ("columns, mask=mask)\n    tl.store", "columns)\n    tl.store", 0, "loads 28 of its 128"),
    "no mask on the store": ("2 * x, mask=mask", "2 * x", 0, "stores 28 of its 128 elements outside every tensor"),
    "a wild address": ("X + row * stride", "X + 10**12 + row * stride", 0, "outside every tensor"),
    "stride forgotten": ("x.stride(0), x.shape[1],", "x.shape[1], x.shape[1],", 1, "out of bounds: program (1, 0, 0)"),
    "torch instead": ("    return y", "    return 2 * x", 0, "stored by no kernel"),
    "no kernel": ("    _double[", "    return 2 * x\n    _double[", 0, "no kernel ran"),
    "a copy first": ("    y = ", "    x = x.clone()\n    y = ", 0, "bytes that torch prepared"),
    "computed first": ("    y = ", "    x = 2 * x\n    y = ", 0, "bytes that torch prepared"),
    "finished in torch": ("    return y", "    y[0, 0] += 1\n    return y", 0, "changed after the kernel"),
    "a row left out": ("[(len(x),)]", "[(len(x) - 1,)]", 0, "100 elements of what it gives back were stored by no"),
    "loads twice": ("    tl.store", "    x = tl.load(X + row * stride + columns, mask=mask)\n    tl.store", 2,
                    "1,200 bytes should be loaded, the kernel's masks let through 2,400 each element once"),
    "an error swallowed": (
        "columns, mask=mask)\n    tl.store",
        "columns, mask=mask)\n    tl.load(X - 1)\n    tl.store", 0, "outside every tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_and_fakes(name, tmp_path):
    old, new, points, words = WRONG[name]
    assert GOOD.count(old) == 1
    text = GOOD.replace(old, new)
    if name == "an error swallowed":
        text = text.replace("    _double[", "    try: _double[").replace(
            "    return y", "    except Exception: y.copy_(2 * x)\n    return y"
        )
        words = "reached outside its tensors"
    result = evaluate(LESSON.tasks[0], here(text, tmp_path))
    assert result.points == points, notes(result)
    assert words in notes(result)


def test_a_failed_case_names_the_argument_and_its_strides(tmp_path):
    result = evaluate(
        LESSON.tasks[0], here(GOOD.replace("columns, mask=mask)\n    tl.store", "columns)\n    tl.store"), tmp_path)
    )
    assert result.outcomes[0].given == "x = float32[3, 100]"
    assert "the first is X + 100, and X is [3, 100] with strides [103, 1]." in result.outcomes[1].problem
    assert "line 9: x = tl.load" in result.outcomes[1].problem


def test_an_endless_kernel_is_stopped_by_the_time_limit():
    loop = GOOD.replace("    mask =", "    while True: pass\n    mask =")
    results, _ = graded(SETUP, loop, PLAIN, limits=Limits(total_s=600, cell_s=120, call_s=2))
    assert [r.points for r in results] == [0, 1]
    assert "did not come back within 2 s" in notes(results[0])


def test_memory_of_others_is_out_of_reach():
    """A store through a neighbour's address is refused before it happens; other tasks keep their points."""
    outside = "\nneighbour = torch.zeros(8)\n" + GOOD.replace(
        "    y =", "    delta = (neighbour.data_ptr() - x.data_ptr()) // 4\n    y ="
    ).replace("x, y, x.stride", "x, y, delta, x.stride").replace("(X, Y, stride", "(X, Y, delta, stride").replace(
        "    mask =", "    tl.store(X + delta, 7.0)\n    mask ="
    )  # fmt: skip
    results, session = graded(SETUP, outside, "\ndef twice(x):\n    return 2 * x + neighbour[0]\n")
    assert [r.points for r in results] == [0, 1]
    assert "out of bounds: program (0, 0, 0) stores 1 of its 1 elements" in notes(results[0])
    assert session._starts == 1  # the process lives


def test_a_process_that_dies_costs_its_own_points_and_says_why():
    crash = GOOD.replace("    y =", "    if x.stride(0) == 100: import ctypes; ctypes.string_at(8)\n    y =")
    results, _ = graded(SETUP, crash, PLAIN)
    assert [r.points for r in results] == [2, 1]
    assert "the process died (SIGSEGV): a load or store went outside its memory" in notes(results[0])


def test_a_cell_that_reaches_outside_is_named_and_the_rest_is_graded():
    cell = "@jit\ndef _wild(X):\n    tl.store(X + 10**9, 1.0)\n\n_wild[(1,)](torch.zeros(4))\n"
    results, session = graded(SETUP, cell, GOOD, PLAIN)
    assert [r.status for r in results] == ["full", "full"]
    assert len(session.problems) == 1
    assert "OutOfBounds: program (0, 0, 0) stores 1 of its 1 elements outside" in session.problems[0]
    assert "the first is X + 1000000000, and X is [4]" in session.problems[0]
    assert "line 3: tl.store(X + 10**9, 1.0)" in session.problems[0]


def test_an_answer_is_graded_with_the_kernel_it_had_at_its_check():
    again = GOOD.replace("2 * x", "3 * x").replace("def double", "def triple")  # the same kernel's name
    sources = [Source(1, SETUP), Source(2, GOOD), Source(2, "", "04.1"), Source(3, again), Source(4, PLAIN)]
    with Session(LESSON, sources) as session:
        assert evaluate(LESSON.tasks[0], Candidate(session, "04.1", 60)).status == "full"


def test_without_triton_the_answers_that_need_none_are_graded(monkeypatch, tmp_path):
    (tmp_path / "triton.py").write_text("raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Session(LESSON, [Source(1, SETUP), Source(2, PLAIN)]) as session:
        assert session.found == {"04.2"}
        assert evaluate(LESSON.tasks[1], Candidate(session, "04.2", 60)).status == "full"
        assert "No module named 'triton'" in session.problems[0]


def test_kernels_of_the_engine_cannot_be_imported_or_read():
    thefts = (
        "from minillm.kernels import rms_norm",
        "from minillm.kernels.rms_norm import rms_norm",
        "import minillm.kernels as k; open(k.__path__[0] + '/rms_norm.py').read()",
    )
    _, session = graded(SETUP, GOOD, PLAIN, *thefts)
    assert ["ImportError" in session.problems[0], "ImportError" in session.problems[1]] == [True, True]
    assert "PermissionError" in session.problems[2]


F32, I32, I64 = "*fp32", "i32", "*i64"
COMPILED = {  # the kernels of solution 04 as a GPU would get them: types and constants
    "_softmax": ({"X": "*fp16", "OUT": "*fp16", "stride": I32, "D": I32}, {"BLOCK": 128}),
    "_add_rms_norm": (
        dict.fromkeys(("X", "R", "W", "NORM", "TOTAL"), "*bf16")
        | {"stride_x": I32, "stride_r": I32, "D": I32, "eps": "fp32"},
        {"BLOCK": 1024},
    ),
    "_swiglu": ({"X": "*bf16", "OUT": "*bf16", "stride": I32, "I": I32}, {"BLOCK": 128}),
    "_rope_kv": (
        dict.fromkeys(("QKV", "COS", "SIN"), F32)
        | {"POS": I64, "SLOTS": I64, "Q": F32, "K_POOL": F32, "V_POOL": F32}
        | dict.fromkeys(("by_token", "by_head", "T", "H", "K", "HALF"), I32),
        {"BLOCK": 32},
    ),
}


def test_the_answers_of_the_solution_are_kernels_that_a_gpu_runs(tmp_path):
    from minillm.kernels.triton_private import compile_ahead

    nb = nbk.read(Path(__file__).parents[1] / "solutions" / "04_triton_fusion.ipynb")
    cells = [nbk.source(c) for c in nbk.code_cells(nb) if c["id"] == "setup" or c["id"].startswith("task-")]
    path = tmp_path / "solution.py"
    path.write_text("\n\n".join(cells))
    space = {"__name__": "solution"}
    exec(compile(path.read_text(), str(path), "exec"), space)
    for name, (types, constants) in COMPILED.items():
        assert "ld.global" in compile_ahead(space[name], types, constants, "sm_90").asm["ptx"], name


def test_the_listing_of_task_6_is_what_the_compiler_writes(tmp_path):
    """The exercise shows PTX. Compile the same kernel and compare the lines that the questions are about."""
    from minillm.kernels.triton_private import compile_ahead

    path = tmp_path / "cell.py"
    path.write_text(SETUP + ADD)
    space = {"__name__": "cell"}
    exec(compile(path.read_text(), str(path), "exec"), space)
    types = {"X": "*fp16", "Y": "*fp16", "OUT": "*fp16", "n": "i32"}
    made = {aligned: compile_ahead(space["_add"], types, {"BLOCK": 1024}, "sm_90", aligned=aligned).asm["ptx"]
            for aligned in (True, False)}  # fmt: skip
    nb = nbk.read(Path(__file__).parents[1] / "exercises" / "04_triton_fusion.ipynb")
    shown = nbk.source(next(c for c in nb["cells"] if c["id"] == "about-6")).split("```")[1]
    words = [" ".join(line.split()) for line in shown.splitlines() if "%" in line or "reqntid" in line]
    real = [" ".join(line.split()) for line in made[True].splitlines()]
    assert len(words) == 15
    assert [w for w in words if w not in real] == []
    right = {a.key: a.want for a in READ}
    assert right["misaligned_loads"] == made[False].count("ld.global.b16")
    assert right["threads"] * right["elements_a_thread"] == right["elements_a_program"] == 1024


ADD = """
@jit
def _add(X, Y, OUT, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(X + at, mask=inside)
    y = tl.load(Y + at, mask=inside)
    tl.store(OUT + at, x + y, mask=inside)
"""
