"""The `minillm` command. Each subcommand lives in `minillm/commands/`, one file each.

Bad input gives one line on stderr and exit code 2, never a traceback. Nothing heavy is imported until a
subcommand runs, so `--help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = ("doctor", "fetch", "generate", "chat", "roofline", "bench", "evidence", "grade", "course")


def build_parser() -> argparse.ArgumentParser:
    from minillm import __version__

    parser = argparse.ArgumentParser(
        prog="minillm",
        description="An LLM inference engine and the course that builds it.",
        epilog='example: minillm generate "What is the capital of France?" --max-tokens 16',
    )
    parser.add_argument("--version", action="version", version=f"minillm {__version__}")
    sub = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"minillm.commands.{name}").add_parser(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 a check failed, 2 bad input, 130 interrupted."""
    from minillm.errors import MinillmError

    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except MinillmError as error:
        print(f"minillm: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("minillm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `minillm ... | head`: the reader has gone, which is not a fault
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
