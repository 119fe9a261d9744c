"""Run every lesson from a fresh kernel, and save what it showed in a form that does not change by itself.

`python -m minillm.course.execute [NN ...]` (`make course`) runs and saves; `--check` saves nothing and also fails where
an untagged cell now shows another text than the committed one. Volatile metadata is dropped, widget ids are made
stable. The network is not needed. Tooling of all lessons.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm.cli import answer
from minillm.course import notebook as nbk
from minillm.errors import MinillmError

SLOW_S = 90.0  # a lesson should take less than this on two cores
START_S, OUTPUT_S = 180, 60  # for a kernel, and for what an ended cell showed: a busy machine may need long
# Nothing of the surroundings belongs into a lesson's output: no warnings, no look-ups, no start-up files of the user.
QUIET = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false", "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    "PYTHONWARNINGS": "ignore", "JUPYTER_PLATFORM_DIRS": "1", "COLUMNS": "120", "NO_COLOR": "1",
}  # fmt: skip


@dataclass
class Run:
    """How one lesson went. `failure` is empty when every cell ran."""

    path: str
    cells: int
    seconds: float = 0.0
    failure: str = ""
    changes: list[str] = field(default_factory=list)  # with `check`: cells whose text is no longer the committed one


def execute(path: Path, *, check: bool = False, cell_timeout: float = 300.0) -> Run:
    """Execute one notebook; unless `check`, write it back when every cell ran."""
    before = nbk.read(path)
    run = Run(str(path), len(nbk.code_cells(before)))
    started = time.perf_counter()
    after, run.failure = _run(nbk.cleared(before), path, cell_timeout)
    run.seconds = time.perf_counter() - started
    if run.failure:
        return run
    after = normal(after, path.stem)
    if check:
        run.changes = changes(before, after)
    else:
        nbk.write(path, after)
    return run


def _run(nb: nbk.Notebook, path: Path, cell_timeout: float) -> tuple[nbk.Notebook, str]:
    """The executed notebook, or what failed."""
    try:
        import nbformat
        from nbclient import NotebookClient
        from nbclient.exceptions import CellControlSignal, CellExecutionError, CellTimeoutError, DeadKernelError
    except ImportError as error:
        raise MinillmError(f"{error.name} is missing; install the lab extra: pip install 'minillm[lab]'") from None
    node = nbformat.reads(nbk.dumps(nb), as_version=4)
    client = NotebookClient(
        node, timeout=cell_timeout, kernel_name="python3", record_timing=False, coalesce_streams=True,
        startup_timeout=START_S, iopub_timeout=OUTPUT_S, raise_on_iopub_timeout=True,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(path.resolve().parent)}},
    )  # fmt: skip
    at: dict[str, int] = {"cell": -1}
    client.on_cell_execute = lambda cell, cell_index: at.update(cell=cell_index)
    with tempfile.TemporaryDirectory(prefix="minillm-course-") as scratch, _environment({"IPYTHONDIR": scratch}):
        try:
            client.execute()
        except CellTimeoutError as error:
            what, limit = ("show what it printed", OUTPUT_S) if "IOPub" in str(error) else ("end", cell_timeout)
            return nb, _failure(nb, at["cell"], f"it did not {what} within {limit:g} s")
        except DeadKernelError:
            return nb, _failure(nb, at["cell"], "the kernel died (out of memory, or a crash)")
        except CellExecutionError as error:
            trace = re.sub(r"\x1b\[[0-9;]*m", "", error.traceback).strip().splitlines()
            return nb, _failure(nb, at["cell"], f"{error.ename}: {error.evalue}", trace[-12:])
        except CellControlSignal as error:
            return nb, _failure(nb, at["cell"], str(error))
    return json.loads(json.dumps(node)), ""  # unlike nbformat.writes, this keeps the order of the widgets


@contextlib.contextmanager
def _environment(own: dict[str, str]) -> Iterator[None]:
    """The kernel inherits this process's environment."""
    before = dict(os.environ)
    os.environ.update(QUIET | own)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _failure(nb: nbk.Notebook, index: int, what: str, trace: Sequence[str] = ()) -> str:
    cell = nb["cells"][index]
    lines = [f"cell {cell.get('id')} failed: {what}", "", *("    " + ln for ln in nbk.source(cell).splitlines())]
    return "\n".join([*lines, "", *("    " + ln for ln in trace)] if trace else lines)


# A form that does not change by itself


