"""What a task is: a reference, cases with points, and the typical mistakes with a hint for each.

A case calls the answer with fresh inputs and compares with what the reference gives. When they differ, each `Mistake`
(a wrong reference) is tried: if the answer agrees with it, its hint is shown. Tooling of all lessons.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minillm.course.candidate import Candidate, CandidateError, NotAttempted, OverTimeError, local
from minillm.course.compare import brief, difference, kind


class Wrong(Exception):
    """Raised by a case's `run` to fail with a sentence of its own, and perhaps a hint."""

    def __init__(self, text: str, hint: str = ""):
        super().__init__(text)
        self.hint = hint


@dataclass(frozen=True)
class Mistake:
    """A typical wrong answer. `wrong` takes the reference's arguments; `credit` is the share of points kept."""

    hint: str
    wrong: Callable[..., Any]
    credit: float = 0.0


@dataclass(frozen=True)
class Case:
    """One input. `args` builds fresh arguments; `run(answer, *args)` is a scenario when one call is not enough.

    why    shown on failure: why this case matters
    hint   shown on failure when no mistake matches
    slips  for a plain number: {factor: hint}; an answer off by exactly that factor keeps `slip_credit` of the points
    """

    name: str
    args: Callable[[], Sequence[Any]] = tuple
    points: float = 1
    why: str = ""
    hint: str = ""
    run: Callable[..., Any] | None = None
    slips: Mapping[float, str] = field(default_factory=dict)
    slip_credit: float = 0.5
    rel: float | None = None
    abs: float | None = None
    secret: bool = False  # a prediction: say in which direction it is off, not the answer


@dataclass(frozen=True)
class Answer:
    """One number of a prediction: the learner's dict must hold `want` under `key`, within `rel`."""

    key: str
    want: float
    unit: str
    points: float = 1
    rel: float = 0.01
    why: str = ""
    hint: str = ""
    slips: Mapping[float, str] = field(default_factory=dict)

    def case(self) -> Case:
        return Case(
            f"{self.key}, in {self.unit}", run=self._pick, points=self.points, rel=self.rel, why=self.why,
            hint=self.hint, slips=self.slips, secret=True,
        )  # fmt: skip

    def _pick(self, function: Callable[[], Any]) -> Any:
        got = function()
        if not isinstance(got, dict):
            raise Wrong(f"expected a dict with the key {self.key!r}, got {kind(got)}")
        if self.key not in got:
            raise Wrong(f"the dict has no key {self.key!r}, only {brief(list(got))}")
        return got[self.key]


@dataclass(frozen=True)
class Task:
    """`name` is the function or class the learner writes; `reference` gives what it must give."""

    id: str
    name: str
    title: str
    reference: Callable[..., Any]
    cases: Sequence[Case]
    mistakes: Sequence[Mistake] = ()
    rel: float = 1e-4
    abs: float = 1e-6
    limit_s: float = 5.0  # for each call
    writes: bool = False  # the answer writes into its arguments; `run` finds them in `candidate.after`

    @property
    def points(self) -> float:
        return sum(case.points for case in self.cases)


def prediction(task_id: str, title: str, answers: Sequence[Answer], name: str = "predict") -> Task:
    """A graded prediction: the learner writes `name()`, which returns a dict with the key of every answer."""
    right = {a.key: a.want for a in answers}
    return Task(task_id, name, title, lambda: dict(right), [a.case() for a in answers], abs=0.0)


