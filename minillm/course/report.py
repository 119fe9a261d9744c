"""The text of a result, as a check cell and `minillm grade -v` print it. Tooling of all lessons."""

from __future__ import annotations

from minillm.course.tasks import Outcome, Result


def result_text(result: Result) -> str:
    """One line for the task, one for each case, and for a failed case: input, what was expected, why, hint."""
    task = result.task
    head = f"{task.id} {task.title}: {result.points:g} of {task.points:g} points"
    if result.note:
        return f"{head}\n  {result.note}"
    lines = [head]
    for outcome in result.outcomes:
        lines += _outcome_lines(outcome)
    return "\n".join(lines)


def _outcome_lines(outcome: Outcome) -> list[str]:
    if not outcome.problem:
        return [f"  ok    {outcome.points:g} of {outcome.possible:g}  {outcome.case}"]
    lines = [f"  fail  {outcome.points:g} of {outcome.possible:g}  {outcome.case}"]
    pairs = [("input", outcome.given), ("found", outcome.problem), ("why", outcome.why), ("hint", outcome.hint)]
    return lines + [f"        {label:<6} {text}" for label, text in pairs if text]
