"""Notebooks as plain data: read, write in one canonical form, and small helpers to build them.

The committed `.ipynb` is the only source of a lesson or a solution. These helpers exist so that an author can
write one from a scratch script, which is then thrown away, and so that every tool here writes the same bytes.
Tooling of all lessons.

    from minillm.course.notebook import check_cell, code, md, notebook, task, write
    write("solutions/04_triton_fusion.ipynb", notebook([
        md("intro", "# 04 Fusion\\n..."),
        code("setup", "import torch\\nfrom minillm.course import check, needs"),
        md("about-1", "## 04.1 ..."),
        task("04.1", "def predict() -> dict[str, float]:\\n    ..."),
        check_cell("04.1", "predict", points=2),
    ]))
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from minillm.errors import MinillmError

Cell = dict[str, Any]
Notebook = dict[str, Any]

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
IGNORE_OUTPUT = "nbval-ignore-output"  # wall-clock numbers and live widgets only
DEMO = "demo"  # a cell that shows a result: the grader does not run it


def source(cell: Cell) -> str:
    """The text of a cell; the file may hold it as one string or as a list of lines."""
    text = cell.get("source", "")
    return "".join(text) if isinstance(text, list) else str(text)


def tags(cell: Cell) -> list[str]:
    found = cell.get("metadata", {}).get("tags", [])
    return [str(tag) for tag in found] if isinstance(found, list) else []


def code_cells(nb: Notebook) -> list[Cell]:
    return [cell for cell in nb["cells"] if cell.get("cell_type") == "code"]


def read(path: str | Path) -> Notebook:
    """A notebook from disk, checked just enough that the other tools can walk over it."""
    try:
        return parse(Path(path).read_bytes(), str(path))
    except FileNotFoundError:
        raise MinillmError(f"{path} does not exist; give the path of a notebook") from None
    except OSError as error:
        raise MinillmError(f"{path} cannot be read: {error.strerror}") from None


def parse(content: bytes, path: str) -> Notebook:
    """A notebook from the bytes of the file `path`."""
    try:
        nb = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise MinillmError(f"{path} is not a notebook: it cannot be read as JSON ({error}); save it again") from None
    cells = nb.get("cells") if isinstance(nb, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise MinillmError(f"{path} is not a notebook: it holds no list of cells; save it again in JupyterLab")
    for cell in cells:
        text = cell.get("source", "")
        if not isinstance(text, str) and not (isinstance(text, list) and all(isinstance(t, str) for t in text)):
            raise MinillmError(f"{path} is not a notebook: a cell's source is not text; save it again in JupyterLab")
        if not isinstance(cell.get("metadata", {}), dict):
            raise MinillmError(f"{path} is not a notebook: a cell's metadata is not an object; save it again")
    return nb


def dumps(nb: Notebook) -> str:
    """Canonical text: sorted keys, one space, sources as lines, a final newline (nbformat's own layout)."""
    nb = json.loads(json.dumps(nb))
    for cell in nb["cells"]:
        cell["source"] = source(cell).splitlines(keepends=True)
        for output in cell.get("outputs", []):
            _split_output(output)
    return json.dumps(nb, ensure_ascii=False, indent=1, sort_keys=True, separators=(",", ": ")) + "\n"


def _split_output(output: dict[str, Any]) -> None:
    if isinstance(output.get("text"), str):
        output["text"] = output["text"].splitlines(keepends=True)
    for mime, value in output.get("data", {}).items():
        if (mime.startswith("text/") or mime == "image/svg+xml") and isinstance(value, str):
            output["data"][mime] = value.splitlines(keepends=True)


def write(path: str | Path, nb: Notebook) -> None:
    Path(path).write_text(dumps(nb), encoding="utf-8")


def cleared(nb: Notebook) -> Notebook:
    """A copy without outputs, execution counts and whatever the kernel that last ran it left behind."""
    nb = json.loads(json.dumps(nb))
    for cell in nb["cells"]:
        for key in ("collapsed", "execution", "jupyter", "scrolled"):
            cell.setdefault("metadata", {}).pop(key, None)
        if cell.get("cell_type") == "code":
            cell["outputs"], cell["execution_count"] = [], None
    nb["metadata"] = {"kernelspec": dict(KERNELSPEC), "language_info": {"name": "python"}}
    nb["nbformat"], nb["nbformat_minor"] = 4, 5
    return nb


# Building


def notebook(cells: Iterable[Cell]) -> Notebook:
    cells = list(cells)
    ids = [cell["id"] for cell in cells]
    if twice := sorted({i for i in ids if ids.count(i) > 1}):
        raise MinillmError(f"cell ids must be unique, these occur twice: {', '.join(twice)}")
    return {
        "cells": cells,
        "metadata": {"kernelspec": dict(KERNELSPEC), "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def md(cell_id: str, text: str, *, given: Iterable[str] = (), **metadata: Any) -> Cell:
    """A Markdown cell. `given=["2 TB/s"]` lists the textbook numbers in it (see `minillm.course.guard`)."""
    if given := list(given):
        metadata["minillm"] = {"given": given}
    return {"cell_type": "markdown", "id": _id(cell_id), "metadata": metadata, "source": text.strip("\n")}


def code(cell_id: str, text: str, *, tags: Iterable[str] = (), **metadata: Any) -> Cell:
    """A code cell, not executed yet."""
    if tags := list(tags):
        metadata["tags"] = tags
    return {
        "cell_type": "code", "id": _id(cell_id), "metadata": metadata, "source": text.strip("\n"),
        "outputs": [], "execution_count": None,
    }  # fmt: skip


def task(task_id: str, text: str, *, part: str = "") -> Cell:
    """The cell a learner edits: a typed signature and a solution region (see `minillm.course.exercises`)."""
    grade_id = f"task-{task_id.replace('.', '-')}{'-' + part if part else ''}"
    return code(grade_id, text, nbgrader=_nbgrader(grade_id, grade=False, solution=True, locked=False))


def check_cell(task_id: str, name: str, points: float) -> Cell:
    """The locked cell that scores task `task_id`, whose answer is the function or class `name`."""
    grade_id = f"check-{task_id.replace('.', '-')}"
    meta = _nbgrader(grade_id, grade=True, solution=False, locked=True) | {"points": points}
    return code(grade_id, f'check("{task_id}", {name})', nbgrader=meta)


def _nbgrader(grade_id: str, **flags: bool) -> dict[str, Any]:
    return {"grade_id": grade_id, "schema_version": 3, "task": False, **flags}


def _id(cell_id: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", cell_id):
        raise MinillmError(f"cell id {cell_id!r} must be lower-case letters, digits and dashes, such as 'predict-1'")
    return cell_id


def stable_hex(*parts: object) -> str:
    """32 hex digits that depend only on `parts`: ids that do not change from run to run."""
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()[:32]
