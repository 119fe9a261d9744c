"""The `minillm` command. Each subcommand lives in `minillm/commands/`, one file each.

Bad input gives one line on stderr and exit code 2, never a traceback. Nothing heavy is imported until a
subcommand runs, so `--help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

COMMANDS = (
    "doctor", "fetch", "generate", "chat", "serve", "roofline", "bench", "load", "evidence", "kernels", "grade",
    "course", "plan",
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """A parser, and its subparsers, that report a fault as every other fault is reported: one line."""

    def error(self, message: str) -> NoReturn:
        _complain(f"{message}; see {self.prog} --help")
        raise SystemExit(2)


def _complain(message: str) -> None:
    print(f"minillm: error: {' '.join(message.split())}", file=sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    from minillm import __version__

    parser = Parser(
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

    def work() -> int:
        args = build_parser().parse_args(argv)
        code: int = args.run(args)
        return code

    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character gets its number
            stream.reconfigure(errors="backslashreplace")
    return answer(work)


def answer(work: Callable[[], int]) -> int:
    """Do the work of a command line and return its exit code; a fault becomes one line on stderr.

    `minillm` and the modules that run by `python -m` all end here.
    """
    from minillm.errors import MinillmError

    try:
        code = work()
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a reader that has gone can still be told from a fault
        return code
    except BrokenPipeError:  # `minillm ... | head`: the reader has gone, which is not a fault
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MinillmError, OSError) as error:  # OSError: a disk that is full, a file that may not be read, ...
        _complain(str(error))
        return 2
    except KeyboardInterrupt:
        print("minillm: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
