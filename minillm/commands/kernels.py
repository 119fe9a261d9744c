"""`minillm kernels check`: what the compiler makes of every kernel, for GPUs that need not be here."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minillm.commands import command

if TYPE_CHECKING:
    from minillm.kernels.survey import Row


def add_parser(sub: Any) -> None:
    parser = command(
        sub,
        "kernels",
        "Compile every Triton kernel for several GPUs, none of which need be here, and check the code.",
        "minillm kernels check --kernel rms_norm --target sm_90",
    )
    parser.add_argument(
        "action", choices=("check",), help="check: compile, count, apply the gates; exit 1 if one fails"
    )
    parser.add_argument(
        "--kernel", action="append", default=[], metavar="NAME", help="only this module of kernels/; may be repeated"
    )
    parser.add_argument(
        "--target", action="append", default=[], metavar="NAME", help="sm_80, sm_90, sm_100 or gfx942; may be repeated"
    )
    parser.add_argument("--jobs", type=int, default=None, help="processes that compile (default: one a core)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from minillm.device import expect_triton
    from minillm.errors import MinillmError

    if args.jobs is not None and not 1 <= args.jobs <= 1024:
        raise MinillmError(f"--jobs must be a whole number from 1 to 1024, got {args.jobs}")
    expect_triton("a machine that has it; no GPU is needed")
    from minillm.kernels import survey

    quiet = args.json or not sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        if not quiet:
            print(f"\r{done} of {total} variants", end="" if done < total else "\n", file=sys.stderr, flush=True)

    rows = survey.check(args.kernel, args.target, args.jobs, progress)
    failed = sum(not row.passed for row in rows)
    if args.json:
        print(json.dumps({"rows": [survey.to_dict(row) for row in rows], "failed": failed}))
    else:
        print(table(rows))
    return 1 if failed else 0


HEAD = ("variant", "target", "regs", "stack", "spills", "shared", "matrix", "ahead", "16 B", "64 bit", "local", "")


def table(rows: Sequence[Row]) -> str:
    """Counts as text, then every failure in words, then the exceptions that were made and how often."""
    lines = [HEAD, *(_line(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    left = (0, 1, 6, 7, 8, 11)
    text = [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip()
        for line in lines
    ]
    failures = [(row, v) for row in rows for v in row.verdicts if v.passed is False]
    reasons: dict[str, int] = {}
    for row in rows:
        for v in row.verdicts:
            if v.passed is None:
                reasons[f"{v.gate}: {_reason(v.found)}"] = reasons.get(f"{v.gate}: {_reason(v.found)}", 0) + 1
    text += ["", "matrix: instructions by kind. ahead: asynchronous copies (in loops: tiles that are loaded early)."]
    text += ["16 B: loads and stores of at least 16 bytes, of all. 64 bit: integer products so wide, too narrow ones."]
    if reasons:
        text += ["", "Exceptions:", *(f"  {n:>4} x {reason}" for reason, n in sorted(reasons.items()))]
    text += [""]
    text += [f"FAIL  {_name(row)}: {v}" for row, v in failures]
    bad = len({id(row) for row, _ in failures})
    text += [f"{len(rows)} variants, {bad} fail" if bad else f"{len(rows)} variants, every gate holds"]
    return "\n".join(text)


def _reason(found: str) -> str:
    """An exception without its numbers, so that equal ones are counted together."""
    return found.rpartition("; ")[2]


def _name(row: Row) -> str:
    v = row.variant
    return f"{v.case} on {v.target}, {'aligned' if v.aligned else 'misaligned'}"


def _line(row: Row) -> tuple[str, ...]:
    v, code = row.variant, row.code
    name = (f"{v.module}: {v.case}" if v.module not in v.case else v.case) + ("" if v.aligned else " (misaligned)")
    verdict = "ok" if row.passed else "FAIL"
    if code is None:
        return (name, v.target, *[""] * 9, verdict)
    unknown = lambda n: "?" if n is None else str(n)
    counts = lambda kinds: ", ".join(f"{kind} {n}" for kind, n in kinds.items() if n) or "-"
    ahead = counts(code.copies)
    if code.loops:
        ahead += f" (in loops: {code.loop_copies + code.loop_stages})"
    products = f"{code.products64}" + (f", narrow {len(code.narrow)}" if code.narrow else "")
    wide = f"{code.loads16}/{code.loads} {code.stores16}/{code.stores}"
    return (
        name, v.target, unknown(code.registers), unknown(code.stack), unknown(code.spills), str(code.shared),
        counts(code.matrix), ahead, wide, products, str(code.local), verdict,
    )  # fmt: skip
