"""Exercises come from solutions byte for byte, their stubs are stubs, and a fresh one runs from top to bottom."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minillm.course import exercises, notebook
from minillm.course.checks import load_lesson
from minillm.errors import MinillmError

ROOT = Path(__file__).parents[1]
NAMES = sorted(p.name for p in (ROOT / "solutions").glob("*.ipynb"))


def test_every_exercise_is_its_solution_without_answers():
    assert NAMES
    assert exercises.generate(ROOT / "solutions", ROOT / "exercises", check=True) == []
    assert sorted(p.name for p in (ROOT / "exercises").glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_exercise_holds_stubs_that_name_their_task(name):
    solved, fresh = (notebook.read(ROOT / folder / name) for folder in ("solutions", "exercises"))
    lesson = load_lesson(name[:2])
    stubs = []
    for before, after in zip(notebook.code_cells(solved), notebook.code_cells(fresh), strict=True):
        assert after["outputs"] == []
        assert after["execution_count"] is None
        if exercises.BEGIN not in notebook.source(before):
            assert notebook.source(before) == notebook.source(after)
            continue
        task_id = exercises.task_of(after)
        raised = [n for n in ast.walk(ast.parse(notebook.source(after))) if isinstance(n, ast.Raise)]
        assert raised
        assert all(f"task {task_id} is not attempted" in ast.unparse(n) for n in raised)
        stubs.append(task_id)
    assert set(stubs) == set(lesson.by_id)
    assert "SOLUTION" not in json.dumps(fresh)


RUN = """
import linecache, sys
from minillm.course import notebook
total = 0.0
space = {"__name__": "__main__"}
for cell in notebook.code_cells(notebook.read(sys.argv[1])):
    text = notebook.source(cell)
    if text.startswith("check("):
        points = eval(text, space)
        total += points
    else:
        name = f"<{cell['id']}>"  # Triton reads a kernel's source, which a notebook's kernel keeps like this
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), space)
print("TOTAL", total)
"""


def run(path: Path) -> str:
    # One thread: with two, waiting for each other on a busy machine takes ten times as long as the work.
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", RUN, str(path)], capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_fresh_exercise_runs_to_the_end_and_earns_nothing(name):
    out = run(ROOT / "exercises" / name)
    assert "TOTAL 0.0" in out
    for task in load_lesson(name[:2]).tasks:
        assert f"task {task.id} is not attempted yet" in out
    assert "comes alive once" in out


@pytest.mark.model
@pytest.mark.parametrize("name", NAMES)
def test_solution_runs_to_the_end_and_earns_everything(name):
    out = run(ROOT / "solutions" / name)
    assert f"TOTAL {float(sum(t.points for t in load_lesson(name[:2]).tasks))}" in out
    assert "comes alive once" not in out
    if name.startswith("01"):
        assert "The capital of France is Paris" in out, "the real model runs on the learner's functions"
    if name.startswith("02"):
        assert "same tokens with both caches: True" in out, "the live engine runs on the learner's cache"
    if name.startswith("03"):
        assert "the same tokens alone and in a batch: True" in out, "the learner's sampler runs in the engine"


def copy(tmp_path: Path) -> tuple[Path, Path]:
    shutil.copytree(ROOT / "solutions", tmp_path / "solutions")
    exercises.generate(tmp_path / "solutions", tmp_path / "exercises")
    return tmp_path / "solutions", tmp_path / "exercises"


def test_check_sees_one_changed_byte_and_a_missing_and_a_stale_file(tmp_path):
    solutions, made = copy(tmp_path)
    assert exercises.generate(solutions, made, check=True) == []
    path = made / NAMES[0]
    path.write_text(path.read_text().replace("roofline", "rooflime", 1))
    assert exercises.generate(solutions, made, check=True) == [str(path)]
    assert "rooflime" in path.read_text(), "--check writes nothing"
    path.unlink()
    shutil.copy(made / NAMES[1], made / "77_stale.ipynb")
    stale = f"{made / '77_stale.ipynb'} (it has no solution)"
    assert exercises.generate(solutions, made, check=True) == [str(path), stale]
    args = ["--solutions", str(solutions), "--exercises", str(made)]
    assert exercises.main([*args, "--check"]) == 1
    assert exercises.main(args) == 0
    assert path.exists()


GOOD = "def f(x: int) -> int:\n    ### BEGIN SOLUTION\n    return x\n    ### END SOLUTION\n    # kept"


def test_stub_replaces_the_region_and_keeps_the_rest():
    got = exercises.stubbed(GOOD, "00.2")
    assert got.splitlines() == [
        "def f(x: int) -> int:",
        '    raise NotImplementedError("task 00.2 is not attempted yet: write it here")',
        "    # kept",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (GOOD.replace("    ### END SOLUTION\n", ""), "without ### END"),
        (GOOD.replace("    ### BEGIN SOLUTION\n", ""), "without ### BEGIN"),
        ("### BEGIN SOLUTION\nx = 1\n### END SOLUTION", "inside a function"),
        (GOOD + "\n    # SOLUTION 2", "would stay in the exercise"),
    ],
)
def test_broken_markers_are_refused(text, words):
    with pytest.raises(MinillmError, match=words):
        exercises.exercise_of(notebook.notebook([notebook.task("00.2", text)]))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("def intensity(m: int,", "def intensity(m,", "need a type"),
        ('"points": 3,', '"points": 30,', "says 30 points"),
        ("def intensity(", "def intensify(", "asks for intensity"),
        ('check(\\"00.2\\", intensity)', 'check(\\"00.2\\", intensity) + 9', "must be exactly"),
        ('"grade_id": "check-00-2"', '"grade_id": "check-00-9"', "has no check"),
    ],
)
def test_a_solution_out_of_step_with_its_checks_is_refused(tmp_path, old, new, words):
    solutions, made = copy(tmp_path)
    path = solutions / "00_roofline.ipynb"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(MinillmError, match=words):
        exercises.generate(solutions, made)


def test_notebooks_are_written_in_one_form():
    nb = notebook.notebook([notebook.md("a", "x\ny"), notebook.code("b", "1 + 1")])
    text = notebook.dumps(nb)
    assert text == notebook.dumps(json.loads(text))
    nbformat = pytest.importorskip("nbformat")
    assert nbformat.writes(nbformat.reads(text, 4)).strip() == text.strip()
    nbformat.validate(nbformat.reads(text, 4))
    with pytest.raises(MinillmError, match="occur twice"):
        notebook.notebook([notebook.md("a", ""), notebook.md("a", "")])
    with pytest.raises(MinillmError, match="lower-case"):
        notebook.md("A B", "")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"cells": 3}', '{"cells": [3]}', '{"cells": [{"source": 3}]}', "[" * 100_000]
)
def test_what_is_no_notebook_is_told_in_one_line(tmp_path, content):
    path = tmp_path / "x.ipynb"
    path.write_text(content)
    with pytest.raises(MinillmError, match="is not a notebook"):
        notebook.read(path)
