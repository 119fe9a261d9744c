"""What a committed lesson must be: executed, in order, quiet, reproducible, and without numbers typed by hand.

`faults(nb)` lists every offence in words that say what to do. nbval re-runs the lessons and compares outputs; this
catches what it lets pass (an unexecuted notebook passes it). Tooling of all lessons.

Numbers. A time, rate, bandwidth, speed-up or share of a roof in Markdown is refused, because prose does not follow the
machine: print it in a code cell, or take it from a record. Display formulas (`$$ ... $$`) are free. A number that the
text assumes rather than measures is listed, word for word, in the cell's metadata:
`{"minillm": {"given": ["2 TB/s", "70 ms"]}}`. `python -m minillm.course.guard FILE` prints what is wrong with a lesson.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minillm.course import notebook as nbk
from minillm.errors import MinillmError

MOST_BYTES = 100_000
_PER_SECOND = r"(?:\s?/\s?s(?:ec)?|\s(?:per|a)\ssecond|ps)"
_UNITS = "|".join([
    r"(?:nano|micro|milli)?seconds?", r"minutes?", r"hours?", r"[nuµμm]?s(?:ecs?)?", "min",
    rf"(?:[kKMGTP]i?)?(?:B|b|bytes?|bits?){_PER_SECOND}", rf"[kKMGTPE]?FLOPs?{_PER_SECOND}", r"[kKMGTPE]FLOPS",
    rf"(?:tok|tokens?|req|requests?|steps?|calls?|launches|rows|samples){_PER_SECOND}", "毫秒|微秒|纳秒|秒|分钟",
])  # fmt: skip
_NUMBER = r"(?<![\w.^-])\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?"
MEASURED = [
    re.compile(rf"{_NUMBER}[ -]?(?:{_UNITS})(?![\w/])"),
    re.compile(rf"{_NUMBER}\s?(?:x|×|times)\s(?:as\s)?(?:fast|slow|quick|high|much|more|less|the\s(?:speed|throughput|rate))"),
    re.compile(rf"{_NUMBER}\s?(?:%|per\s?cent)\sof\s(?:\w+\s){{0,2}}(?:roof|peak|bandwidth|bound|ceiling|limit)"),
]  # fmt: skip
_YEARS = re.compile(r"\b(?:19|20)\d0s\b")
_HEADER_UNIT = re.compile(rf"(?:^|[\s(,])(?:{_UNITS})\)?$")
_CLOCK = re.compile(r"perf_counter|timeit|\btime\b|timer|timed|measure|bench|ceiling|elapsed|interact|widget", re.I)
_PATHS = re.compile(r"(?:/home/|/Users/|/root/|/tmp/|[A-Za-z]:\\\\?Users\\)[^\s\"']*")
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}")
_RANDOM_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){0,3}(?:-[0-9a-f]{12})?")


def faults(nb: nbk.Notebook, own_paths: tuple[str, ...] | None = None) -> list[str]:
    """Every offence of a notebook, each beginning with the cell's id. Empty when it may be committed."""
    own = (str(Path.home()), str(Path(__file__).resolve().parents[2])) if own_paths is None else own_paths
    return [*_ids(nb), *_order(nb), *(fault for cell in nb["cells"] for fault in _cell(cell, own))]


def _ids(nb: nbk.Notebook) -> Iterator[str]:
    seen: set[str] = set()
    for position, cell in enumerate(nb["cells"]):
        cell_id = cell.get("id")
        if not cell_id:
            yield f"cell {position} has no id; nbformat 4.5 needs one in every cell"
        elif cell_id in seen:
            yield f"{cell_id}: the id occurs twice"
        elif _RANDOM_ID.fullmatch(str(cell_id)):
            yield f"{cell_id}: the id is random; name the cell, such as 'predict-1', so that diffs stay readable"
        seen.add(str(cell_id))


def _order(nb: nbk.Notebook) -> Iterator[str]:
    for expected, cell in enumerate(nbk.code_cells(nb), 1):
        count, name = cell.get("execution_count"), cell.get("id")
        if not nbk.source(cell).strip():
            yield f"{name}: the code cell is empty"
        elif count is None:
            yield f"{name}: never executed; run python -m minillm.course.execute"
        elif count != expected:
            yield f"{name}: executed as number {count}, expected {expected}; run all cells from a fresh kernel"


def _cell(cell: nbk.Cell, own: tuple[str, ...]) -> Iterator[str]:
    name = cell.get("id")
    if cell.get("cell_type") == "markdown":
        for found in typed_numbers(cell):
            yield f"{name}: {found}"
        return
    if cell.get("cell_type") != "code":
        yield f"{name}: a {cell.get('cell_type')} cell; use Markdown or code"
        return
    lines = [ln for ln in nbk.source(cell).splitlines() if ln.strip() and not ln.strip().startswith("#")]
    if lines and lines[-1].rstrip().endswith(";"):
        yield f"{name}: ends in ';', which hides an output in Jupyter and fails under nbval"
    for output in cell.get("outputs", []):
        yield from (f"{name}: {fault}" for fault in _output(output, own))
    yield from (f"{name}: {fault}" for fault in _tags(cell))


