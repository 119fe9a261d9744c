"""The checks themselves: every reference earns full points, every mistake is told by its own hint."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from minillm.course import check, host, needs
from minillm.course.candidate import local
from minillm.course.checks import judge, load_lesson
from minillm.course.compare import difference
from minillm.course.report import result_text
from minillm.course.tasks import Answer, Case, Mistake, Task, Wrong, evaluate, prediction

LESSONS = sorted(p.stem[-2:] for p in Path(load_lesson.__code__.co_filename).parent.glob("lesson_[0-9][0-9].py"))
TASKS = [task for number in LESSONS for task in load_lesson(number).tasks]
MISTAKES = [pytest.param(t, m, id=f"{t.id}-{m.hint[:40]}") for t in TASKS for m in t.mistakes]


def judge_as_reference(task, function):
    """As the grader runs references: kernel cases ask an answer for a kernel, and references are plain torch."""
    return evaluate(task, local(function, task.limit_s, reference=True))


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.id)
def test_reference_earns_full_points(task):
    result = judge_as_reference(task, task.reference)
    assert result.points == task.points, result_text(result)
    assert f"{task.points:g} of {task.points:g} points" in result_text(result)


@pytest.mark.parametrize("task", [t for t in TASKS if t.id.endswith(".1")], ids=lambda t: t.id)
def test_check_prints_and_gives_the_points(task, capsys):
    points = check(task.id, task.reference)
    assert points == task.points
    assert float(repr(points)) == task.points
    assert f"{task.points:g} of {task.points:g} points" in capsys.readouterr().out


@pytest.mark.parametrize(("task", "mistake"), MISTAKES)
def test_each_mistake_loses_points_and_is_named(task, mistake):
    """A mistake that no case tells from the reference, or that another hint hides, teaches nothing."""
    result = judge_as_reference(task, mistake.wrong)
    assert result.points < task.points
    assert mistake.hint in result_text(result)


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.id)
def test_slips_of_predictions_earn_half_and_their_hint(task):
    for case in task.cases:
        for factor, hint in case.slips.items():
            key = case.name.split(",")[0]
            wrong = {**task.reference(), key: task.reference()[key] * factor}
            result = judge(task, lambda wrong=wrong: wrong)
            assert result.points == task.points - case.points * (1 - case.slip_credit), (key, factor)
            assert hint in result_text(result)


CONSTANTS = [0, 1, 0.0, "memory", "compute", (0, 0), [], {}, None, float("nan"), float("inf")]


# To a scenario no constant is an object with methods, so one of them stands for all: each costs every round of it.
ALIKE = [(t, c) for t in TASKS for c in (CONSTANTS[:1] if t.name[0].isupper() else CONSTANTS)]


@pytest.mark.parametrize(("task", "constant"), ALIKE, ids=lambda v: v.id if isinstance(v, Task) else repr(v))
def test_constants_earn_next_to_nothing(task, constant):
    assert judge(task, lambda *args: constant).points <= 0.25 * task.points


@pytest.mark.parametrize("number", LESSONS)
def test_lesson_is_in_order(number):
    lesson = load_lesson(number)
    assert [t.id for t in lesson.tasks] == [f"{number}.{i + 1}" for i in range(len(lesson.tasks))]
    assert 4 <= len(lesson.tasks) <= 8
    assert all(not c.args() and c.run for c in lesson.tasks[0].cases), "the first task is a prediction"
    source = (Path(load_lesson.__code__.co_filename).parent / f"lesson_{number}.py").read_text()
    assert not re.search(
        r"^\s*(from|import) (solutions|minillm\.(?!config|request|course\.(tasks|checks|adapters)))", source, re.M
    )
    for task in lesson.tasks:
        assert len({c.name for c in task.cases}) == len(task.cases)


DOUBLE = Task(
    "99.1", "double", "Double it", lambda x: [2 * v for v in x],
    [Case("two numbers", lambda: ([1.0, 2.0],), why="the reason", hint="the case's hint"), Case("none", lambda: ([],))],
    mistakes=[Mistake("that is the square", lambda x: [v * v for v in x])], limit_s=60,
)  # fmt: skip


def text(candidate, task=DOUBLE) -> str:
    return result_text(judge(task, candidate))


def endless(x):
    while True:
        try:
            while True:
                pass
        except Exception:
            pass


def in_place(x):
    x[:] = [2 * v for v in x]
    return x


def stub(x):
    raise NotImplementedError("task 99.1")


def leaves(x):
    sys.exit(3)


def divides(x):
    return x[0] / 0


def deep(x):
    return deep(x)


class Liar:
    def __eq__(self, other):
        return True


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (stub, "not attempted"),
        (None, "got None"),
        (7, "expected the function or class double, got a int"),
        (lambda x: None, "got None; does the function return"),
        (lambda x: 3, "expected a list of length 2, got an int"),
        (lambda x: [2.0], "expected length 2: [2, 4], got length 1: [2]"),
        (lambda x: [2.0, float("nan")], "[1]: expected 4, got NaN"),
        (lambda x: [2.0, "4"], "[1]: expected a number (4), got a str"),
        (lambda x: [1.0, 4.0], "that is the square"),
        (lambda x: [2.0, 5.0], "the case's hint"),
        (lambda x: [2.0, 5.0], "the reason"),
        (lambda x: [2.0, 5.0], "x = [1, 2]"),
        (lambda: 1, "keep the signature"),
        (lambda x: Liar(), "expected a list of length 2, got a"),
        (in_place, "changed its input in place (argument 1)"),
        (leaves, "ended the program with SystemExit"),
        (divides, "ZeroDivisionError: float division by zero at line"),
        (divides, "return x[0] / 0"),
        (deep, "RecursionError"),
    ],
)  # fmt: skip
def test_faults_are_sentences(candidate, words):
    assert words in text(candidate)
    assert "Traceback" not in text(candidate)


def test_an_answer_that_never_ends_is_stopped():
    """Here alone the limit is short: an answer that ends may be late on a busy machine."""
    said = text(endless, replace(DOUBLE, limit_s=0.5))
    assert "did not come back within 0.5 s" in said
    assert "Traceback" not in said


def test_an_answer_is_not_charged_for_what_others_use_of_the_processor(monkeypatch):
    """It is over time when its own processor time is up, or when it has slept or waited far too long."""
    now = SimpleNamespace(wall=100.0, own=5.0)
    clocks = SimpleNamespace(monotonic=lambda: now.wall, process_time=lambda: now.own)
    monkeypatch.setattr(host, "time", clocks)
    with host.time_limit(600):
        now.wall, now.own = 100 + 600 * host.PATIENCE - 1, 5 + 599
        signal.raise_signal(signal.SIGALRM)

    def use(wall, own):
        with host.time_limit(600):
            now.wall, now.own = now.wall + wall, now.own + own
            signal.raise_signal(signal.SIGALRM)

    for wall, own in ((700, 600), (600 * host.PATIENCE, 1)):
        with pytest.raises(host.OverTime):
            use(wall, own)


def test_ranks_are_ended_though_the_limit_rings_again_meanwhile(monkeypatch):
    """Or one that computes for ever would do so for the rest of the process."""
    from torch import Tensor

    from minillm.course import ranks

    begun, join, rung = set(threading.enumerate()), threading.Thread.join, []

    def rings(thread, timeout=None):
        if not rung:
            rung.append(True)
            raise host.OverTime
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", rings)
    with pytest.raises(host.OverTime):
        ranks.run(lambda group: group.recv(Tensor([1.0]), (group.rank + 1) % 3), [[]] * 3, ["recv"])
    left = set(threading.enumerate()) - begun
    for thread in left:
        join(thread, 60)
    assert not any(thread.is_alive() for thread in left)


def test_a_ring_that_comes_as_the_body_ends_is_not_heard_and_leaves_no_timer(monkeypatch):
    """Where a machine stands still for a moment. A timer that went on would end the process: its handler is gone."""
    real = signal.setitimer

    def disarm_late(which, seconds, interval=0.0):
        if seconds == 0:
            signal.raise_signal(signal.SIGALRM)
        return real(which, seconds, interval)

    before = signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(signal, "setitimer", disarm_late)
    try:
        with host.time_limit(600):
            pass
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert signal.getsignal(signal.SIGALRM) is before
    finally:
        real(signal.ITIMER_REAL, 0)


def test_statuses():
    assert judge(DOUBLE, stub).status == "not attempted"
    assert judge(DOUBLE, lambda x: [1.0, 4.0] if x else []).status == "partial"
    assert judge(DOUBLE, None).status == "missing"


def test_torch_results_are_told_apart():
    import torch

    want = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert difference(want + 1e-7, want, 1e-4, 1e-6) is None
    assert "expected shape [2, 2], got [4]" in str(difference(want.reshape(-1), want, 1e-4, 1e-6))
    assert "dtype float32, got float16" in str(difference(want.half(), want, 1e-4, 1e-6))
    banned = torch.tensor([1.0, float("-inf")])
    assert difference(banned.clone(), banned, 1e-4, 1e-6) is None
    assert "expected -inf, got 0" in str(difference(torch.tensor([1.0, 0.0]), banned, 1e-4, 1e-6))
    assert "1 of 4 numbers are NaN, the first at [1, 0]" in str(
        difference(torch.tensor([[1, 2], [float("nan"), 4]]), want, 1e-4, 1e-6)
    )
    infinite = torch.tensor([[1, float("inf")], [3, 4]])
    assert "most at [0, 1]: expected 2, got inf" in str(difference(infinite, want, 1, 1))
    assert "expected a tensor" in str(difference([1.0], want, 1e-4, 1e-6))
    assert ".item()" in str(difference(torch.tensor(1.0), 1.0, 1e-4, 1e-6))


def test_classes_are_candidates_and_writing_tasks_see_what_was_written():
    class Stack:
        def __init__(self, size):
            self.items, self.size = [], size

        def push(self, v):
            self.items.append(v)
            return len(self.items)

        def __iter__(self):
            yield from self.items

    def scenario(cls, size):
        stack = cls(size)
        return [stack.push(5), stack.push(6), list(stack), stack.size]

    task = Task("99.2", "Stack", "A stack", Stack, [Case("two pushes", lambda: (9,), run=scenario)])
    assert judge(task, Stack).status == "full"

    class Late(Stack):
        def push(self, v):
            return len(self.items)

    assert "expected 1, got 0" in text(Late, task)

    def fill(out, value):
        out[0] = value

    def run(function, out, value):
        function(out, value)
        return function.after[0]

    writes = Task("99.3", "fill", "Fill", fill, [Case("one", lambda: ([0, 0], 7), run=run)], writes=True)
    assert judge(writes, fill).status == "full"
    assert "[0]: expected 7, got 0" in text(lambda out, value: None, writes)


def test_a_scenario_may_fail_with_its_own_sentence():
    def run(function):
        if function() != 1:
            raise Wrong("not one", "one is the loneliest number")

    task = Task("99.4", "one", "One", lambda: 1, [Case("it", run=run)])
    assert judge(task, lambda: 1).status == "full"
    assert "not one" in text(lambda: 2, task)
    assert "loneliest" in text(lambda: 2, task)


def test_prediction_dicts():
    task = prediction("99.5", "P", [Answer("a", 10.0, "s"), Answer("b", 4.0, "m", points=3)])
    assert task.points == 4
    assert judge(task, lambda: {"a": 10.05, "b": 4}).status == "full"
    assert judge(task, lambda: {"a": 10.2, "b": 4}).points == 3
    assert "10.2 is too large" in text(lambda: {"a": 10.2, "b": 4}, task)
    assert "expected" not in text(lambda: {"a": 10.2, "b": -4}, task), "a prediction is not given away"
    assert "has no key 'b'" in text(lambda: {"a": 10}, task)
    assert "expected a dict with the key 'a', got an int" in text(lambda: 5, task)


def test_unknown_task_and_needs(capsys):
    assert check("00.99", len) == 0
    assert check("xx", len) == 0
    with needs("01.2", "01.4"):
        stub(1)
    out = capsys.readouterr().out
    assert "no task '00.99'" in out
    assert "comes alive once tasks 01.2, 01.4 are done" in out
    with pytest.raises(ZeroDivisionError), needs("01.2"):
        divides([1.0])


def test_the_tiny_model_is_the_references_put_together():
    """Two independent writings of one transformer: loops in lesson_01, whole tensors in tiny."""
    import torch

    from minillm.course.checks import lesson_01 as ref

    model, ids = ref.MODEL, [5, 3, 31, 0, 8]
    x, one = model.table[torch.tensor(ids)], torch.ones(model.dim, dtype=torch.float64)
    for w in model.weights:
        h = ref.rms_norm(x, one, 1e-5)
        q, k, v = ((h @ w[n].T).reshape(len(ids), -1, model.head_dim) for n in "qkv")
        x = x + ref.attention(ref.rope(q, 0, 1e4), ref.rope(k, 0, 1e4), v).reshape(len(ids), -1) @ w["o"].T
        x = x + ref.swiglu(ref.rms_norm(x, one, 1e-5), w["gate"], w["up"], w["down"])
    logits = (ref.rms_norm(x, one, 1e-5) @ model.table.T).float()
    assert difference(model(ids), logits, 1e-5, 1e-6) is None
    assert difference(model(ids[:3]), logits[:3], 1e-5, 1e-6) is None, "causal"


def test_lesson_00_needs_no_torch():
    """So that `minillm grade 00` answers at once."""
    code = "import sys; from minillm.course.checks import load_lesson as f; f('00'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
