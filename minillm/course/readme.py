"""Renews what README shows from the records: the numbers beside their comments, and the picture of the ladder.

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
    """What README shows that the records do not give."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    found = [] if evidence.sync(text) == text else ["README.md shows a number that its record does not give"]
    if stamp(folder) != evidence.load(RECORD)["hash"]:
        found.append(f"{PICTURE} was not drawn from the committed record {RECORD}")
    return found


def renew(folder: Path) -> None:
    readme = folder / "README.md"
    readme.write_text(evidence.sync(readme.read_text(encoding="utf-8")), encoding="utf-8")
    record = evidence.load(RECORD)
    (folder / PICTURE).parent.mkdir(exist_ok=True)
    ladder_figure(record).savefig(folder / PICTURE, metadata={"Software": None, "Comment": record["hash"]})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m minillm.course.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when README is stale")
    args = parser.parse_args()
    if not args.check:
        renew(root())
    found = faults(root())
    print("\n".join(found) or "README shows what the records give")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
