"""`minillm bench`: predict, measure and record one step of the ladder."""

from __future__ import annotations

from typing import Any

from minillm.bench.main import add_arguments, run
from minillm.commands import command


def add_parser(sub: Any) -> None:
    parser = command(
        sub, "bench", "Predict, measure and record one step of the ladder.", "minillm bench single --peer transformers"
    )
    add_arguments(parser)
    parser.set_defaults(run=run)
