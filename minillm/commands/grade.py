"""`minillm grade`: points, what failed, and what to do next; a table for a class."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from minillm.commands import command


def add_parser(sub: Any) -> None:
    parser = command(
        sub,
        "grade",
        "Score exercise notebooks. Each runs in a process of its own with limits on time, memory and network.",
        "minillm grade 00 --verbose\n         minillm grade --dir submissions --csv class.csv",
    )
    parser.add_argument("lesson", nargs="*", metavar="NN", help="only these lessons, such as 00 (default: all)")
    parser.add_argument(
        "--dir", default="exercises", help="a folder of notebooks, or of students' folders (default: exercises)"
    )
    parser.add_argument("--csv", metavar="FILE", help="also write one row for each student and lesson")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="seconds for one notebook (default: %(default)g)"
    )
    parser.add_argument(
        "--memory", type=int, default=3072, metavar="MIB", help="memory for one notebook in MiB (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="notebooks graded at once (default: 1)")
    parser.add_argument("-v", "--verbose", action="store_true", help="show every failed case with its hint")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from minillm.course.grade import Graded, grade_folder
    from minillm.course.scores import report_text, write_csv
    from minillm.course.session import Limits
    from minillm.errors import MinillmError

    if not 0 < args.timeout <= 86400:
        raise MinillmError(f"--timeout must be above 0 and at most 86400 seconds, got {args.timeout:g}")
    if args.memory < 256:
        raise MinillmError(f"--memory must be at least 256 MiB, since torch alone needs that, got {args.memory}")
    if args.jobs < 1:
        raise MinillmError(f"--jobs must be at least 1, got {args.jobs}")

    def progress(graded: Graded) -> None:
        if sys.stderr.isatty():
            who = f"{graded.student} " if graded.student else ""
            print(f"graded {who}{graded.lesson}: {graded.points:g} of {graded.possible:g}", file=sys.stderr)

    limits = Limits(total_s=args.timeout, cell_s=min(20.0, args.timeout), memory_mb=args.memory)
    report = grade_folder(Path(args.dir), args.lesson, limits, args.jobs, progress)
    if args.csv:
        write_csv(report, args.csv)
    print(json.dumps(report.as_dict(), indent=1) if args.json else report_text(report, args.verbose))
    return 0
