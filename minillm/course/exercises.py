"""From solutions to exercises: a solution region becomes a stub, nothing else changes.

`solutions/NN_topic.ipynb` is the source. A task is a code cell with nbgrader metadata (grade_id `task-NN-K`) holding a
typed signature, a docstring and, inside the function, the answer between two marker lines:

    ### BEGIN SOLUTION
    ...
    ### END SOLUTION

It is followed by a locked cell `check-NN-K`. `python -m minillm.course.exercises` writes `exercises/NN_topic.ipynb`;
`--check` writes nothing and fails unless every byte agrees. Tooling of all lessons.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from pathlib import Path

from minillm.cli import answer
from minillm.course import notebook as nbk
from minillm.course.checks import load_lesson
from minillm.errors import MinillmError

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
SHORTEST, LONGEST = 3, 30  # lines of an answer


def task_of(cell: nbk.Cell) -> str | None:
    """`"02.3"` for the answer or check cell of task 02.3, else None."""
    nbgrader = cell.get("metadata", {}).get("nbgrader")
    grade_id = str(nbgrader.get("grade_id", "")) if isinstance(nbgrader, dict) else ""
    found = re.fullmatch(r"(?:task|check)-(\d\d)-(\d+)(?:-\w+)?", grade_id)
    return f"{found[1]}.{found[2]}" if found else None


def is_check(cell: nbk.Cell) -> bool:
    nbgrader = cell.get("metadata", {}).get("nbgrader")
    return isinstance(nbgrader, dict) and str(nbgrader.get("grade_id", "")).startswith("check-")


def stubbed(text: str, task_id: str) -> str:
    """The source of a task cell with each solution region replaced by a stub that names the task."""
    out: list[str] = []
    inside = False
    for line in text.splitlines():
        mark = line.strip()
        if mark == BEGIN:
            if inside:
                raise MinillmError(f"task {task_id}: {BEGIN} twice without {END}")
            indent = line[: len(line) - len(line.lstrip())]
            if not indent:
                raise MinillmError(f"task {task_id}: the solution region must be inside a function or method")
            out.append(f'{indent}raise NotImplementedError("task {task_id} is not attempted yet: write it here")')
            inside = True
        elif mark == END:
            if not inside:
                raise MinillmError(f"task {task_id}: {END} without {BEGIN}")
            inside = False
        elif not inside:
            out.append(line)
    if inside:
        raise MinillmError(f"task {task_id}: {BEGIN} without {END}")
    return "\n".join(out)


def exercise_of(solution: nbk.Notebook) -> nbk.Notebook:
    """The learner's notebook: cleared, every solution region a stub."""
    nb = nbk.cleared(solution)
    for cell in nb["cells"]:
        text = nbk.source(cell)
        if cell["cell_type"] != "code" or (BEGIN not in text and END not in text):
            continue
        task_id = task_of(cell)
        if task_id is None:
            raise MinillmError(f"cell {cell.get('id')!r} has a solution region but no grade_id such as task-02-3")
        cell["source"] = stubbed(text, task_id)
    if "SOLUTION" in json.dumps(nb):
        raise MinillmError("a solution marker would stay in the exercise; it must be a line of its own in a code cell")
    return nb


def problems(solution: nbk.Notebook, number: str) -> list[str]:
    """What is wrong with a solution notebook, beside what `exercise_of` refuses. Empty when it is in order."""
    lesson = load_lesson(number)
    found: list[str] = []
    ids = [cell.get("id") for cell in solution["cells"]]
    if len(set(ids)) != len(ids) or None in ids:
        found.append("every cell needs an id of its own")
    answered: dict[str, str] = {}
    checked: list[str] = []
    for cell in nbk.code_cells(solution):
        task_id, text = task_of(cell), nbk.source(cell)
        if task_id is None:
            continue
        if task_id not in lesson.by_id:
            found.append(f"task {task_id} has no check in minillm/course/checks/lesson_{number}.py")
        elif is_check(cell):
            checked.append(task_id)
            found += _check_problems(cell, lesson.by_id[task_id], answered.get(task_id, ""))
        else:
            answered[task_id] = answered.get(task_id, "") + text + "\n"
            found += _answer_problems(cell, task_id)
    if checked != [task.id for task in lesson.tasks]:
        found.append(f"check cells are {checked}, the lesson's tasks are {[task.id for task in lesson.tasks]}")
    return found