def _output(output: dict[str, Any], own: tuple[str, ...]) -> Iterator[str]:
    if output.get("output_type") == "error":
        yield f"an error is committed: {output.get('ename')}"
    if output.get("name") == "stderr":
        yield f"prints to stderr: {_text(output.get('text', ''))[:60]!r}"
    if (size := len(json.dumps(output))) > MOST_BYTES:
        yield f"an output has {size} bytes, more than {MOST_BYTES}; print less, or a smaller picture"
    words = readable(output)
    if found := _PATHS.search(words) or next((re.search(re.escape(p), words) for p in own if p and p in words), None):
        yield f"an output names a path of this machine: {found[0]}"
    if found := _ADDRESS.search(words):
        yield f"an output holds a memory address, new in every run: {found[0]}"


def readable(output: dict[str, Any]) -> str:
    """The text of an output, without the bytes of pictures."""
    parts = [_text(output.get("text", ""))]
    parts += [_text(v) for mime, v in output.get("data", {}).items() if not mime.startswith("image/")]
    return "\n".join(parts)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def has_widget(cell: nbk.Cell) -> bool:
    return any(nbk.WIDGET_VIEW in output.get("data", {}) for output in cell.get("outputs", []))


def _tags(cell: nbk.Cell) -> Iterator[str]:
    tags = nbk.tags(cell)
    for tag in tags:
        if tag != nbk.IGNORE_OUTPUT and (tag.startswith("nbval") or tag in ("raises-exception", "skip-execution")):
            yield f"the tag {tag} takes a cell out of testing; only {nbk.IGNORE_OUTPUT} is allowed"
    ignored = nbk.IGNORE_OUTPUT in tags
    if has_widget(cell) and not ignored:
        yield f"shows a live widget, so it needs the tag {nbk.IGNORE_OUTPUT}"
    if ignored and not has_widget(cell) and cell.get("execution_count") is not None:
        shown = "\n".join(readable(output) for output in cell.get("outputs", []))
        if not (_CLOCK.search(nbk.source(cell)) or any(p.search(shown) for p in MEASURED)):
            yield f"carries {nbk.IGNORE_OUTPUT} but shows neither wall-clock numbers nor a widget; drop the tag"


# Numbers typed into prose


def typed_numbers(cell: nbk.Cell) -> Iterator[str]:
    given = cell.get("metadata", {}).get("minillm", {}).get("given", [])
    if not (isinstance(given, list) and all(isinstance(g, str) and re.search(r"\d", g) for g in given)):
        yield f'"given" must list the numbers as they stand in the text, such as ["2 TB/s"], not {given!r}'
        given = []
    text = plain(nbk.source(cell))
    for number in map(plain, given):
        if number not in text:
            yield f"metadata lists {number!r} as given, but the text does not say it"
        text = re.sub(rf"(?<![\w.]){re.escape(number)}(?!\w)", " ", text)
    text = _YEARS.sub(" ", text)
    typed = [found[0] for pattern in MEASURED for found in pattern.finditer(text)]
    typed += [value for _, value in _table_numbers(text)]
    if typed:
        listed = json.dumps([*given, *dict.fromkeys(typed)], ensure_ascii=False)
        yield (
            f"{', '.join(map(repr, typed))} typed into prose: print what is measured; what the text assumes goes into "
            f'the metadata, {{"minillm": {{"given": {listed}}}}}'
        )


def plain(text: str) -> str:
    """Markdown as words: display formulas cut out; emphasis, code marks, tags and LaTeX spacing taken off."""
    text = re.sub(r"\$\$.*?\$\$", " ", text, flags=re.S)
    text = re.sub(r"</?[a-zA-Z][^>]*>|&nbsp;|[\u00a0\u2009\u202f]", " ", text)
    text = re.sub(r"\\(?:text|mathrm|mathsf|operatorname)\b|\\[,;:! ]|\{,\}|(?<=\d)~", " ", text)
    text = re.sub(r"[*`${}\\]|(?<!\w)_|_(?!\w)", "", text)
    return re.sub(r"[ \t]+", " ", text)


def _table_numbers(text: str) -> Iterator[tuple[str, str]]:
    """(header, number) for each number in a table column whose header names a unit of time or rate."""
    header: list[str] = []
    for line in text.splitlines():
        cells = [c.strip() for c in line.strip().strip("|").split("|")] if line.strip().startswith("|") else []
        if not cells:
            header = []
        elif not header:
            header = cells
        else:
            for name, value in zip(header, cells):
                if _HEADER_UNIT.search(name) and re.match(r"[~≈]?\s?\d", value):
                    yield name, value


def main(paths: list[str]) -> int:
    bad = 0
    for path in paths:
        try:
            found = faults(nbk.read(path))
        except MinillmError as error:
            found = [str(error)]
        bad += bool(found)
        print("\n".join([f"{path}: {'' if found else 'in order'}", *(f"  {fault}" for fault in found)]))
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
