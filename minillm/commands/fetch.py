"""`minillm fetch`: get a model once; afterwards everything works offline."""

from __future__ import annotations

import argparse
import json
from typing import Any

from minillm.commands import command


def add_parser(sub: Any) -> None:
    parser = command(
        sub, "fetch", "Fetch a model into the user cache (the embedded one by default).", "minillm fetch smollm2-135m"
    )
    parser.add_argument(
        "name", nargs="?", default="smollm2-135m", help="embedded model or hub name (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from minillm.config import ModelConfig
    from minillm.models.hub import fetch

    folder = fetch(args.name, progress=not args.json)
    ModelConfig.from_folder(folder)  # a folder that holds no model is no success
    size = sum(f.stat().st_size for f in folder.iterdir() if f.is_file())
    if args.json:
        print(json.dumps({"name": args.name, "folder": str(folder), "bytes": size}))
    else:
        print(f"{args.name} is in {folder} ({size / 1e6:.0f} MB)")
    return 0