@dataclass(frozen=True)
class Part:
    """An answer that a running engine can use: see `minillm.course.mount`.

    name        of the engine's part (`minillm.parts.PARTS`), or of the server's, with `server`
    task        the answer that it is
    make        make(answers: minillm.course.answers.Answers) gives what `LLM(parts={name: ...})` takes
    options     of the engine, without which it could not be used
    needs       other answers that it cannot do without
    uses        other answers that it takes instead of the engine's own, if all of them are there
    unread_beside  a part beside which the engine would never call this one
    note        what whoever mounts it should know
    """

    name: str
    task: str
    make: Callable[[Any], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: Sequence[str] = ()
    uses: Sequence[str] = ()
    unread_beside: str = ""
    server: bool = False
    note: str = ""


@dataclass(frozen=True)
class Lesson:
    """All tasks of one exercise. `allow` names the minillm modules that an answer may import while it is graded.
    `parts`: the answers that a running engine can use; where two are the same part, the first that is there is taken.
    """

    number: str
    topic: str
    tasks: Sequence[Task]
    allow: Sequence[str] = ("minillm.config", "minillm.errors")
    parts: Sequence[Part] = ()

    @property
    def by_id(self) -> dict[str, Task]:
        return {task.id: task for task in self.tasks}


@dataclass(frozen=True)
class Outcome:
    """What one case gave. `problem` is empty when it passed."""

    case: str
    points: float
    possible: float
    problem: str = ""
    given: str = ""
    why: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Result:
    """What one task gave. `note` says why no case was run, when none was."""

    task: Task
    outcomes: Sequence[Outcome]
    status: str  # "full", "partial", "none", "not attempted", "missing"
    note: str = ""

    @property
    def points(self) -> float:
        return round(sum(o.points for o in self.outcomes), 6)


def nothing(task: Task, status: str, note: str) -> Result:
    return Result(task, [Outcome(c.name, 0, c.points, note) for c in task.cases], status, note)


def evaluate(task: Task, candidate: Candidate) -> Result:
    """Run every case of `task` on `candidate` (see `minillm.course.candidate`). Never raises for its faults."""
    outcomes: list[Outcome] = []
    untouched = slow = 0
    for case in task.cases:
        if slow == 2:
            outcomes.append(Outcome(case.name, 0, case.points, "not run: two cases before it ran out of time"))
            continue
        try:
            outcomes.append(_run(task, case, candidate))
        except NotAttempted:
            untouched += 1
            outcomes.append(Outcome(case.name, 0, case.points, "not attempted"))
        except OverTimeError as error:
            slow += 1
            outcomes.append(_failed(task, case, str(error), _shown(task, case)))
    if untouched == len(task.cases):
        return nothing(task, "not attempted", f"task {task.id} is not attempted yet")
    earned = sum(o.points for o in outcomes)
    status = "full" if earned >= task.points - 1e-9 else "partial" if earned > 0 else "none"
    return Result(task, outcomes, status)


def _run(task: Task, case: Case, candidate: Candidate) -> Outcome:
    run = case.run or (lambda function, *args: function(*args))
    want = run(local(task.reference, reference=True), *case.args())
    candidate.changed = []
    args = case.args()
    try:
        got = run(candidate, *args)
    except (NotAttempted, OverTimeError):
        raise
    except CandidateError as error:
        return _failed(task, case, str(error), _shown(task, case))
    except Wrong as error:
        return _failed(task, case, str(error), _shown(task, case), error.hint)
    except Exception as error:  # a scenario that stumbles over an unexpected result, such as None[0]
        return _failed(task, case, f"the result cannot be used ({type(error).__name__}: {error})", _shown(task, case))
    if candidate.changed and not task.writes:
        text = f"it changed its input in place ({', '.join(candidate.changed)}); the caller still needs that"
        return _failed(task, case, text, _shown(task, case), "work on a new tensor or list, leave the input alone")
    rel = task.rel if case.rel is None else case.rel
    abs_ = task.abs if case.abs is None else case.abs
    problem = difference(got, want, rel, abs_)
    if problem is None:
        return Outcome(case.name, case.points, case.points)
    if case.secret and isinstance(got, int | float) and got != want and got == got:
        problem = f"{got:,.6g} is too {'large' if got > want else 'small'}"
    hint, credit = _diagnose(task, case, run, got, want, rel, abs_)
    return _failed(task, case, problem, _shown(task, case), hint, credit)


def _diagnose(task: Task, case: Case, run: Any, got: Any, want: Any, rel: float, abs_: float) -> tuple[str, float]:
    """The hint of the slip or mistake that gives exactly `got`, and the share of points it keeps."""
    if isinstance(want, int | float) and isinstance(got, int | float):
        for factor, hint in case.slips.items():
            if difference(got, want * factor, rel, abs_) is None:
                return hint, case.slip_credit
    for mistake in task.mistakes:
        try:
            wrong = run(local(mistake.wrong, reference=True), *case.args())
        except Exception:  # this wrong answer cannot even run on this case
            continue
        if difference(wrong, want, rel, abs_) is not None and difference(got, wrong, rel, abs_) is None:
            return mistake.hint, mistake.credit
    return "", 0.0


def _failed(task: Task, case: Case, problem: str, given: str, hint: str = "", credit: float = 0.0) -> Outcome:
    return Outcome(case.name, case.points * credit, case.points, problem, given, case.why, hint or case.hint)


def _shown(task: Task, case: Case) -> str:
    """The inputs of a case, named as in the reference's signature (or the scenario's)."""
    args = list(case.args())
    for function, skip in ((case.run, 1), (task.reference, 0)):
        try:
            parameters = list(inspect.signature(function).parameters.values())[skip:] if function else []
            names = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
        except (TypeError, ValueError):
            names = []
        if args and len(names) == len(args):
            return ", ".join(f"{n} = {brief(a, 80)}" for n, a in zip(names, args, strict=True))
    return ", ".join(brief(a, 80) for a in args)
