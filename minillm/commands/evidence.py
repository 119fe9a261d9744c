"""`minillm evidence`: are the committed records sound, and what do they say?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from minillm.commands import command


def add_parser(sub: Any) -> None:
    parser = command(
        sub, "evidence", "Check the records of measurements, or look a number up.", "minillm evidence check"
    )
    parser.add_argument(
        "action",
        choices=("check", "list", "show", "render"),
        help="check: verify every record; list: their names; show PATH: one number; render FILE: renew its numbers",
    )
    parser.add_argument("what", nargs="*", help="show: RECORD/KEY/FIELD; render: text files")
    parser.add_argument("--records", metavar="DIR", help="folder of the records (default: benchmarks/records)")
    parser.add_argument("--check", action="store_true", help="render: change nothing, exit 1 where a number is stale")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from minillm.errors import MinillmError
    from minillm.roofline import evidence

    folder = Path(args.records) if args.records else evidence.records_dir()
    if not folder.is_dir():
        raise MinillmError(f"{args.records or 'benchmarks/records'} is not a folder; run this in the checkout")
    if args.action in ("show", "render") and not args.what:
        raise MinillmError(f"evidence {args.action} needs {'RECORD/KEY/FIELD' if args.action == 'show' else 'files'}")
    if args.action in ("check", "list") and args.what:
        raise MinillmError(f"evidence {args.action} takes no {args.what[0]!r}")
    if args.check and args.action != "render":
        raise MinillmError(f"--check belongs to evidence render; evidence {args.action} would ignore it")
    return {"check": _check, "list": _list, "show": _show, "render": _render}[args.action](args, folder)


def _check(args: argparse.Namespace, folder: Path) -> int:
    from minillm.roofline import evidence

    names, faults = evidence.names(folder), evidence.check(folder)
    if args.json:
        print(json.dumps({"records": names, "faults": faults}))
        return 1 if faults else 0
    bad = {f["file"] for f in faults}
    for name in names:
        if f"{name}.json" not in bad:
            print(f"ok     {name}.json")
    for f in faults:
        print(f"fault  {f['file']}: {f['key'] + ' ' if f['key'] else ''}{f['message']}")
    print(f"{len(names)} records, {len(faults)} faults")
    return 1 if faults else 0


def _list(args: argparse.Namespace, folder: Path) -> int:
    from minillm.roofline import evidence

    rows = []
    for name in evidence.names(folder):
        record = evidence.load(name, folder)
        rows.append({"name": name, "device": record["device"]["name"], "measured_at": record["measured_at"]})
    print(json.dumps(rows) if args.json else "\n".join("  ".join(r.values()) for r in rows) or "no records")
    return 0


def _show(args: argparse.Namespace, folder: Path) -> int:
    from minillm.roofline import evidence

    found = {path: evidence.value(path, folder) for path in args.what}
    for shown in [found] if args.json else found.values():
        print(json.dumps(shown) if args.json or isinstance(shown, dict | list) else shown)
    return 0


def _render(args: argparse.Namespace, folder: Path) -> int:
    from minillm.errors import MinillmError
    from minillm.roofline import evidence

    stale = []
    for name in args.what:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MinillmError(f"{name} cannot be read ({error}); give a text file") from None
        fresh = evidence.sync(text, folder)
        if fresh != text:
            stale.append(name)
            if not args.check:
                Path(name).write_text(fresh, encoding="utf-8")
    if args.json:
        print(json.dumps({"stale": stale, "written": not args.check}))
    else:
        print(
            "\n".join(f"{'stale' if args.check else 'renewed'}  {name}" for name in stale) or "every number is current"
        )
    return 1 if stale and args.check else 0
