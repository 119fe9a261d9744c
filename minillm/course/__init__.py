"""The tools of the course: exercises from solutions, checks, grading, execution of the lessons.

    notebook.py    read, write and build notebooks     exercises.py   solutions/NN_topic.ipynb -> exercises/
    tasks.py       Task, Case, Mistake, evaluate       checks/        lesson_NN.py: the tasks and their references
    compare.py     how a result differs, in words      mutants/       lesson_NN/: wrong answers, each tested
    candidate.py   an answer as something to call; host.py runs it; wire.py carries values as JSON
    session.py     the sandboxed process of `minillm grade`; sandbox.py is what runs inside it
    kernel_watch.py   what a kernel of an answer touches, judged before it happens
    ranks.py       a world of ranks for one answer, and what they said to each other
    grade.py       one notebook, a folder, a class     execute.py, guard.py   the lesson notebooks
    mount.py       answers in a live engine (--use)    answers.py   runs them here; adapters/ fit them to the engine

How to add an exercise (lesson NN; lesson_00.py and lesson_01.py are the patterns)
1. `checks/lesson_NN.py`: a reference for each task in your own words (import neither solutions/ nor the engine), its
   cases (`args` builds fresh inputs from a seeded generator; `points`; `why`), and `Mistake(hint, wrong)` for each
   typical error. First task: `prediction(id, title, [Answer(key, want, unit, slips={2: "..."}), ...])`. At the end
   `LESSON = Lesson("NN", "topic", [...])`. For an answer that is a class, or a task that needs several calls, give the
   case a scenario, `run=lambda answer, *args: ...`, that returns plain data or tensors. For an answer that writes into
   its arguments, say `writes=True` and read `answer.after` in the scenario. A constant must not earn points: put
   several inputs into one case where the results are few. Where answers hold Triton kernels: `allow=KERNELS` and
   the cases of `checks/triton_cases.py`, which put guards around tensors and count bytes (lesson_04.py is the pattern).
   Where they run on several ranks: allow `minillm.parallel.group`, and `answer.on_ranks` (lesson_14.py is the pattern).
   Answers that an engine or the server can use: `parts=[Part(...)]`, with an adapter where the exercise asks for less
   than the engine calls (lesson_06.py is the pattern).
2. A scratch script with the builders of `notebook.py` (`md`, `code`, `task`, `check_cell`, `write`) makes
   `solutions/NN_topic.ipynb`; throw the script away. Cells: a setup cell with `from minillm.course import check`;
   for each task a Markdown cell, a `task` cell (typed signature, docstring with shapes, units, approach, hint; 3 to 30
   lines between the markers, inside the function), a `check_cell`. A cell that uses answers wraps them in
   `with needs("NN.3"):` and carries the tag `demo`, so that the grader does not run it. Code outside `demo` cells may
   import torch and the modules in `Lesson.allow`, nothing else of minillm.
3. `python -m minillm.course.exercises`, and commit both notebooks.
4. `mutants/lesson_NN/name.py`, five or more: a docstring that names the error, `TASK`, `POINTS` (what it must get),
   `HINT` (text that must be printed), and the wrong answer under the task's name. Aim one mutant at each typical error.
5. `pytest tests/test_course_*.py -k NN`; `minillm grade NN --dir solutions` must give all points.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minillm.course.checks import check, needs

__all__ = ["check", "needs"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from minillm.course import checks

        return getattr(checks, name)
    raise AttributeError(f"module 'minillm.course' has no attribute {name!r}")
