"""The exported course works with nbgrader itself: release, autograde, partial credit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minillm.cli import main
from minillm.course import notebook as nbk
from minillm.course.checks import load_lesson
from minillm.course.grade import grade_folder

ROOT = Path(__file__).parents[1]
NAME = "00_roofline"
FULL = sum(t.points for t in load_lesson("00").tasks)


def nbgrader(course: Path, *args: str) -> str:
    bin_folder = str(Path(sys.executable).parent)  # generate_assignment calls alembic by name
    env = os.environ | {"PATH": os.pathsep.join([bin_folder, os.environ["PATH"]]), "JUPYTER_PLATFORM_DIRS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "nbgrader", *args], cwd=course, env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def submit(course: Path, student: str, nb: nbk.Notebook) -> None:
    folder = course / "submitted" / student / NAME
    folder.mkdir(parents=True)
    nbk.write(folder / f"{NAME}.ipynb", nb)


def test_release_and_autograde_give_full_partial_and_no_points(tmp_path, capsys):
    course = tmp_path / "course"
    assert main(["course", "export-nbgrader", str(course), "--solutions", str(ROOT / "solutions")]) == 0
    assert f"nbgrader generate_assignment {NAME}" in capsys.readouterr().out
    nbgrader(course, "generate_assignment", NAME)
    release = nbk.read(course / "release" / NAME / f"{NAME}.ipynb")
    assert "SOLUTION" not in json.dumps(release)

    answers = {c["id"]: nbk.source(c) for c in nbk.code_cells(nbk.read(ROOT / "solutions" / f"{NAME}.ipynb"))}
    submit(course, "fresh", release)
    full = json.loads(json.dumps(release))
    for cell in nbk.code_cells(full):
        if cell["id"].startswith("task-"):
            cell["source"] = answers[cell["id"]]
    submit(course, "full", full)
    partial = json.loads(json.dumps(full))
    for cell in nbk.code_cells(partial):
        if cell["id"] == "task-00-1":  # one number in the wrong unit: half of its point
            cell["source"] = "def predict():\n    return {'ms_per_token': 0.07, 'tokens_per_second': 14.2857}"
        if cell["id"] == "task-00-2":  # right at one row only
            cell["source"] = answers["task-00-2"].replace(" + m * n) *", ") *")
        if cell["id"] == "task-00-6":
            cell["source"] = "def decode_rate(*args):\n    1 / 0"
        if cell["id"] == "check-00-5":  # nbgrader puts the locked cell back
            cell["source"] = "99.0"
    submit(course, "partial", partial)
    nbgrader(course, "autograde", NAME, "--create")

    from nbgrader.api import Gradebook

    with Gradebook(f"sqlite:///{course / 'gradebook.db'}") as book:
        score = {who: book.find_submission(NAME, who) for who in ("fresh", "full", "partial")}
        assert {who: s.max_score for who, s in score.items()} == dict.fromkeys(score, FULL)
        assert score["fresh"].score == 0
        assert score["full"].score == FULL
        assert not any(s.needs_manual_grade for s in score.values())
        # 00.1 loses 0.5, 00.2 loses 2 of 3, 00.3 builds on 00.2 and may lose, 00.6 loses all 4.
        grades = {g.cell.name: g.score for n in score["partial"].notebooks for g in n.grades}
    assert (grades["check-00-1"], grades["check-00-2"], grades["check-00-6"]) == (1.5, 1, 0)
    assert (grades["check-00-4"], grades["check-00-5"]) == (4, 3)

    # The same files, graded in the sandbox, get the same points.
    report = grade_folder(course / "submitted")
    assert {g.student: g.points for g in report.notebooks} == {
        "fresh": 0, "full": FULL, "partial": sum(grades.values())
    }  # fmt: skip


def test_export_refuses_what_it_would_overwrite_or_cannot_find(tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    (tmp_path / "empty").mkdir()
    solutions = ["--solutions", str(ROOT / "solutions")]
    assert main(["course", "export-nbgrader", str(tmp_path / "full"), *solutions]) == 2
    assert main(["course", "export-nbgrader", str(tmp_path / "new"), "--solutions", str(tmp_path)]) == 2
    assert not (tmp_path / "new").exists()
    out, err = capsys.readouterr()
    assert out == ""
    assert "is not an empty folder" in err
    assert "holds no NN_topic.ipynb" in err
    assert main(["course", "export-nbgrader", str(tmp_path / "empty"), *solutions, "--json"]) == 0
    assert NAME in json.loads(capsys.readouterr().out)["assignments"]


@pytest.mark.parametrize("words", [["course", "exercises", "--check"], ["course", "--json", "exercises", "--check"]])
def test_course_exercises_from_the_command_line(monkeypatch, capsys, words):
    monkeypatch.chdir(ROOT)
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out == ('{"differ": []}\n' if "--json" in words else "every exercise agrees with its solution\n")


def test_course_run_from_the_command_line(tmp_path, capsys):
    nbk.write(tmp_path / "00_a.ipynb", nbk.notebook([nbk.md("t", "# A"), nbk.code("one", "print(1)")]))
    assert main(["course", "run", "--dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lessons"][0]["failure"] == ""
    assert main(["course", "run", "09", "--dir", str(tmp_path)]) == 2
    assert "has no lesson 09; it has 00" in capsys.readouterr().err
