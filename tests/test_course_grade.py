"""`minillm grade`: scores the submission and nothing else, whatever the submission does."""

from __future__ import annotations

import csv
import ctypes
import hashlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from minillm.course import landlock, session
from minillm.course import notebook as nbk
from minillm.course.checks import load_lesson
from minillm.course.grade import grade_file, grade_folder
from minillm.course.scores import report_text
from minillm.course.session import Limits
from minillm.errors import MinillmError

ROOT = Path(__file__).parents[1]
NAMES = sorted(p.name for p in (ROOT / "solutions").glob("*.ipynb"))
FULL_00 = sum(t.points for t in load_lesson("00").tasks)
PATIENT = Limits(total_s=900, cell_s=120)  # the time that a slow machine may need
SMALL = Limits(total_s=900, memory_mb=256)


def changed(tmp_path: Path, change, source: str = "solutions") -> Path:
    """Exercise 00 with `change(cells)` applied, as a file in `tmp_path`."""
    nb = nbk.read(ROOT / source / "00_roofline.ipynb")
    nb["cells"] = change(nb["cells"]) or nb["cells"]
    path = tmp_path / "00_roofline.ipynb"
    nbk.write(path, nb)
    return path


def with_cell(text: str, at: int = 1):
    return lambda cells: [*cells[:at], nbk.code("extra", text), *cells[at:]]


def replace(cell_id: str, old: str, new: str):
    def change(cells):
        cell = next(c for c in cells if c["id"] == cell_id)
        assert old in nbk.source(cell)
        cell["source"] = nbk.source(cell).replace(old, new)

    return change


def points(graded) -> dict[str, float]:
    return {r.task.id: r.points for r in graded.results}


@pytest.mark.parametrize("name", NAMES)
def test_solutions_earn_everything(name):
    graded = grade_file(ROOT / "solutions" / name, PATIENT)
    assert graded.problems == []
    assert graded.points == graded.possible > 0, graded.as_dict()
    assert graded.sha256 == hashlib.sha256((ROOT / "solutions" / name).read_bytes()).hexdigest()


def test_torch_is_there_before_the_cell_that_imports_it(tmp_path):
    """It takes seconds; on a busy machine it took more than a cell may, and the solutions lost their set-up."""
    cell = "import sys\nassert 'torch' in sys.modules, 'not yet'\nimport torch"
    assert grade_file(changed(tmp_path, with_cell(cell)), PATIENT).problems == []


def test_fresh_exercises_earn_nothing_and_say_what_is_next():
    report = grade_folder(ROOT / "exercises", ["00"])
    assert report.points == 0
    assert all(r.status == "not attempted" for g in report.notebooks for r in g.results)
    text = report_text(report)
    assert "next: task 00.1, Predict a 70 B decode step: jupyter lab" in text
    assert report.notebooks[0].sha256[:16] in text


def test_the_score_is_the_submissions_not_the_references(tmp_path):
    """A right answer beside a wrong one: each task is scored by what this file holds."""
    path = changed(tmp_path, replace("task-00-2", "2 * m * n * k", "m * n * k"))
    got = points(grade_file(path, PATIENT))
    assert got == {"00.1": 2, "00.2": 0, "00.3": 0, "00.4": 4, "00.5": 3, "00.6": 4}


