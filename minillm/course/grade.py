"""Grade notebooks: the learner's code runs in a sandbox, the references stay here, the file's own checks count nothing.

`minillm grade` shows one learner what to do next; on a folder of students' folders it makes a class table.
How far the sandbox goes is said in `sandbox.py`. Tooling of all lessons.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm.course import notebook as nbk
from minillm.course.candidate import Candidate
from minillm.course.checks import load_lesson
from minillm.course.exercises import is_check, task_of
from minillm.course.session import Limits, Session, Source
from minillm.course.tasks import Lesson, Result, Task, evaluate, nothing
from minillm.errors import MinillmError

NAME = re.compile(r"(\d\d)_.*\.ipynb")
CHECK = re.compile(r"""^\s*check\(\s*["'](\d\d\.\d+)["']""", re.MULTILINE)


@dataclass
class Graded:
    """The score of one notebook file, and of whom."""

    file: str
    lesson: str
    sha256: str = ""
    student: str = ""
    results: Sequence[Result] = ()
    problems: list[str] = field(default_factory=list)
    sandbox: str = ""  # the strongest guard that was on: "landlock" or "audit"; empty when nothing was run

    @property
    def points(self) -> float:
        return round(sum(r.points for r in self.results), 6)

    @property
    def possible(self) -> float:
        return sum(r.task.points for r in self.results)

    def as_dict(self) -> dict[str, Any]:
        return {
            "student": self.student, "lesson": self.lesson, "file": self.file, "sha256": self.sha256,
            "points": self.points, "possible": self.possible, "problems": self.problems, "sandbox": self.sandbox,
            "tasks": [
                {
                    "id": r.task.id, "title": r.task.title, "points": r.points, "possible": r.task.points,
                    "status": r.status, "note": r.note,
                    "cases": [
                        {name: getattr(o, name) for name in ("case", "points", "possible", "problem", "why", "hint")}
                        for o in r.outcomes
                    ],
                }
                for r in self.results
            ],
        }  # fmt: skip


def grade_file(path: Path, limits: Limits = Limits(), student: str = "") -> Graded:  # noqa: B008  (frozen)
    """Grade one notebook. What is wrong with the file is a problem of the result, never an exception."""
    found = NAME.fullmatch(path.name)
    if not found:
        raise MinillmError(f"{path} is not named like an exercise (NN_topic.ipynb)")
    lesson = load_lesson(found[1])
    graded = Graded(str(path), lesson.number, student=student)
    try:
        # One read: the bytes that are hashed are the bytes that are graded.
        content = path.read_bytes()
        graded.sha256 = hashlib.sha256(content).hexdigest()
        nb = nbk.parse(content, str(path))
    except OSError as error:
        graded.problems.append(f"cannot be read: {error.strerror}")
        graded.results = [nothing(t, "missing", "the file cannot be read") for t in lesson.tasks]
        return graded
    except MinillmError as error:
        graded.problems.append(str(error).removeprefix(f"{path} "))
        graded.results = [nothing(t, "missing", "the file is not a notebook") for t in lesson.tasks]
        return graded
    with Session(lesson, _sources(nb), limits) as session:
        graded.results = [_task(session, task) for task in lesson.tasks]
        graded.problems += session.problems
        graded.sandbox = session.guard
    return graded


def _sources(nb: nbk.Notebook) -> list[Source]:
    """The learner's code in order. A cell that calls `check` only marks where an answer is complete."""
    sources: list[Source] = []
    for number, cell in enumerate(nbk.code_cells(nb), 1):
        text = nbk.source(cell)
        checks = [task_of(cell)] if is_check(cell) else CHECK.findall(text)
        rest = "\n".join(line for line in text.split("\n") if not CHECK.match(line))
        if not is_check(cell) and nbk.DEMO not in nbk.tags(cell) and rest.strip():
            sources.append(Source(number, rest))
        sources += [Source(number, "", task_id) for task_id in checks if task_id]
    return sources


def _task(session: Session, task: Task) -> Result:
    if task.id not in session.found:
        near = difflib.get_close_matches(task.name, session.names, 1, 0.5)
        hint = f"; {near[0]} is there: was it renamed?" if near else ""
        return nothing(task, "missing", f"the notebook defines no {task.name}{hint}")
    return evaluate(task, Candidate(session, task.id, min(task.limit_s, session.limits.call_s)))


# Folders


@dataclass
class Report:
    """Everything one run of `minillm grade` found."""

    folder: str
    notebooks: list[Graded]
    is_class: bool

    @property
    def points(self) -> float:
        return round(sum(g.points for g in self.notebooks), 6)

    @property
    def possible(self) -> float:
        return sum(g.possible for g in self.notebooks)

    def next_task(self) -> tuple[Graded, Result] | None:
        """The first task without full points, unattempted ones before faulty ones within a lesson."""
        for graded in self.notebooks:
            for wanted in (("not attempted", "missing"), ("none", "partial")):
                for result in graded.results:
                    if result.status in wanted:
                        return graded, result
        return None

    def as_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"folder": self.folder, "points": self.points, "possible": self.possible}
        if not self.is_class and (upcoming := self.next_task()):
            graded, result = upcoming
            out["next"] = {"task": result.task.id, "title": result.task.title, "open": open_command(graded.file)}
        return out | {"notebooks": [g.as_dict() for g in self.notebooks]}


def open_command(file: str) -> str:
    return f"jupyter lab {file!r}" if " " in file else f"jupyter lab {file}"


def grade_folder(
    folder: Path,
    lessons: Sequence[str] = (),
    limits: Limits = Limits(),  # noqa: B008  (frozen)
    jobs: int = 1,
    progress: Callable[[Graded], None] = lambda graded: None,
) -> Report:
    """Grade a learner's folder of notebooks, or a folder of students' folders. `lessons`: only these numbers."""
    known = [load_lesson(number).number for number in lessons]
    if not folder.is_dir():
        hint = "run in the course's root, or give --dir" if str(folder) == "exercises" else "give a folder that exists"
        raise MinillmError(f"there is no folder {folder}; {hint}")
    own = exercise_files(folder, known)
    if own:
        todo, is_class = [(path, "") for path in own], False
    else:
        students = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
        todo, is_class = [(path, s.name) for s in students for path in exercise_files(s, known, deep=True)], True
    if not todo:
        which = f" for lesson {', '.join(known)}" if known else ""
        raise MinillmError(f"{folder} holds no NN_topic.ipynb{which}, nor do the folders in it; give --dir")

    def one(item: tuple[Path, str]) -> Graded:
        graded = grade_file(item[0], limits, item[1])
        progress(graded)
        return graded

    if jobs == 1 or len(todo) == 1:
        notebooks = [one(item) for item in todo]
    else:
        with ThreadPoolExecutor(jobs) as pool:
            notebooks = list(pool.map(one, todo))
    if is_class:
        notebooks = _with_missing(notebooks, [s.name for s in students])
    return Report(str(folder), notebooks, is_class)


def exercise_files(folder: Path, lessons: Sequence[str], deep: bool = False) -> list[Path]:
    """Notebooks of known lessons in `folder`; `deep` looks into folders as well (nbgrader's layout)."""
    paths = (p for p in (folder.rglob("*.ipynb") if deep else folder.glob("*.ipynb")))
    files = [p for p in paths if NAME.fullmatch(p.name) and not any(part.startswith(".") for part in p.parts)]
    files = [p for p in files if _has_checks(p.name[:2]) and (not lessons or p.name[:2] in lessons)]
    return sorted(files, key=lambda p: (p.name[:2], str(p)))


def _has_checks(number: str) -> bool:
    try:
        load_lesson(number)
    except MinillmError:
        return False
    return True


def _with_missing(notebooks: list[Graded], students: list[str]) -> list[Graded]:
    """A class table has a line for each student and lesson; what was not handed in counts nothing."""
    lessons: list[Lesson] = [load_lesson(n) for n in sorted({g.lesson for g in notebooks})]
    table: list[Graded] = []
    for student in students:
        for lesson in lessons:
            handed_in = [g for g in notebooks if (g.student, g.lesson) == (student, lesson.number)]
            if len(handed_in) > 1:
                names = ", ".join(g.file for g in handed_in)
                handed_in[0].problems.append(f"handed in {len(handed_in)} times ({names}); the first file counts")
            if not handed_in:
                results = [nothing(t, "missing", "not handed in") for t in lesson.tasks]
                handed_in = [Graded("", lesson.number, "", student, results, ["not handed in"])]
            table.append(handed_in[0])
    return table
