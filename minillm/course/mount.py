"""A learner's answers in a live engine: `minillm serve --use exercises/06_paged_attention.ipynb`.

Each exercise says which of its answers are parts of an engine (`Lesson.parts` in checks/lesson_NN.py). `load` runs the
notebook, takes those that are written, and puts them into the form that the engine calls. What the answers are worth is
for `minillm grade` to say; here they only have to work.

The code runs in this process, with all that this process may do: it is the learner's own, mounted at the learner's
request. Never mount a notebook that somebody else has sent you. Tooling of all lessons.
"""

from __future__ import annotations

import contextlib
import pkgutil
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm.course import checks
from minillm.course.answers import CELL, CELL_S, Answers, run
from minillm.course.checks import load_lesson
from minillm.course.host import describe
from minillm.course.tasks import Part
from minillm.errors import MinillmError

WITH_TASKS = re.compile(r"(.+\.ipynb):(\d\d\.\d+(?:,\d\d\.\d+)*)")  # exercises/06_paged_attention.ipynb:06.2,06.5


@dataclass(frozen=True)
class Mounted:
    """What the notebooks give an engine.

    parts    for `LLM(parts=...)` and `AsyncLLM(parts=...)`
    server   parts of the server around it, by name
    names    part -> whose answer it is: {"allocator": "06.2 BlockAllocator"}
    options  of the engine, without which a part would not be used
    notes    what a learner should know: what was left out and why, what will be slow
    taken    the rows of the exercises' tables that are mounted
    """

    parts: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    taken: list[Part] = field(default_factory=list)

    def config(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options of an engine: those that were given, and those that the parts need.

        given: only what somebody has asked for; None and "auto" leave the choice open. Raises MinillmError where the
        two disagree.
        """
        for name, value in self.options.items():
            if given.get(name) not in (None, "auto", value):
                raise MinillmError(
                    f"{self._who_needs(name)} needs {name}={value!r}, and {given[name]!r} was asked for; leave one of "
                    "the two out"
                )
        return {**given, **self.options}

    def lines(self) -> list[str]:
        """What is mounted, and what is to be said about it, a line each."""
        how = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        mine = [f"mounted: {answer} ({name})" for name, answer in self.names.items()]
        return [*mine, *([f"with {how}"] if how else []), *self.notes]

    def _who_needs(self, option: str) -> str:
        return " and ".join(self.names[part.name] for part in self.taken if option in part.options)


def load(path: str | Path, cell_s: float = CELL_S) -> Mounted:
    """The parts of one exercise: `LLM(parts=load("exercises/06_paged_attention.ipynb").parts)`.

    Runs the notebook's code, here, in a fresh module (see `minillm.course.answers.run`). A path may end in the tasks
    that are wanted, ".ipynb:06.2,06.5". Without, every answer that is written and is a part is taken, and `notes` names
    the others. Raises MinillmError if the exercise has no part, none is written, a cell fails or takes longer than
    `cell_s` seconds, or an answer cannot be called as its task says.
    """
    path, tasks = _split(str(path))
    answers = run(path, cell_s)
    table = answers.lesson.parts
    if not table:
        raise MinillmError(f"exercise {answers.lesson.number} has no part of an engine; {with_parts()}")
    if unknown := [t for t in tasks if t not in {part.task for part in table}]:
        known = "; ".join(f"{answers.label(part.task)} ({part.name})" for part in table)
        raise MinillmError(f"{path}: {unknown[0]} is not a part of an engine; these are: {known}")
    mounted, left = Mounted(), []
    for part in table:
        if tasks and part.task not in tasks:
            continue
        why = _why_not(part, answers, mounted)
        if why and tasks:
            raise MinillmError(f"{path}: {why}")
        if why:
            left.append(why)
            continue
        _mount(part, answers, mounted)
    if not mounted.names:
        raise MinillmError(f"{path}: nothing to mount: {'; '.join(left)}")
    mounted.notes.extend(f"not mounted: {why}" for why in left)
    return mounted


def load_all(paths: Sequence[str | Path], cell_s: float = CELL_S) -> Mounted:
    """The parts of several exercises together. Raises MinillmError if two give the same part."""
    whole, whose = Mounted(), dict[str, str]()
    for path in paths:
        one = load(path, cell_s)
        for name, answer in one.names.items():
            if name in whose:
                raise MinillmError(
                    f"the {name} is given twice, {whole.names[name]} by {whose[name]} and {answer} by {path}; give one "
                    "of the two. A path may say which answers are wanted: exercises/NN_topic.ipynb:NN.2,NN.4"
                )
            whose[name] = str(path)
        for name, value in one.options.items():
            if whole.options.get(name, value) != value:
                raise MinillmError(
                    f"{one._who_needs(name)} needs {name}={value!r}, and {whole._who_needs(name)} needs "
                    f"{whole.options[name]!r}; give one of the two"
                )
        for field_name in ("parts", "server", "names", "options"):
            getattr(whole, field_name).update(getattr(one, field_name))
        whole.notes.extend(one.notes)
        whole.taken.extend(one.taken)
    for part in whole.taken:
        if part.unread_beside in whole.names:
            raise MinillmError(f"{_unread(part, whole.names[part.name], whole)}; give one of the two")
    return whole


@contextlib.contextmanager
def in_words() -> Iterator[None]:
    """What a mounted answer raises while it works becomes a MinillmError with notebook, cell and line."""
    try:
        yield
    except MinillmError:
        raise
    except Exception as error:
        lines = [frame for frame in traceback.extract_tb(error.__traceback__) if CELL in frame.filename]
        if not lines:
            raise
        said, last = describe(error), lines[-1]
        raise MinillmError(
            f"{last.filename}, line {last.lineno}: {last.line}: {said['error']}: {said['message']}"
        ) from error


def with_parts() -> str:
    """In words, which exercises have parts."""
    numbers = sorted(m.name[-2:] for m in pkgutil.iter_modules(checks.__path__) if m.name.startswith("lesson_"))
    found = [
        f"{number} ({', '.join(dict.fromkeys(part.name for part in parts))})"
        for number in numbers
        if (parts := load_lesson(number).parts)
    ]
    return f"these have: {', '.join(found)}"


def _split(path: str) -> tuple[str, list[str]]:
    found = WITH_TASKS.fullmatch(path)
    return (found[1], found[2].split(",")) if found else (path, [])


def _why_not(part: Part, answers: Answers, mounted: Mounted) -> str:
    """Why this part cannot be mounted beside what is mounted already; "" if it can."""
    label = answers.label(part.task)
    for task_id in (part.task, *part.needs):
        if task_id in answers.open:
            needed = "" if task_id == part.task else f"{label} needs {answers.label(task_id)}: "
            return needed + answers.open[task_id]
    if part.name in mounted.names:
        return (
            f"{label}, since {mounted.names[part.name]} is the {part.name}; {answers.path}:{part.task} takes this one"
        )
    if part.unread_beside in mounted.names:
        return f"{_unread(part, label, mounted)}; {answers.path}:{part.task} takes it alone"
    return ""


def _unread(part: Part, label: str, mounted: Mounted) -> str:
    beside = part.unread_beside
    return f"{label} ({part.name}) would never be called beside {mounted.names[beside]} ({beside})"


def _mount(part: Part, answers: Answers, mounted: Mounted) -> None:
    label = answers.label(part.task)
    try:
        made = part.make(answers)
    except MinillmError:
        raise
    except Exception as error:
        said = describe(error)
        raise MinillmError(f"{answers.path}: {label}: {said['error']}: {said['message']}") from None
    (mounted.server if part.server else mounted.parts)[part.name] = made
    more = [answers.label(t) for t in part.uses] if part.uses and answers.has(*part.uses) else []
    mounted.names[part.name] = label + (f" with {', '.join(more)}" if more else "")
    mounted.options.update(part.options)
    mounted.taken.append(part)
    if part.note:
        mounted.notes.append(f"{label}: {part.note}")
