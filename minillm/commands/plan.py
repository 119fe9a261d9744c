"""`minillm plan`: what the cost model says of a deployment before anything is bought or started. Lessons 14 and 15."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from minillm.commands import command

PLANS = ("parallel", "split")  # each in its own file: plan_parallel.py has add_parser(actions) and run(args)


def add_parser(sub: Any) -> None:
    parser = command(
        sub,
        "plan",
        "Predict which deployment serves a model best: tensor, pipeline or data parallel, together or split.",
        "minillm plan parallel --model llama-3.1-70b --device h200 --count 8 --concurrency 16 --slo tpot=0.02",
    )
    actions = parser.add_subparsers(dest="action", metavar="PLAN", required=True)
    for name in PLANS:
        importlib.import_module(f"minillm.commands.plan_{name}").add_parser(actions)
    parser.set_defaults(run=run)


def plan(actions: Any, name: str, summary: str, example: str, columns: dict[str, str]) -> argparse.ArgumentParser:
    """The parser of one plan. `plan --json NAME` counts as well as `plan NAME --json`. columns: in words."""
    table = "\n".join(f"  {key:<12} {words}" for key, words in columns.items())
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=summary, description=summary, epilog=f"the table:\n{table}\n\nexample: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    code: int = args.act(args)
    return code
