"""Lessons are executed from a fresh kernel, saved in a stable form, and a failing cell is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minillm.course import execute, guard
from minillm.course import notebook as nbk
from minillm.errors import MinillmError


def lesson(folder: Path, *cells: nbk.Cell, name: str = "00_test.ipynb") -> Path:
    folder.mkdir(exist_ok=True)
    nbk.write(folder / name, nbk.notebook([nbk.md("title", "# A"), *cells]))
    return folder / name


WIDGET = """import ipywidgets, sys, warnings
warnings.warn("loud", stacklevel=1)
print("a"); sys.stdout.flush(); print("b")
ipywidgets.IntSlider()"""


def test_a_lesson_is_saved_in_a_form_that_does_not_change(tmp_path, capsys):
    """Also: state carries over, warnings stay out, the guard is content, a second run gives the same bytes."""
    path = lesson(
        tmp_path / "notebooks",
        nbk.code("one", "x = 20\nx + 1"),
        nbk.code("two", WIDGET, tags=[nbk.IGNORE_OUTPUT]),
        nbk.code("three", "import os\nprint(x, os.environ['HF_HUB_OFFLINE'], os.path.basename(os.getcwd()))"),
    )
    assert execute.main(["--dir", str(path.parent)]) == 0
    out, err = capsys.readouterr()
    assert out.split()[:3] == ["00_test", "3", "cells"]
    assert out.strip().endswith("ok")
    assert err == ""
    first = path.read_text()
    nb = nbk.read(path)
    one, two, three = nbk.code_cells(nb)
    assert one["outputs"][0]["data"]["text/plain"] == ["21"]
    assert two["outputs"][0]["text"] == ["a\n", "b\n"]
    assert three["outputs"][0]["text"] == ["20 1 notebooks\n"]
    assert nb["metadata"]["language_info"] == {"name": "python"}
    state = nb["metadata"]["widgets"][nbk.WIDGET_STATE]["state"]
    assert two["outputs"][1]["data"][nbk.WIDGET_VIEW]["model_id"] in state
    assert guard.faults(nb) == []
    assert execute.main(["--dir", str(path.parent)]) == 0
    assert path.read_text() == first


def test_check_saves_nothing_and_sees_another_text(tmp_path, capsys):
    path = lesson(tmp_path, nbk.code("one", "print(6 * 7)"), nbk.code("clock", "print(1)", tags=[nbk.IGNORE_OUTPUT]))
    nb = nbk.read(path)
    for cell in nbk.code_cells(nb):
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "41\n"}]
    nbk.write(path, nb)
    before = path.read_text()
    assert execute.main(["00", "--dir", str(tmp_path), "--check"]) == 1
    out = capsys.readouterr().out
    assert "shows another text than the committed one in: one\n" in out
    assert path.read_text() == before


def test_a_failing_cell_is_shown_and_the_next_lesson_still_runs(tmp_path, capsys):
    bad = lesson(tmp_path, nbk.code("fine", "x = 1"), nbk.code("breaks", "def f(y):\n    return y / 0\nf(x)"))
    lesson(tmp_path, nbk.code("fine", "x = 1"), name="01_next.ipynb")
    before = bad.read_text()
    assert execute.main(["--dir", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out
    assert "cell breaks failed: ZeroDivisionError: division by zero" in out
    assert "    return y / 0" in out
    assert "\x1b" not in out
    assert next(line for line in out.splitlines() if line.startswith("01_next")).endswith("ok")
    assert bad.read_text() == before, "a lesson that fails is left as it was"


@pytest.mark.parametrize(
    ("text", "words"),
    [("import time\ntime.sleep(600)", "did not end within 1 s"), ("import os\nos._exit(1)", "the kernel died")],
)
def test_a_cell_that_hangs_or_kills_the_kernel_is_shown(tmp_path, text, words):
    limit = 1 if "sleep" in text else 300  # a kernel on a busy machine may need a while to get to its end
    run = execute.execute(lesson(tmp_path, nbk.code("bad", text)), cell_timeout=limit)
    assert "cell bad failed" in run.failure
    assert words in run.failure


# What a cell prints goes through a thread of the kernel, and may come after the news that the cell has ended.
LATE = """import sys, time
sys.stdout.flush_timeout = sys.stderr.flush_timeout = 0  # the cell's end waits so long for the thread
get_ipython().kernel.iopub_thread.schedule(lambda: time.sleep({seconds}))
print("late")"""


def test_what_a_cell_printed_and_nobody_got_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(execute, "OUTPUT_S", 1)
    path = lesson(tmp_path, nbk.code("late", LATE.format(seconds=10)))
    assert "cell late failed: it did not show what it printed within 1 s" in execute.execute(path).failure


def test_bad_input(tmp_path, capsys):
    assert execute.main(["--dir", str(tmp_path / "none")]) == 2
    assert execute.main(["--dir", str(tmp_path)]) == 2
    lesson(tmp_path, nbk.code("a", "1"))
    assert execute.main(["07", "--dir", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "there is no folder" in err
    assert "holds no lesson" in err
    assert "has no lesson 07; it has 00" in err
    (tmp_path / "00_test.ipynb").write_text("{")
    with pytest.raises(MinillmError, match="is not a notebook"):
        execute.execute(tmp_path / "00_test.ipynb")


def test_output_of_widgets_and_streams_is_made_stable():
    one = {"a" * 32: {"state": {"msg_id": "xyz", "child": "IPY_MODEL_" + "b" * 32}}, "b" * 32: {}}
    two = {"c" * 32: {"state": {"msg_id": "uvw", "child": "IPY_MODEL_" + "d" * 32}}, "d" * 32: {}}
    texts = [execute.stable_widgets(json.dumps(s), {nbk.WIDGET_STATE: {"state": s}}, "00_x") for s in (one, two)]
    assert texts[0] == texts[1]
    assert "aaaa" not in texts[0]
    assert texts[0] != execute.stable_widgets(json.dumps(one), {nbk.WIDGET_STATE: {"state": one}}, "01_y")
    parts = [
        {"output_type": "stream", "name": n, "text": t}
        for n, t in (("stdout", "a"), ("stdout", ["b"]), ("stderr", "c"))
    ]
    assert [p["text"] for p in execute.merged(parts)] == ["ab", "c"]