def normal(nb: nbk.Notebook, name: str) -> nbk.Notebook:
    """A copy without timestamps, versions and random ids."""
    nb = json.loads(stable_widgets(json.dumps(nb), nb.get("metadata", {}).get("widgets", {}), name))
    widgets = nb["metadata"].get("widgets")
    nb["metadata"] = {"kernelspec": dict(nbk.KERNELSPEC), "language_info": {"name": "python"}}
    if widgets and widgets.get(nbk.WIDGET_STATE, {}).get("state"):
        nb["metadata"]["widgets"] = widgets
    for cell in nb["cells"]:
        cell.get("metadata", {}).pop("execution", None)
        if cell.get("cell_type") == "code":
            cell["outputs"] = merged(cell["outputs"])
    return nb


def stable_widgets(text: str, widgets: dict[str, Any], name: str) -> str:
    """Widget ids are random in every run; give the n-th widget of a lesson always the same one."""
    state = widgets.get(nbk.WIDGET_STATE, {}).get("state", {})
    for n, old in enumerate(state):
        text = text.replace(old, nbk.stable_hex(name, "widget", n))
    return re.sub(r'("msg_id": )"[^"]*"', r'\1""', text)


def merged(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring prints as one: where a kernel cuts them depends on its timing."""
    out: list[dict[str, Any]] = []
    for output in outputs:
        last = out[-1] if out else {}
        if output.get("output_type") == "stream" == last.get("output_type") and output["name"] == last["name"]:
            last["text"] = _joined(last["text"]) + _joined(output["text"])
        else:
            out.append(output)
    return out


def _joined(text: Any) -> str:
    return "".join(text) if isinstance(text, list) else str(text)


def changes(before: nbk.Notebook, after: nbk.Notebook) -> list[str]:
    """Ids of cells that show another text than before, beside those that may (wall-clock numbers, widgets)."""
    return [
        str(old.get("id"))
        for old, new in zip(nbk.code_cells(before), nbk.code_cells(after), strict=True)
        if nbk.IGNORE_OUTPUT not in nbk.tags(old) and _texts(old) != _texts(new)
    ]


def _texts(cell: nbk.Cell) -> list[str]:
    shown = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in merged(cell.get("outputs", []))]
    return [_joined(text).rstrip() for text in shown]


# All lessons


def lessons(folder: Path, numbers: Sequence[str] = ()) -> list[Path]:
    """The notebooks of `folder` in order, or those with the given numbers."""
    if not folder.is_dir():
        raise MinillmError(f"there is no folder {folder}; run in the course's root, or give --dir")
    paths = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    known = {p.name[:2] for p in paths}
    if unknown := [n for n in numbers if n not in known]:
        raise MinillmError(f"{folder} has no lesson {', '.join(unknown)}; it has {', '.join(sorted(known)) or 'none'}")
    chosen = [p for p in paths if not numbers or p.name[:2] in numbers]
    if not chosen:
        raise MinillmError(f"{folder} holds no lesson (NN_topic.ipynb)")
    return chosen


def run_all(paths: Sequence[Path], *, check: bool, cell_timeout: float, say: Callable[[str], None]) -> list[Run]:
    """Execute `paths` one after another, saying how each went."""
    runs = []
    for path in paths:
        run = execute(path, check=check, cell_timeout=cell_timeout)
        verdict = "FAILED" if run.failure or run.changes else "ok" if run.seconds < SLOW_S else f"ok, over {SLOW_S:g} s"
        say(f"{path.stem:<24}{run.cells:>4} cells {run.seconds:>7.1f} s  {verdict}")
        if run.failure:
            say(run.failure)
        if run.changes:
            say(f"shows another text than the committed one in: {', '.join(run.changes)}")
        runs.append(run)
    return runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lesson", nargs="*", metavar="NN", help="only these lessons, such as 00 (default: all)")
    parser.add_argument("--dir", default="notebooks", help="where the lessons are (default: notebooks)")
    parser.add_argument("--check", action="store_true", help="save nothing; fail where a lesson shows another text")
    parser.add_argument("--cell-timeout", type=float, default=300.0, metavar="S", help="seconds for one cell")


def from_arguments(args: argparse.Namespace, say: Callable[[str], None]) -> list[Run]:
    paths = lessons(Path(args.dir), args.lesson)
    return run_all(paths, check=args.check, cell_timeout=args.cell_timeout, say=say)


def failed(runs: Sequence[Run]) -> int:
    return 1 if any(run.failure or run.changes for run in runs) else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m minillm.course.execute", description="Execute the lessons from a fresh kernel.",
        epilog="example: python -m minillm.course.execute 00 --check",
    )  # fmt: skip
    add_arguments(parser)
    args = parser.parse_args(argv)
    return answer(lambda: failed(from_arguments(args, lambda text: print(text, flush=True))))


if __name__ == "__main__":
    raise SystemExit(main())
