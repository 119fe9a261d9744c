"""`minillm course`: execute the lessons, write the exercises, export an nbgrader course."""

from __future__ import annotations

import argparse
import json
from typing import Any

from minillm.commands import command


def add_parser(sub: Any) -> None:
    from minillm.course import execute, exercises

    parser = command(
        sub,
        "course",
        "For authors and instructors: execute the lessons, write the exercises, export an nbgrader course.",
        "minillm course run 00 --check\n         minillm course export-nbgrader ../minillm-course",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    action = _action(actions, "run", "Execute lessons from a fresh kernel and save them.", "minillm course run 00")
    execute.add_arguments(action)
    action.set_defaults(act=run_lessons)

    action = _action(
        actions,
        "exercises",
        "Write exercises/ from solutions/. Answers written into exercises/ are overwritten.",
        "minillm course exercises --check",
    )
    exercises.add_arguments(action)
    action.set_defaults(act=write_exercises)

    action = _action(
        actions,
        "export-nbgrader",
        "Write an nbgrader course with every exercise.",
        "minillm course export-nbgrader ../minillm-course",
    )
    action.add_argument("folder", metavar="DIR", help="a folder that does not exist yet, or is empty")
    action.add_argument("--solutions", default="solutions", help="where the answers are (default: %(default)s)")
    action.set_defaults(act=export_nbgrader)
    parser.set_defaults(run=run)


def _action(actions: Any, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=summary, description=summary, epilog=f"example: {example}"
    )
    # No default of its own: `course --json run` counts as well as `course run --json`.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    code: int = args.act(args)
    return code


def run_lessons(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from minillm.course.execute import failed, from_arguments

    runs = from_arguments(args, (lambda text: None) if args.json else (lambda text: print(text, flush=True)))
    if args.json:
        print(json.dumps({"lessons": [asdict(r) for r in runs]}, indent=1))
    return failed(runs)


def write_exercises(args: argparse.Namespace) -> int:
    from minillm.course.exercises import from_arguments, report

    differ = from_arguments(args)
    if args.json:
        print(json.dumps({"differ" if args.check else "written": differ}))
        return 1 if args.check and differ else 0
    return report(differ, check=args.check)


def export_nbgrader(args: argparse.Namespace) -> int:
    from pathlib import Path

    from minillm.course.nbgrader import export

    names = export(Path(args.folder), Path(args.solutions))
    if args.json:
        print(json.dumps({"folder": args.folder, "assignments": names}))
        return 0
    print(f"{args.folder}: {', '.join(names)}")
    print(f"next: cd {args.folder} && nbgrader generate_assignment {names[0]}")
    return 0