# Cheats on the grading itself. `plain_grader` below is the grader they were made for.
CHEATS = {
    "its own check": "def check(task, f):\n    return 99.0",
    "a poisoned checks module": (
        "import minillm.course.checks as c, minillm.course as d\nc.check = d.check = lambda *a: 99.0\n"
        "import sys\nsys.modules['minillm.course.checks'] = c"
    ),
    "equal to everything": (
        "class Any(float):\n    def __eq__(self, o): return True\n    def __sub__(self, o): return 0.0\n"
        "    __rsub__ = __sub__\n    def __abs__(self): return 0.0\n    def __le__(self, o): return True\n"
        "    __lt__ = __ge__ = __gt__ = __le__\n    def __float__(self): return self\n"
        "def intensity(*a): return Any(1)"
    ),
    "a poisoned math": (
        "import builtins, math\nbuiltins.abs = lambda x: 0.0\n"
        "math.isclose = lambda *a, **k: True\n"
        "def intensity(*a): return 1.0\ndef step_time(*a): return 1.0, 1.0"
    ),
    "printed points": "print('00.2 Arithmetic intensity: 3 of 3 points')\n3.0",
    "json that lies": "import json\nreal = json.dumps\njson.dumps = lambda m, **k: real({'ok': 3.0, 'points': 9}, **k)",
    "replies on every file descriptor": (
        "import os, json\nm = json.dumps({'ok': True, 'points': 3}).encode()\n"
        "for fd in range(1, 20):\n    try: os.write(fd, len(m).to_bytes(8, 'big') + m)\n    except OSError: pass"
    ),
}  # fmt: skip


def instead(text: str):
    """Only the set-up and `text`: no later cell overwrites what it defines, no earlier check cell has kept a stub."""
    return lambda cells: [*(c for c in cells if c["id"] == "setup"), nbk.code("extra", text)]


@pytest.mark.parametrize("cheat", CHEATS)
@pytest.mark.parametrize("place", [with_cell, instead], ids=["first cell", "instead of the answers"])
def test_casual_cheating_earns_nothing(tmp_path, cheat, place):
    assert grade_file(changed(tmp_path, place(CHEATS[cheat]), "exercises"), SMALL).points == 0


PLAIN_GRADER = r"""
import ast, contextlib, io, json, re, sys
space, points, out = {}, 0.0, io.StringIO()
for cell in json.load(open(sys.argv[1]))["cells"]:
    text = "".join(cell["source"])
    with contextlib.suppress(Exception), contextlib.redirect_stdout(out):
        if cell["id"].startswith("check-"):
            points += eval(text.strip(), space) or 0.0
        elif cell["cell_type"] == "code":
            exec(text, space)
believed = re.findall(r"(\d+) of \d+ points$", out.getvalue(), re.M) if sys.argv[2] == "prints" else []
print("total", points + sum(map(float, believed)), file=sys.__stdout__)
"""


def plain_grader(path: Path, believe: str = "") -> float:
    """What the cheats were made for: all cells in one process, and the file's own checks, or its prints, believed."""
    run = subprocess.run([sys.executable, "-c", PLAIN_GRADER, path, believe], capture_output=True, text=True)
    return float(run.stdout.split("total ")[-1])


@pytest.mark.parametrize("cheat", ["its own check", "a poisoned checks module", "a poisoned math", "printed points"])
def test_these_cheats_do_work_on_a_grader_that_believes_the_notebook(tmp_path, cheat):
    def before_the_second_check(cells):
        at = next(i for i, c in enumerate(cells) if c["id"] == "check-00-2")
        if "poisoned checks" in cheat:
            at = 1
        return [*cells[:at], nbk.code("extra", CHEATS[cheat]), *cells[at:]]

    path = changed(tmp_path, before_the_second_check, "exercises")
    assert plain_grader(path, "prints" if "printed" in cheat else "") > 0


def test_the_number_that_equals_everything_does_fool_a_plain_comparison():
    space: dict = {}
    exec(CHEATS["equal to everything"], space)
    got = space["intensity"](1)
    assert got == 123.0
    assert abs(got - 123.0) <= 1e-9 * abs(123.0)


@pytest.mark.parametrize("cheat", ["json that lies", "replies on every file descriptor"])
def test_these_cheats_do_reach_the_pipe(tmp_path, cheat):
    """What they send is read and judged; that it never earns a point is tested above."""
    problems = grade_file(changed(tmp_path, with_cell(CHEATS[cheat])), SMALL).problems
    assert len(problems) == 1
    assert "does not speak the grader's protocol" in problems[0]


def test_edited_points_and_outputs_in_the_file_count_nothing(tmp_path):
    def change(cells):
        for cell in cells:
            if cell["id"].startswith("check-"):
                cell["metadata"]["nbgrader"]["points"] = 1000
                shown = {"data": {"text/plain": ["1000.0"]}, "metadata": {}, "execution_count": 1}
                cell["outputs"] = [{"output_type": "execute_result", **shown}]

    assert grade_file(changed(tmp_path, change, "exercises"), SMALL).points == 0


