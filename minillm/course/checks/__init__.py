"""`check("02.3", candidate)`: scores one answer, says what failed on which input, and gives a hint.

The tasks of lesson NN and their references are in `lesson_NN.py` here, written apart from `solutions/`. Inside a
notebook the answer runs in the notebook's own process; the score that counts is `minillm grade`'s, which runs the same
checks on an answer in a sandbox. Tooling of all lessons.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from minillm.course.candidate import local
from minillm.course.report import result_text
from minillm.course.tasks import Lesson, Result, evaluate, nothing
from minillm.errors import MinillmError

__all__ = ["Points", "check", "load_lesson", "needs"]


class Points(float):
    """The points an answer earned. A float (nbgrader reads it from the cell's output) that knows its maximum."""

    result: Result | None

    def __new__(cls, earned: float, possible: float, result: Result | None = None) -> Points:
        self = super().__new__(cls, earned)
        self.possible = possible
        self.result = result
        return self

    possible: float

    def __str__(self) -> str:
        return f"{float(self):g} of {self.possible:g} points"


def load_lesson(number: str) -> Lesson:
    """The checks of lesson `number` ("02")."""
    name = f"minillm.course.checks.lesson_{number}"
    if not (number.isdigit() and len(number) == 2) or importlib.util.find_spec(name) is None:
        raise MinillmError(f"there are no checks for lesson {number!r}; a lesson is named by two digits, such as 02")
    lesson: Lesson = importlib.import_module(name).LESSON
    return lesson


def check(task_id: str, candidate: Any) -> Points:
    """Score `candidate`, the answer to task `task_id`; print a report and return the points earned."""
    try:
        task = load_lesson(str(task_id)[:2]).by_id[str(task_id)]
    except (MinillmError, KeyError):
        print(f"there is no task {task_id!r}; restore the check cell from a fresh exercise")
        return Points(0, 0)
    result = judge(task, candidate)
    print(result_text(result))
    return Points(result.points, task.points, result)


def judge(task: Any, candidate: Any) -> Result:
    """The result of `candidate`, run in this process."""
    if not callable(candidate):
        what = "None" if candidate is None else f"a {type(candidate).__name__}"
        return nothing(task, "missing", f"expected the function or class {task.name}, got {what}")
    return evaluate(task, local(candidate, task.limit_s))


@contextlib.contextmanager
def needs(*task_ids: str) -> Iterator[None]:
    """For a cell that uses earlier answers: while one of them is still a stub, say so instead of failing.

    >>> with needs("01.4"):
    ...     raise NotImplementedError
    this cell comes alive once task 01.4 is done
    """
    try:
        yield
    except Exception as error:
        while type(error).__name__ == "InterpreterError" and isinstance(error.__cause__, Exception):
            error = error.__cause__  # Triton wraps what a kernel raised
        if not isinstance(error, NotImplementedError):
            raise
        which = f"task {task_ids[0]} is" if len(task_ids) == 1 else f"tasks {', '.join(task_ids)} are"
        print(f"this cell comes alive once {which} done")
