"""Every committed lesson passes the guard, and the guard fails on each fault it is there for."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from minillm.course import notebook as nbk
from minillm.course.guard import faults

ROOT = Path(__file__).parents[1]
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)
def test_lesson_is_in_order(path):
    assert path.name[:2].isdigit()
    found = faults(nbk.read(path))
    assert found == [], "\n".join(found)


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)
def test_lesson_is_written_in_the_common_form(path):
    assert path.read_text(encoding="utf-8") == nbk.dumps(nbk.read(path)), "run python -m minillm.course.execute"


def executed(*cells: nbk.Cell) -> nbk.Notebook:
    count = 0
    for cell in cells:
        if cell["cell_type"] == "code":
            count += 1
            cell["execution_count"] = count
    return nbk.notebook(cells)


def stream(text: str, name: str = "stdout") -> dict:
    return {"output_type": "stream", "name": name, "text": text}


def shown(**data) -> dict:
    return {"output_type": "display_data", "metadata": {}, "data": {k.replace("_", "/", 1): v for k, v in data.items()}}


def widget() -> dict:
    return {"output_type": "display_data", "metadata": {}, "data": {nbk.WIDGET_VIEW: {"model_id": "1"}}}


def good() -> nbk.Notebook:
    timed = nbk.code("timed", "import time\nprint(time.perf_counter())", tags=[nbk.IGNORE_OUTPUT])
    timed["outputs"] = [stream("3.1 ms\n")]
    explorer = nbk.code("explorer", "explore()", tags=[nbk.IGNORE_OUTPUT])
    explorer["outputs"] = [widget()]
    plot = nbk.code("plot", "# a comment may end in ;\nfigure")
    plot["outputs"] = [shown(text_plain="<Figure size 640x480>", image_png="x/root/x/tmp/x")]
    text = "# Title\n\nA card of 2 TB/s. Since the 1980s. $$t = 70 ms$$ 16 tokens, 32 MB, 12 layers, step 3 sees all."
    return executed(nbk.md("intro", text, given=["2 TB/s"]), timed, explorer, plot)


def test_a_good_notebook_has_no_faults():
    assert faults(good()) == []


def change(**edit):
    """Set keys of the cell `timed`."""
    return lambda nb: nb["cells"][1].update(edit)


def outputs(*items, cell: int = 3):
    return lambda nb: nb["cells"][cell].update(outputs=list(items))


def tags(cell: int, *names: str):
    return lambda nb: nb["cells"][cell]["metadata"].update(tags=list(names))


def swap_counts(nb):
    nb["cells"][1]["execution_count"], nb["cells"][2]["execution_count"] = 2, 1


def unexecuted(nb):
    nb["cells"] = nbk.cleared(nb)["cells"]


FAULTS = {
    "unexecuted": (unexecuted, "never executed"),
    "one cell unexecuted": (change(execution_count=None), "timed: never executed"),
    "out of order": (swap_counts, "executed as number 2, expected 1"),
    "counts with a gap": (change(execution_count=4), "executed as number 4"),
    "empty cell": (change(source="  \n"), "is empty"),
    "error": (outputs({"output_type": "error", "ename": "ValueError", "evalue": "", "traceback": []}), "ValueError"),
    "stderr": (outputs(stream("warning!", "stderr")), "prints to stderr: 'warning!'"),
    "semicolon": (change(source="plot();  "), "ends in ';'"),
    "semicolon before a comment": (change(source="time.time();\n# done"), "ends in ';'"),
    "no id": (lambda nb: nb["cells"][0].pop("id"), "has no id"),
    "id twice": (change(id="intro"), "occurs twice"),
    "random id": (change(id="7fa3c1d2"), "the id is random"),
    "uuid": (change(id="0b1f6c1e-3b7a-4c5d-9e8f-001122334455"), "the id is random"),
    "big output": (outputs(stream("x" * 100_001)), "more than 100000"),
    "big picture": (outputs(shown(image_png="A" * 100_001)), "more than 100000"),
    "skip tag": (tags(3, "nbval-skip"), "the tag nbval-skip"),
    "check-output tag": (tags(3, "nbval-check-output"), "the tag nbval-check-output"),
    "raises tag": (tags(3, "raises-exception"), "the tag raises-exception"),
    "tag without need": (tags(3, nbk.IGNORE_OUTPUT), "neither wall-clock numbers nor a widget"),
    "widget without tag": (tags(2), "shows a live widget"),
    "home path": (outputs(stream("saved in /home/ann/x.json")), "a path of this machine: /home/ann/x.json"),
    "mac path": (outputs(stream("/Users/ann/x")), "a path of this machine"),
    "windows path": (outputs(shown(text_plain="'C:\\\\Users\\\\ann'")), "a path of this machine"),
    "temporary path": (outputs(stream("/tmp/x")), "a path of this machine"),
    "project path": (outputs(stream(f"File {ROOT}/minillm/config.py")), "a path of this machine"),
    "address": (outputs(stream("<function f at 0x7f12ab34cd56>")), "a memory address"),
    "raw cell": (change(cell_type="raw"), "a raw cell"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found(name):
    edit, words = FAULTS[name]
    nb = copy.deepcopy(good())
    edit(nb)
    found = faults(nb)
    assert any(words in fault for fault in found), found


TYPED = [
    "It takes 70 ms.", "about **70** ms", "`70ms`", "70&nbsp;ms", "a 70-ms step", "0.5 s", "3.2 seconds", "12 µs",
    "12 us",
    "90s", "1,200 tokens/s", "14.3 tok/s", "14.3 tokens per second", "14.3 tokens a second", "2 TB/s", "31.5 GB/s",
    "31.5 GiB/s", "100 GFLOP/s", "989 TFLOPS", "989e12 FLOP/s", "3 Gbit/s", "200 Gbps", "5 req/s", "$70\\,\\text{ms}$",
    "$3{,}200\\ \\mathrm{tokens/s}$", "1.8 times faster", "3x faster", "2.5× slower", "4 times the throughput",
    "twice, or 2.1 times as fast", "62 % of the roof", "62% of its bandwidth bound", "```\nstep: 70 ms\n```",
    "<details><summary>Answer</summary>70 ms</details>", "| step | time (ms) |\n|---|---|\n| a | 70 |",
    "| step | tok/s |\n|---|---|\n| a | ~14.3 |", "70 毫秒", "5 to 9 ms",
    "It takes 70\u00a0ms", "ten, no 11 minutes",
]  # fmt: skip


@pytest.mark.parametrize("text", TYPED)
def test_measured_numbers_in_prose_are_refused(text):
    assert any("typed into" in fault for fault in faults(executed(nbk.md("a", text))))


FREE = [
    "$$t = \\frac{140\\,\\text{GB}}{2\\,\\text{TB/s}} = 70\\,\\text{ms}$$", "140 GB of weights", "2 bytes",
    "16 tokens a page",
    "the 1990s", "GPT-2's 12 layers", "B = 32", "lesson 05", "95 % of the memory", "top-p 0.9", "x2s",
    "| batch | heads |\n|---|---|\n| 1 | 9 |", "| time (ms) |\n|---|\n| see below |", "2 L T H d b",
    "30 layers, 9 heads", "4 times 5", "a 2 x 2 block", "18 MB/step",
]  # fmt: skip


@pytest.mark.parametrize("text", FREE)
def test_other_numbers_are_free(text):
    assert faults(executed(nbk.md("a", text))) == []


def test_given_numbers_are_listed_word_for_word():
    text = "A card of **2 TB/s** needs $70\\,$ms; we saw 71 ms."
    assert len(faults(executed(nbk.md("a", text, given=["2 TB/s", "70 ms"])))) == 1
    assert "71 ms" in faults(executed(nbk.md("a", text, given=["2 TB/s", "70 ms"])))[0]
    assert any("does not say it" in f for f in faults(executed(nbk.md("a", "x", given=["2 TB/s"]))))
    for blanket in (True, "2 TB/s", ["TB/s"], [2]):
        cell = nbk.md("a", "70 ms", minillm={"given": blanket})
        assert any("must list the numbers" in f for f in faults(executed(cell)))
        assert any("typed into prose" in f for f in faults(executed(cell)))
    assert any("typed into" in f for f in faults(executed(nbk.md("a", "12 ms, and 112 ms", given=["12 ms"]))))
    found = faults(executed(nbk.md("a", "2 TB/s and 70 ms", given=["2 TB/s"])))
    assert '{"minillm": {"given": ["2 TB/s", "70 ms"]}}' in found[0], "the message says what to write"
