"""The answers of an exercise, run in this process, so that an engine can use them. Tooling of all lessons.

`run(path)` executes a notebook's cells as its kernel would: no sandbox, no copies, the learner's own code on the
learner's own machine, at the learner's request. `minillm grade` is the other way, for code that nobody vouches for.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import itertools
import linecache
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from minillm.course import notebook as nbk
from minillm.course.checks import load_lesson
from minillm.course.exercises import is_check, task_of
from minillm.course.host import OverTime, describe, time_limit
from minillm.course.sandbox import as_it_stands, plain
from minillm.course.tasks import Lesson
from minillm.errors import MinillmError

CELL = ", code cell "  # in the names of their sources, which tracebacks show
CELL_S = 60.0  # a cell that defines an answer takes milliseconds; whoever experiments gets a minute
_numbers = itertools.count()


@dataclass(frozen=True)
class Answers:
    """What one notebook answers.

    found  task id -> the function or class, for the tasks that are written
    open   task id -> why it is not there, in words, for the others
    """

    path: str
    lesson: Lesson
    found: dict[str, Any]
    open: dict[str, str]

    def label(self, task_id: str) -> str:
        """`06.2 BlockAllocator`."""
        return f"{task_id} {self.lesson.by_id[task_id].name}"

    def has(self, *task_ids: str) -> bool:
        return all(task_id in self.found for task_id in task_ids)

    def take(self, task_id: str, arguments: int, **members: int | None) -> Any:
        """The answer, if it can be called as its task says. Raises MinillmError otherwise.

        arguments: how many the function, or the class, is called with. members: the same for its methods; None is a
        property, or whatever else has that name.
        """
        answer, what = self.found[task_id], f"{self.path}: {self.label(task_id)}"
        _fits(answer, arguments, what)
        for name, count in members.items():
            member = getattr(answer, name, None)
            if member is None:
                raise MinillmError(f"{what} has no {name}; keep the names of the task as they were given")
            if count is not None:
                _fits(member, count + (not isinstance(inspect.getattr_static(answer, name), staticmethod)),
                      f"{what}.{name}", count)  # fmt: skip
        return answer


def _fits(function: Any, arguments: int, what: str, shown: int | None = None) -> None:
    if not callable(function):
        raise MinillmError(f"{what} is a {type(function).__name__}; expected something to call")
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError as error:
        count = arguments if shown is None else shown
        raise MinillmError(
            f"{what} is called with {count} argument{'s' * (count != 1)}, and cannot be ({error}); keep the signature "
            "of the task as it was given"
        ) from None
    except ValueError:  # some built-in callables have no signature
        pass


def run(path: str | Path, cell_s: float = CELL_S) -> Answers:
    """Execute the notebook's code in a fresh module and collect its answers.

    Cells that check answers or show results (tag `demo`) are left out, and what the others print is not shown. Each may
    take `cell_s` seconds. Raises MinillmError for a file that is no exercise, and for a cell that fails.
    """
    nb = nbk.read(path)
    task_ids = [task_id for cell in nbk.code_cells(nb) if (task_id := task_of(cell))]
    numbers = sorted({task_id[:2] for task_id in task_ids})
    if len(numbers) != 1:
        what = f"tasks of the exercises {', '.join(numbers)}" if numbers else "no task of an exercise"
        raise MinillmError(f"{path} holds {what}; give one of exercises/NN_topic.ipynb")
    lesson = load_lesson(numbers[0])
    module = types.ModuleType(f"minillm_exercise_{numbers[0]}_{next(_numbers)}")
    sys.modules[module.__name__] = module  # dataclasses and Triton look their module up
    space, found, texts = module.__dict__, dict[str, Any](), dict[str, ast.AST]()
    names = {task.name: task.id for task in lesson.tasks}
    for number, cell in enumerate(nbk.code_cells(nb), 1):
        task_id = task_of(cell)
        if is_check(cell):
            if task_id in lesson.by_id and callable(answer := space.get(lesson.by_id[task_id].name)):
                found[task_id] = as_it_stands(answer)
        elif nbk.DEMO not in nbk.tags(cell):
            tree = _execute(nbk.source(cell), f"{path}{CELL}{number}", space, cell_s)
            for node in ast.iter_child_nodes(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and names.get(node.name) not in (None, *found):
                    texts[names[node.name]] = tree
    for name, task_id in names.items():
        if task_id not in found and callable(space.get(name)):
            found[task_id] = space[name]
    missing = _not_there(lesson, found, texts)
    return Answers(str(path), lesson, {t: a for t, a in found.items() if t not in missing}, missing)


def _execute(source: str, where: str, space: dict[str, Any], cell_s: float) -> ast.AST:
    """Run one cell; returns its syntax tree."""
    text = plain(source)
    linecache.cache[where] = (len(text), None, text.splitlines(keepends=True), where)  # for Triton, and for tracebacks
    try:
        tree = ast.parse(text, where)
        with time_limit(cell_s), contextlib.redirect_stdout(io.StringIO()):
            exec(compile(tree, where, "exec"), space)
    except NotImplementedError:
        return tree  # a stub, called by a cell of the learner's
    except OverTime:
        raise MinillmError(
            f"{where}: did not end within {cell_s:g} s; is there a loop that never ends, or a measurement?"
        ) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        said = describe(error)
        if said["error"] == "NotImplementedError":  # inside Triton's own error
            return tree
        line = f", {said['where']}" if said["where"] else ""
        raise MinillmError(f"{where}{line}: {said['error']}: {said['message']}") from None
    return tree


def _not_there(lesson: Lesson, found: dict[str, Any], texts: dict[str, ast.AST]) -> dict[str, str]:
    """Task id -> why its answer cannot be used. A stub is one, and so is whatever calls one."""
    missing = {}
    for task in lesson.tasks:
        if task.id not in found:
            missing[task.id] = f"{task.id} {task.name} is not in the notebook"
        elif stubs := [node.name for node in ast.walk(texts.get(task.id, ast.Module([], []))) if _is_stub(node)]:
            which = f" ({', '.join(stubs)})" if isinstance(found[task.id], type) else ""
            missing[task.id] = f"{task.id} {task.name} is not written yet{which}"
    while True:
        names = {task.name: task.id for task in lesson.tasks if task.id in missing}
        more = {}
        for task_id, tree in texts.items():
            used = [names[n] for n in sorted(_globals(tree)) if names.get(n, task_id) != task_id]
            if task_id not in missing and used:
                task = lesson.by_id[task_id]
                more[task_id] = f"{task.id} {task.name} uses {lesson.by_id[used[0]].name}: {missing[used[0]]}"
        if not more:
            return missing
        missing |= more


def _is_stub(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    """A function that ends in NotImplementedError whatever it is given."""
    return isinstance(node, ast.FunctionDef) and any(
        isinstance(statement, ast.Raise) and "NotImplementedError" in _globals(statement) for statement in node.body
    )


def _globals(tree: ast.AST) -> set[str]:
    """Names that are read and never set: those of something outside."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    local = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    local |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return {node.id for node in names} - local
