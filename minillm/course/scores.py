"""What `minillm grade` prints and writes: a learner's list, a class table, CSV. Tooling of all lessons."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from minillm.course.grade import Graded, Report, open_command
from minillm.course.report import result_text
from minillm.errors import MinillmError


def report_text(report: Report, verbose: bool = False) -> str:
    return class_text(report, verbose) if report.is_class else learner_text(report, verbose)


def learner_text(report: Report, verbose: bool = False) -> str:
    """Every task with its points, the problems of each file, and what to do next."""
    lines: list[str] = []
    for graded in report.notebooks:
        lines += [*notebook_lines(graded, verbose), ""]
    lines.append(f"{report.points:g} of {report.possible:g} points")
    if upcoming := report.next_task():
        graded, result = upcoming
        lines.append(f"next: task {result.task.id}, {result.task.title}: {open_command(graded.file)}")
    else:
        lines.append("nothing left to do here")
    lost = any(result.status in ("none", "partial") for graded in report.notebooks for result in graded.results)
    if lost and not verbose:
        lines.append("why points were lost: run the task's check cell, or minillm grade --verbose")
    return "\n".join(lines)


def notebook_lines(graded: Graded, verbose: bool) -> list[str]:
    lines = [f"{graded.file}  sha256 {graded.sha256[:16] or '-'}"]
    lines += [f"  problem: {problem}" for problem in graded.problems]
    for result in graded.results:
        score = f"{result.points:>4g} of {result.task.points:<4g}"
        note = f"  {result.note}" if result.status == "missing" else ""
        lines.append(f"  {result.task.id}  {score} {result.status:<14} {result.task.title}{note}")
        if verbose and result.status in ("none", "partial"):
            lines += ["      " + line for line in result_text(result).splitlines()[1:]]
    return lines


def class_text(report: Report, verbose: bool = False) -> str:
    """One row for each student, one column for each lesson, the total, and then every problem by file."""
    lessons = sorted({g.lesson for g in report.notebooks})
    students = list(dict.fromkeys(g.student for g in report.notebooks))
    possible = {n: next(g.possible for g in report.notebooks if g.lesson == n) for n in lessons}
    width = max(7, *(len(s) for s in students))
    rows = [f"{'student':<{width}}" + "".join(f"{n:>8}" for n in lessons) + f"{'total':>8}"]
    for student in students:
        mine = {g.lesson: g for g in report.notebooks if g.student == student}
        cells = "".join(f"{mine[n].points:>8g}" if mine[n].sha256 else f"{'-':>8}" for n in lessons)
        rows.append(f"{student:<{width}}{cells}{sum(g.points for g in mine.values()):>8g}")
    rows.append(f"{'of':<{width}}" + "".join(f"{possible[n]:>8g}" for n in lessons) + f"{sum(possible.values()):>8g}")
    for graded in report.notebooks:
        if verbose and graded.sha256:
            rows += ["", *notebook_lines(graded, verbose)]
        elif graded.file:
            rows += [f"{graded.file}: {problem}" for problem in graded.problems]
    return "\n".join(rows)


COLUMNS = ("student", "lesson", "file", "sha256", "points", "possible", "tasks_full", "tasks_attempted", "problems")


def csv_text(report: Report) -> str:
    """One row for each student and lesson."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for g in report.notebooks:
        statuses = [r.status for r in g.results]
        full, attempted = statuses.count("full"), sum(s not in ("not attempted", "missing") for s in statuses)
        row = [g.student, g.lesson, g.file, g.sha256, g.points, g.possible, full, attempted, "; ".join(g.problems)]
        writer.writerow([_safe(value) for value in row])
    return out.getvalue()


def _safe(value: object) -> object:
    """A spreadsheet must not run a student's text as a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value


def write_csv(report: Report, path: str) -> None:
    try:
        Path(path).write_text(csv_text(report), encoding="utf-8")
    except OSError as error:
        raise MinillmError(f"cannot write {path}: {error.strerror}; give a file in a folder that exists") from None
