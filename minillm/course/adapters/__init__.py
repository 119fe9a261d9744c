"""From what an exercise asks for to what the engine calls: one function for each part, make(answers) -> the part.

An adapter adds what the exercise leaves out and judges what comes back, so that an error names the answer. Where an
answer is already in the engine's form there is none: see `as_it_is`. Tooling of all lessons.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minillm.course.answers import Answers

ALLOCATOR: dict[str, int | None] = {"allocate": 1, "share": 1, "free": 1, "num_free": None}


def as_it_is(task_id: str, arguments: int, **members: int | None) -> Callable[[Answers], Any]:
    """The answer itself, called with so many arguments, with these members (see `Answers.take`)."""
    return lambda answers: answers.take(task_id, arguments, **members)
