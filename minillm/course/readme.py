"""Renews what README and docs/peers.md show from the records: numbers beside their comments, the picture of the ladder.

python -m minillm.course.readme [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from minillm.course.lab import root
from minillm.roofline import evidence

RECORD = "ladder-cpu"
PICTURE = Path("docs") / "ladder.png"
TEXTS = ("README.md", "docs/peers.md")  # every number with a unit in them stands beside its record


def ladder_figure(record: dict[str, Any]) -> Any:
    """Time of a step on the first two rungs against context, from a record of `minillm bench ladder`."""
    from minillm.viz.kv import growth_figure

    results, predictions = record["results"], record["predictions"]
    contexts = sorted(int(key.removeprefix("naive_")) for key in results if key.startswith("naive_"))
    expected = lambda rung: [predictions[f"{rung}_{c}"]["prediction"]["expected"] for c in contexts]
    measured = lambda rung: {c: results[f"{rung}_{c}"]["median"] for c in contexts}
    return growth_figure(contexts, expected("naive"), expected("decode"), measured("naive"), measured("decode"))


def stamp(folder: Path) -> str | None:
    """The hash of the record that the committed picture was drawn from."""
    from PIL import Image

    path = folder / PICTURE
    return Image.open(path).info.get("Comment") if path.is_file() else None


def faults(folder: Path) -> list[str]:
    """What these texts show that the records do not give."""
    found = []
    for name in TEXTS:
        text = (folder / name).read_text(encoding="utf-8")
        if evidence.sync(text) != text:
            found.append(f"{name} shows a number that its record does not give")
    if stamp(folder) != evidence.load(RECORD)["hash"]:
        found.append(f"{PICTURE} was not drawn from the committed record {RECORD}")
    return found


def renew(folder: Path) -> None:
    for name in TEXTS:
        path = folder / name
        path.write_text(evidence.sync(path.read_text(encoding="utf-8")), encoding="utf-8")
    record = evidence.load(RECORD)
    (folder / PICTURE).parent.mkdir(exist_ok=True)
    ladder_figure(record).savefig(folder / PICTURE, metadata={"Software": None, "Comment": record["hash"]})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m minillm.course.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a text is stale")
    args = parser.parse_args()
    if not args.check:
        renew(root())
    found = faults(root())
    print("\n".join(found) or f"{' and '.join(TEXTS)} show what the records give")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