def _check_problems(cell: nbk.Cell, task, answer: str) -> list[str]:  # type: ignore[no-untyped-def]
    found = []
    meta = cell["metadata"]["nbgrader"]
    if nbk.source(cell).strip() != f'check("{task.id}", {task.name})':
        found.append(f'the check cell of {task.id} must be exactly: check("{task.id}", {task.name})')
    if meta.get("points") != task.points:
        found.append(f"the check cell of {task.id} says {meta.get('points')} points, the checks give {task.points}")
    if not (meta.get("grade") and meta.get("locked") and not meta.get("solution")):
        found.append(f"the check cell of {task.id} must have nbgrader flags grade and locked, not solution")
    defined = [n.name for n in ast.parse(answer).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    if task.name not in defined:
        found.append(f"task {task.id} asks for {task.name}, the cell above its check defines {defined}")
    return found


def _answer_problems(cell: nbk.Cell, task_id: str) -> list[str]:
    found = []
    text, meta = nbk.source(cell), cell["metadata"]["nbgrader"]
    if not (meta.get("solution") and not meta.get("grade") and not meta.get("locked")):
        found.append(f"the answer cell of {task_id} must have the nbgrader flag solution, not grade or locked")
    regions = re.findall(rf"{BEGIN}\n(.*?){END}", text, flags=re.S)
    lines = [ln for ln in "\n".join(regions).splitlines() if ln.strip() and not ln.strip().startswith("#")]
    if not SHORTEST <= len(lines) <= LONGEST:
        found.append(f"the answer of {task_id} has {len(lines)} lines; a task is {SHORTEST} to {LONGEST} lines")
    for node in ast.parse(text).body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            found.append(f"{task_id}: {node.name} has no docstring; it is the problem statement")
        if isinstance(node, ast.FunctionDef):
            args = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            if node.returns is None or any(a.annotation is None for a in args):
                found.append(f"{task_id}: every argument and the result of {node.name} need a type")
    return found


def generate(solutions: Path, exercises: Path, *, check: bool = False) -> list[str]:
    """Write every exercise (and each solution in canonical form), or with `check` list the files that differ.

    Answers that somebody wrote into `exercises` are overwritten. A file there without a solution is only named.
    """
    sources = sorted(solutions.glob("[0-9][0-9]_*.ipynb"))
    if not sources:
        raise MinillmError(f"{solutions} holds no NN_topic.ipynb; run this in the course's root or give --solutions")
    wanted = {}
    for path in sources:
        nb = nbk.read(path)
        try:
            wanted[path] = nbk.dumps(nbk.cleared(nb))
            wanted[exercises / path.name] = nbk.dumps(exercise_of(nb))
        except MinillmError as error:
            raise MinillmError(f"{path}: {error}") from None
        if faults := problems(nb, path.name[:2]):
            raise MinillmError(f"{path}: " + "; ".join(faults))
    stale = [p for p in sorted(exercises.glob("[0-9][0-9]_*.ipynb")) if p not in wanted]
    differ = [p for p, text in wanted.items() if not p.is_file() or p.read_bytes() != text.encode()]
    if not check:
        exercises.mkdir(parents=True, exist_ok=True)
        for path in differ:
            path.write_bytes(wanted[path].encode())
    return [str(p) for p in differ] + [f"{p} (it has no solution)" for p in stale if check]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m minillm.course.exercises", description="Write exercises/ from solutions/.",
        epilog="example: python -m minillm.course.exercises --check",
    )  # fmt: skip
    add_arguments(parser)
    args = parser.parse_args(argv)
    return answer(lambda: report(from_arguments(args), check=args.check))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `minillm course exercises` shares."""
    parser.add_argument("--solutions", default="solutions", help="where the answers are (default: %(default)s)")
    parser.add_argument("--exercises", default="exercises", help="where to write (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file differs")


def from_arguments(args: argparse.Namespace) -> list[str]:
    return generate(Path(args.solutions), Path(args.exercises), check=args.check)


def report(differ: list[str], *, check: bool) -> int:
    for path in differ:
        print(f"{path}: {'differs from its solution' if check else 'written'}")
    if not differ:
        print("every exercise agrees with its solution")
    elif check:
        print("run: python -m minillm.course.exercises")
    return 1 if check and differ else 0


if __name__ == "__main__":
    raise SystemExit(main())