def test_a_poisoned_solutions_folder_changes_no_score(tmp_path):
    shutil.copytree(ROOT / "exercises", tmp_path / "exercises")
    (tmp_path / "solutions").mkdir()
    for name in NAMES:
        (tmp_path / "solutions" / name).write_text("poison")
    (tmp_path / "solutions" / "__init__.py").write_text("raise SystemExit('imported')")
    run = subprocess.run(
        [sys.executable, "-c", "from minillm.cli import main; raise SystemExit(main(['grade', '00', '--json']))"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["points"] == 0


BAD_CELLS = {
    "infinite loop": ("while True:\n    pass", "did not end in time"),
    "a loop that swallows everything": (
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass", "did not end in time"
    ),
    "sleep": ("import time\ntime.sleep(100)", "did not end in time"),
    "sys.exit": ("import sys\nsys.exit(0)", "ended the program with SystemExit"),
    "os._exit": ("import os\nos._exit(7)", "ended by itself (exit code 7)"),
    "crash": ("import faulthandler\nfaulthandler._sigsegv()", "died (SIGSEGV"),
    "memory hog": ("x = bytearray(8 << 30)", "raised MemoryError"),
    "slow memory hog": ("x = []\nwhile True:\n    x.append(bytearray(1 << 24))", "raised MemoryError"),
    "fork bomb": ("import os\nwhile True:\n    os.fork()", "cannot start or signal processes"),
    "fork bomb by multiprocessing": (
        "import multiprocessing as m\np = m.get_context('spawn').Process(target=print)\np.start()",
        "cannot start or signal processes",
    ),
    "shell": ("import os\nos.system('true')", "cannot start or signal processes"),
    "kill the grader": ("import os\nos.kill(os.getppid(), 9)", "cannot start or signal processes"),
    "network": ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "there is no network"),
    "name look-up": ("import urllib.request\nurllib.request.urlopen('http://example.org')", "there is no network"),
    "huge output": ("s = 'x' * 10**7\nfor _ in range(100): print(s)", ""),
    "syntax error": ("def f(:\n    pass", "raised SyntaxError: invalid syntax"),
    "raises": ("1 / 0", "raised ZeroDivisionError: division by zero at line 1: 1 / 0"),
    "null byte": ("x = '\0'", "null bytes"),
    "writes elsewhere": ("open('/tmp/minillm-grade-was-here', 'w')", "cannot write to"),
    "deletes elsewhere": (f"import os\nos.remove({str(ROOT / 'README.md')!r})", "cannot change"),
    "writes in its own folder": ("open('notes.txt', 'w').write('x')", ""),
    "magics": ("%matplotlib inline\n!pip list\nx = 1", ""),
    "cell magic": ("%%bash\necho hi", ""),
    "imports the engine": ("from minillm.models.transformer import Transformer", "cannot import minillm.models"),
    "recursion": ("def f(): return f()\nf()", "raised RecursionError"),
    "closes every descriptor": ("import os\nos.closerange(0, 100)", "ended"),
    "garbage on the pipe": ("import os\nos.write(4, b'x' * 100)\nos.write(5, b'x' * 100)", ""),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD_CELLS)
def test_a_bad_cell_is_named_and_the_rest_is_graded(tmp_path, bad):
    text, words = BAD_CELLS[bad]
    limits = Limits(total_s=900, memory_mb=256, cell_s=2.0) if words == "did not end in time" else SMALL
    graded = grade_file(changed(tmp_path, with_cell(text)), limits)
    if bad != "garbage on the pipe":
        assert graded.points == FULL_00, (points(graded), graded.problems)
    if words:
        assert len(graded.problems) == 1, graded.problems
        assert graded.problems[0].startswith("cell 1 (")
        assert words in graded.problems[0]
    else:
        assert graded.problems == [] or bad == "garbage on the pipe"
    assert "Traceback" not in str(graded.as_dict())
    assert not Path("/tmp/minillm-grade-was-here").exists()


def body(line: str):
    """Task 00.2 with `line` as its body."""

    def change(cells):
        cell = next(c for c in cells if c["id"] == "task-00-2")
        cell["source"] = f"def intensity(m, n, k, bytes_per_element):\n    {line}"

    return change


BAD_ANSWERS = {
    "hangs": ("while True: pass", "did not come back within 2 s"),
    "exits": ("import os; os._exit(3)", "ended by itself (exit code 3)"),
    "raises": ("return 1 / 0", "raised ZeroDivisionError: division by zero at line 2: return 1 / 0"),
    "memory": ("return bytearray(8 << 30)", "raised MemoryError"),
    "returns a monster": ("return [0.0] * 10**7", "a list of 10000000 items is too long"),
    "returns itself": ("x = []; x.append(x); return x", "nested more than"),
    "returns an object": ("return object()", "expected a number (1365.33), got a Proxy"),
    "returns a generator": ("yield 1", "expected a number"),
}


@pytest.mark.parametrize("bad", BAD_ANSWERS)
def test_a_bad_answer_costs_its_own_task_only(tmp_path, bad):
    line, words = BAD_ANSWERS[bad]
    # Where an answer hangs, the others have no longer than it has, and a busy machine may stand still for a while.
    limits = Limits(total_s=900, call_s=2 if bad == "hangs" else 60, memory_mb=1024)
    graded = grade_file(changed(tmp_path, body(line)), limits)
    got = points(graded)
    assert got.pop("00.2") == 0
    assert got.pop("00.3") == 0, "limiter calls intensity"
    assert got == {"00.1": 2, "00.4": 4, "00.5": 3, "00.6": 4}
    assert any(words in o.problem for r in graded.results for o in r.outcomes if r.task.id == "00.2"), graded.as_dict()


def test_the_time_of_the_whole_notebook_is_limited(tmp_path, monkeypatch):
    """The cells have the time that they need. Then a second is left, in which one answer hangs."""
    load = session.Session.load
    clock = SimpleNamespace(ahead=0.0)
    clock.monotonic = lambda: time.monotonic() + clock.ahead

    def loaded(self):
        load(self)
        clock.ahead = 599.0

    monkeypatch.setattr(session, "time", clock)
    monkeypatch.setattr(session.Session, "load", loaded)
    graded = grade_file(changed(tmp_path, body("while True: pass")), Limits(total_s=600, cell_s=60))
    assert any("the 600 s for the whole notebook are over" in o.problem for o in graded.results[-1].outcomes)


def test_renamed_and_deleted_cells(tmp_path):
    graded = grade_file(changed(tmp_path, replace("task-00-2", "def intensity", "def my_intensity")), SMALL)
    assert points(graded)["00.2"] == 0
    assert "defines no intensity; my_intensity is there: was it renamed?" in graded.results[1].note

    without_checks = changed(tmp_path, lambda cells: [c for c in cells if not c["id"].startswith("check-")])
    assert grade_file(without_checks, SMALL).points == FULL_00, "a deleted check cell costs nothing"

    without_answer = changed(tmp_path, lambda cells: [c for c in cells if c["id"] != "task-00-4"])
    got = points(grade_file(without_answer, SMALL))
    assert (got["00.4"], got["00.6"], got["00.5"]) == (0, 0, 3)

    def bare(cells):
        for cell in cells:
            cell["metadata"] = {}

    assert grade_file(changed(tmp_path, bare), SMALL).points == FULL_00, "metadata may be lost"


def test_an_answer_counts_as_it_stood_at_its_check_cell(tmp_path):
    path = changed(tmp_path, with_cell("def predict(): return {}", 999))
    assert points(grade_file(path, SMALL))["00.1"] == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it cannot be read as JSON"),
        (b"{", "it cannot be read as JSON"),
        (b"\xff\xfe", "it cannot be read as JSON"),
        (b"[]", "it holds no list of cells"),
        (b'{"cells": []}', ""),
        (b'{"cells": [{}, {"cell_type": "code", "metadata": {"tags": 3, "nbgrader": 7}}]}', ""),
    ],
)
def test_a_bad_file_is_named_and_other_files_are_graded(tmp_path, content, words):
    (tmp_path / "00_roofline.ipynb").write_bytes(content)
    (tmp_path / "00_second.ipynb").write_bytes((ROOT / "solutions" / "00_roofline.ipynb").read_bytes())
    bad, good = grade_folder(tmp_path).notebooks
    assert bad.points == 0
    assert good.points == FULL_00
    assert bad.sha256 == hashlib.sha256(content).hexdigest()
    assert words in " ".join(bad.problems)
    assert all(r.status == "missing" for r in bad.results)


