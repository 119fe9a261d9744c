"""Pictures of lesson 15 and the split planner: what they show is what they were given."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
from matplotlib.patches import Rectangle

from minillm.errors import MinillmError
from minillm.viz import split as viz
from minillm.viz import style
from minillm.viz.split_planner import CHUNKS, LINES, planned, split_explorer, split_figure

QUICK = {"engines": 2, "prompt": 512, "output": 64, "budgets": (256,)}


def words(fig) -> str:
    return "\n".join(t.get_text() for ax in fig.axes for t in ax.texts)


def test_a_handoff_has_a_box_a_span_and_a_line_where_it_ends():
    spans = [("P", 0.0, 0.02, "compute"), ("line", 0.02, 0.03, "send"), ("D", 0.03, 0.035, "decode")]
    fig = viz.handoff_figure({"a": spans, "b": spans[:2]})
    boxes = [[p for p in ax.patches if isinstance(p, Rectangle)] for ax in fig.axes]
    assert [len(b) for b in boxes] == [3, 2]
    assert (boxes[0][1].get_x(), boxes[0][1].get_width()) == pytest.approx((20.0, 10.0))
    assert words(fig).splitlines() == ["35 ms", "30 ms"]
    assert len(style.png(fig)) > 1000


@pytest.mark.parametrize("panels", [{}, {"a": []}, {"a": [("P", 0, 1, "sleeps")]}])
def test_a_handoff_that_cannot_be_drawn(panels):
    with pytest.raises(MinillmError, match="span"):
        viz.handoff_figure(panels)


def cell(m, b, gain, colocated=1.0, split=1.0):
    return {"prompt_tokens": m, "bandwidth": b, "gain": gain, "colocated": colocated, "split": split}


def test_a_map_frames_the_cells_where_a_split_pays():
    rows = [cell(256, 1e9, 0.4), cell(256, 5e10, 1.09), cell(1024, 1e9, 1.1), cell(1024, 5e10, math.inf)]
    (ax,) = viz.break_even_figure({"map": rows}, {"here": 1e9}).axes
    boxes = [p for p in ax.patches if isinstance(p, Rectangle)]
    assert [b.get_linewidth() > 1 for b in boxes] == [False, False, True, True]
    assert [t.get_text() for t in ax.texts] == ["0.40", "1.09", "1.10", "∞", "here"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1", "50"]


def test_a_map_where_neither_serves():
    (ax,) = viz.break_even_figure({"map": [cell(256, 1e9, 0.0, 0.0, 0.0)]}).axes
    assert ax.texts[0].get_text() == "neither"


@pytest.mark.parametrize("gain", [2.0, math.inf])
def test_the_legend_of_a_map_explains_what_is_in_it(gain):
    (legend,) = viz.break_even_figure({"map": [cell(256, 1e9, gain)]}).legends
    assert ("∞" in legend.get_texts()[0].get_text()) == math.isinf(gain)


def test_a_map_with_a_hole_is_refused():
    with pytest.raises(MinillmError, match="3 cells are no grid of 2 x 2"):
        viz.break_even_figure({"map": [cell(1, 1e9, 1), cell(2, 1e9, 1), cell(1, 2e9, 1)]})


def test_the_load_curve_shows_predictions_as_lines_and_runs_as_marks():
    side = lambda name, ok: {"name": name, "ok": ok}
    rows = [{"rate": r, "colocated": side("4 co-located", 1 - r / 20), "split": side("1P3D", 1.0)} for r in (1, 10)]
    (ax,) = viz.load_figure(rows, {"split": [(5, 0.95)]}).axes
    named = {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}
    assert list(named) == ["4 co-located, predicted", "1P3D, predicted", "1P3D, paced fleet"]
    assert list(named["4 co-located, predicted"].get_ydata()) == [0.95, 0.5]
    assert named["1P3D, paced fleet"].get_linestyle() == "None"
    alone = [{**row, "split": None} for row in rows]
    assert len(viz.load_figure(alone).axes[0].lines) == 2  # one engine: a curve, and nine in ten
    with pytest.raises(MinillmError, match="rows"):
        viz.load_figure([])


def test_a_pile_up_has_both_queues_on_one_scale():
    samples = [SimpleNamespace(time=t, input_queue=9 * t, decode_queue=t, kv_share=0.5) for t in (0, 1, 2)]
    fig = viz.pile_up_figure({"a": samples, "b": samples[:1]})
    left = [ax for ax in fig.axes if ax.get_ylabel() != "blocks (%)" and ax.lines[0].get_label().startswith("prompts")]
    assert [list(line.get_ydata()) for line in left[0].lines] == [[0, 9, 18], [0, 1, 2]]
    assert left[0].get_ylim() == left[1].get_ylim()
    with pytest.raises(MinillmError, match="samples"):
        viz.pile_up_figure({"a": []})


def test_the_worst_gap_predicted_beside_measured():
    fig = viz.worst_figure({"whole": 2.0, "split": 0.1}, {"whole": 3.0, "split": 0.2}, {"whole": 3.0, "split": None})
    left, right = fig.axes
    assert [line.get_xdata()[0] for line in left.lines] == [2000.0, 3000.0, 100.0, 200.0]
    assert [line.get_xdata()[0] for line in right.lines] == [3000.0]
    with pytest.raises(MinillmError, match="each way"):
        viz.worst_figure({}, {"whole": 1.0})


def test_the_planner_says_together_and_apart():
    together, even = planned(**QUICK, itl_s=0.05)
    assert not together.pays
    assert 1e9 < even < 1e11
    apart, _ = planned(**(QUICK | {"budgets": (8192,)}), itl_s=0.008)  # whole prompts keep this promise by luck only
    assert apart.pays
    assert 10 < apart.gain < math.inf
    assert split_figure(together, even).axes[0].get_title(loc="left").startswith("stay together")
    assert (
        split_figure(apart).axes[0].get_title(loc="left")
        == f"split: the best split serves {apart.gain:.2f} times as much of what comes"
    )
    nothing = dataclasses.replace(apart, gain=math.inf)
    assert split_figure(nothing).axes[0].get_title(loc="left") == "split: only a split serves anything"


def test_the_planner_draws_every_split_and_what_comes():
    plan, even = planned(**(QUICK | {"engines": 3, "rate": 5.0}))
    fig = split_figure(plan, even)
    (ax,) = fig.axes
    assert [t.get_text() for t in ax.get_yticklabels()] == ["3 co-located", "1P2D", "2P1D"]
    assert [round(bar.get_width(), 6) for bar in ax.patches] == [
        round(p.goodput, 6) for p in (plan.colocated, *sorted(plan.splits, key=lambda s: s.prefill))
    ]
    assert "what comes" in words(fig)
    assert "low load" in fig.get_supxlabel()


def test_one_engine_cannot_be_split():
    plan, _ = planned(**(QUICK | {"engines": 1}))
    assert not plan.pays
    assert "cannot be split" in split_figure(plan).axes[0].get_title(loc="left")


def test_the_widget_draws_and_says_what_is_wrong():
    pytest.importorskip("ipywidgets")
    box = split_explorer(["qwen3-0.6b", "llama-3.1-70b"], ["l4"], most_engines=2)
    (left, right), said, picture = [c.children for c in box.children[0].children], box.children[1], box.children[2]
    assert bytes(picture.value).startswith(b"\x89PNG")
    assert left[3].options == tuple(LINES)
    before = bytes(picture.value)
    left[0].value = "llama-3.1-70b"
    assert bytes(picture.value) == before, "a plan waits for its button"
    right[-1].click()
    assert "weights" in said.value
    left[0].value, left[2].value = "qwen3-0.6b", 1
    right[-1].click()
    assert said.value == ""
    assert bytes(picture.value) != before
    (together,) = [c for c in left if getattr(c, "options", None) == tuple(CHUNKS)]
    before, together.value = bytes(picture.value), "whole prompts"
    right[-1].click()
    assert bytes(picture.value) != before, "another opponent"
