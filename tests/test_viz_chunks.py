"""Pictures of lesson 10: what they draw is what they were given."""

import pytest
from matplotlib.collections import QuadMesh
from matplotlib.patches import Rectangle

from minillm.errors import MinillmError
from minillm.viz import style
from minillm.viz.chunks import (
    Priced,
    batch_figure,
    budget_explorer,
    budget_figure,
    gaps_figure,
    goodput_figure,
    plan_figure,
)


def test_each_stream_has_its_tokens_and_its_longest_gap():
    fig = gaps_figure({"a": {"s": [0.0, 1.0, 4.0, 4.5]}, "b": {"t": [1.0, 1.5, 2.0], "u": [0.0, 3.0]}}, arrival=1.0)
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["a", "b"]
    words = [[t.get_text() for t in ax.texts] for ax in fig.axes]
    assert words == [["3.00 s"], ["0.50 s", "3.00 s"]]
    bars = [line for line in fig.axes[0].lines if line.get_linewidth() == 5]
    assert [list(line.get_xdata()) for line in bars] == [[1.0, 4.0]]
    assert [t.get_text() for t in fig.axes[1].get_yticklabels()] == ["t", "u"]
    style.png(fig)


def test_a_stream_of_one_token_has_no_gap():
    with pytest.raises(MinillmError, match="'s' has 1 tokens; a gap needs two"):
        gaps_figure({"a": {"s": [1.0]}})


def test_a_batch_is_a_mask_of_history_chunk_and_self():
    fig = batch_figure([("s", 3, 1), ("p", 1, 3)])
    (mesh,) = [c for c in fig.axes[0].collections if isinstance(c, QuadMesh)]
    assert mesh.get_array().reshape(4, 4).astype(int).tolist() == [
        [1, 1, 1, 3],
        [1, 3, 0, 0],
        [1, 2, 3, 0],
        [1, 2, 2, 3],
    ]
    assert [t.get_text() for t in fig.axes[0].get_yticklabels()] == ["s: 1 new, 3 before", "p: 3 new, 1 before"]
    style.png(fig)


def test_steps_are_as_wide_as_they_last_and_late_ones_are_hatched():
    fig = plan_figure({"whole": [(0, 9, 0.5), (2, 0, 0.1)], "chunks": [(2, 5, 0.2), (2, 4, 0.2)]}, target=0.3)
    bars = [[p for p in ax.patches if isinstance(p, Rectangle)] for ax in fig.axes]
    assert [round(p.get_width(), 3) for p in bars[0]] == [0.5, 0.1, 0.5, 0.1]
    assert [p.get_height() for p in bars[1]] == [2, 2, 5, 4]
    assert [p.get_y() for p in bars[1]] == [0, 0, 2, 2]
    assert [bool(p.get_hatch()) for p in bars[0]] == [False, False, True, False]
    assert "done after 500 ms" in fig.axes[0].get_title(loc="left")  # the decode step behind it is not the prompt's
    assert "longest step 200 ms, the prompt is done after 400 ms" in fig.axes[1].get_title(loc="left")
    style.png(fig)


def test_a_budget_has_predicted_lines_and_measured_points():
    lines = [Priced(0.2, 3.0), Priced(0.4, 2.0)]
    fig = budget_figure([8, 16], lines, {12: Priced(0.3, 2.5)}, step=0.1, target=0.25)
    left = {line.get_label(): list(line.get_ydata()) for line in fig.axes[0].lines}
    assert left["predicted"] == [200.0, 400.0]
    assert left["measured"] == [300.0]
    assert left["target"] == [250.0, 250.0]
    assert left["no prompt"] == [100.0, 100.0]
    right = {line.get_label(): list(line.get_ydata()) for line in fig.axes[1].lines}
    assert right["predicted"] == [3.0, 2.0]
    assert right["measured"] == [2.5]
    style.png(fig)


def test_goodput_lies_below_throughput():
    fig = goodput_figure([8, 16], [10.0, 12.0], [10.0, 7.0])
    assert [list(line.get_ydata()) for line in fig.axes[0].lines] == [[10.0, 12.0], [10.0, 7.0]]
    style.png(fig)


def test_the_explorer_draws_the_budget_that_is_chosen():
    asked = []

    def plan(budget):
        asked.append(budget)
        return [(2, budget or 9, 0.1)]

    box = budget_explorer(plan, [8, 16], target=0.2)
    slider, picture = box.children
    before = picture.value
    slider.value = 16
    assert asked == [0, 8, 0, 16]
    assert picture.value != before