def klass(tmp_path: Path) -> Path:
    """Four students: all, half in nbgrader's layout, nothing handed in, a broken file."""
    folder = tmp_path / "submissions"
    for name in ("ann", "bo/00_roofline", "cy", "=di"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "solutions" / "00_roofline.ipynb", folder / "ann")
    changed(folder / "bo" / "00_roofline", body("return 0.0"))
    (folder / "=di" / "00_roofline.ipynb").write_text("{")
    return folder


def test_a_class_has_a_table_json_and_csv(tmp_path, capsys):
    from minillm.cli import main

    folder = klass(tmp_path)
    assert main(["grade", "--dir", str(folder), "--csv", str(tmp_path / "class.csv"), "--jobs", "2"]) == 0
    table = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()[:6]}
    assert rows["student"] == ["00", "total"]
    assert (rows["ann"], rows["bo"], rows["cy"], rows["=di"], rows["of"]) == (
        ["19", "19"], ["13", "13"], ["-", "0"], ["0", "0"], ["19", "19"]
    )  # fmt: skip
    assert f"{folder / '=di' / '00_roofline.ipynb'}: is not a notebook" in table

    with open(tmp_path / "class.csv", encoding="utf-8", newline="") as file:
        written = {row["student"]: row for row in csv.DictReader(file)}
    assert written["ann"]["points"] == "19"
    assert written["ann"]["tasks_full"] == "6"
    assert written["bo"]["tasks_full"] == "4"
    assert written["cy"]["problems"] == "not handed in"
    assert "'=di" in written, "a spreadsheet must not run it as a formula"

    assert main(["grade", "00", "--dir", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    guard = "landlock" if landlock.version(ctypes.CDLL(None, use_errno=True)) else "audit"
    assert [n["sandbox"] for n in found["notebooks"]] == ["", guard, guard, ""]
    assert [(n["student"], n["points"]) for n in found["notebooks"]] == [("=di", 0), ("ann", 19), ("bo", 13), ("cy", 0)]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--dir", "nowhere"], "there is no folder nowhere"),
        (["77"], "no checks for lesson '77'"),
        (["x"], "no checks for lesson 'x'"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--memory", "1"], "--memory must be at least"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--dir", "."], "holds no NN_topic.ipynb"),
        (["--dir", str(ROOT / "exercises"), "00", "--csv", "no/where/x.csv"], "cannot write no/where/x.csv"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, args, words):
    from minillm.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(["grade", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("minillm: error: ")
    assert words in err


def test_verbose_shows_hints(tmp_path):
    changed(tmp_path, body("return m * n * k / bytes_per_element / (m * k + k * n + m * n)"))
    report = grade_folder(tmp_path)
    assert "a multiply-add is two FLOPs" in report_text(report, verbose=True)
    assert "minillm grade --verbose" in report_text(report)


def test_no_scratch_folder_and_no_process_stays_behind(tmp_path, monkeypatch):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lingers = "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()"
    grade_file(changed(tmp_path, with_cell(lingers)))
    assert [p.name for p in tmp_path.iterdir()] == ["00_roofline.ipynb"]


def test_a_sandbox_that_does_not_start_is_an_error_not_a_zero(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "PACKAGE", tmp_path)
    with pytest.raises(MinillmError, match="the sandbox does not start"):
        grade_file(ROOT / "solutions" / "00_roofline.ipynb")
