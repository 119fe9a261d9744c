"""Named wrong answers: each must get exactly its points and its hint, in a notebook and under `minillm grade` alike."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from minillm.course import notebook as nbk
from minillm.course.checks import check, load_lesson
from minillm.course.grade import grade_file
from minillm.course.report import result_text
from minillm.course.session import Limits

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "minillm" / "course" / "mutants"
FILES = sorted(FOLDER.glob("lesson_[0-9][0-9]/*.py"))
LESSONS = sorted(p.name[:2] for p in (ROOT / "solutions").glob("[0-9][0-9]_*.ipynb"))
LEAST = 5


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"mutant_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name[-2:]}-{p.stem}")
def test_mutant_gets_its_points_and_its_hint(path, capsys):
    mutant = load(path)
    task = load_lesson(mutant.TASK[:2]).by_id[mutant.TASK]
    assert mutant.__doc__, "the docstring names the error"
    assert path.parent.name == f"lesson_{task.id[:2]}"
    points = check(task.id, getattr(mutant, task.name))
    text = capsys.readouterr().out
    assert points == mutant.POINTS < task.points, text
    assert mutant.HINT in text


@pytest.mark.parametrize("number", LESSONS)
def test_every_lesson_has_mutants_for_every_task(number):
    mutants = [load(p) for p in FILES if p.parent.name == f"lesson_{number}"]
    assert len(mutants) >= LEAST
    assert {m.TASK for m in mutants} == set(load_lesson(number).by_id)
    assert all(len(m.HINT) > 4 for m in mutants)


@pytest.mark.parametrize("number", LESSONS)
def test_mutants_score_the_same_under_minillm_grade(number, tmp_path):
    """One wrong answer for each task, put into the solution notebook and graded in the sandbox."""
    lesson = load_lesson(number)
    solution = nbk.read(next((ROOT / "solutions").glob(f"{number}_*.ipynb")))
    chosen = {}
    for path in FILES:
        if path.parent.name == f"lesson_{number}":
            mutant = load(path)
            chosen.setdefault(mutant.TASK, (mutant, path.read_text()))
    for cell in list(nbk.code_cells(solution)):
        for task_id, (_, text) in chosen.items():
            if cell["id"] == f"check-{task_id.replace('.', '-')}":
                text = text.split("from __future__ import annotations\n", 1)[-1]
                at = solution["cells"].index(cell)
                solution["cells"].insert(at, nbk.code(f"mutant-{task_id.replace('.', '-')}", text))
                # Later answers of a lesson may call earlier ones: put the right one back after its check.
                right = nbk.source(solution["cells"][at - 1])
                solution["cells"].insert(at + 2, nbk.code(f"right-{task_id.replace('.', '-')}", right))
    path = tmp_path / f"{number}_{lesson.topic}.ipynb"
    nbk.write(path, solution)
    graded = grade_file(path, Limits(total_s=900, cell_s=120))  # a busy machine takes longer, and not other points
    assert graded.problems == []
    for result in graded.results:
        mutant, _ = chosen[result.task.id]
        assert result.points == mutant.POINTS, result_text(result)
        assert mutant.HINT in result_text(result)


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name[-2:]}-{p.stem}")
def test_mutant_stands_alone(path):
    """A mutant borrows from nobody, or a change elsewhere would change what it shows."""
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        borrowed = [m for m in modules if m.startswith(("minillm", "solutions"))]
        # `jit`, a group's type and the noise of a draw are the notebook's as well
        assert set(borrowed) <= {"minillm.kernels", "minillm.parallel.group", "minillm.rng"}
