"""Figures of lesson 04 show the data they are given: lanes, bytes, shares."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from minillm.errors import MinillmError
from minillm.viz import kernels, style


def boxes(ax):
    return [p for p in ax.patches if isinstance(p, Rectangle)]


def test_each_lane_is_a_box_coloured_by_the_row_it_points_at():
    lanes = [
        kernels.Lanes(0, [0, 1, 2, 3], [True, True, True, False]),
        kernels.Lanes(1, [3, 4, 5, 6], [True, True, True, True]),
    ]
    (ax,) = kernels.lanes_figure({"a": lanes}, width=3, rows=2).axes
    assert [t.get_text() for t in ax.texts] == [str(i) for i in (0, 1, 2, 3, 3, 4, 5, 6)]
    found = boxes(ax)
    assert len(found) == 8
    assert [to_hex(b.get_facecolor()) for b in found[:3]] == [kernels.LANE_COLORS[0].lower()] * 3
    assert found[3].get_hatch()
    assert not any(b.get_hatch() for b in found[4:])
    assert [to_hex(b.get_facecolor()) for b in found[4:7]] == [kernels.LANE_COLORS[1].lower()] * 3
    assert to_hex(found[7].get_facecolor()) == kernels.NOBODY.lower()  # behind the tensor, and touched
    framed = [to_hex(b.get_edgecolor()) == style.VERMILLION.lower() for b in found]
    assert framed == [False] * 7 + [True]


def test_a_touched_element_of_another_row_is_framed():
    (ax,) = kernels.lanes_figure({"a": [kernels.Lanes(0, [1, 2, 3], [True] * 3)]}, width=2, rows=3).axes
    framed = [to_hex(b.get_edgecolor()) == style.VERMILLION.lower() for b in boxes(ax)]
    assert framed == [False, True, True]


def test_bars_are_as_long_as_the_bytes():
    figure = kernels.fusion_figure({"norm": [("add", 6.0), ("mul", 4.0)]}, {"norm": 5.0}, "kB")
    (ax,) = figure.axes
    assert [(b.get_x(), b.get_width()) for b in boxes(ax)] == [(0, 6), (6, 4), (0, 5)]
    assert any("2.0 times less" in t.get_text() for t in ax.texts)
    with pytest.raises(MinillmError, match="same parts"):
        kernels.fusion_figure({"norm": [("add", 6.0)]}, {"other": 5.0}, "kB")


def test_shares_are_those_of_the_unfused_step():
    (ax,) = kernels.shares_figure({"prompt": (6.0, 4.0, 2.0)}).axes
    assert [(b.get_x(), b.get_width()) for b in boxes(ax)] == [(0, 60), (60, 40), (0, 60), (60, 20)]
    words = " ".join(t.get_text() for t in ax.texts)
    assert "40 % between" in words
    assert "25 %, 1.25 times as fast" in words


def test_predicted_and_measured_stand_in_one_line():
    (ax,) = kernels.beside_figure({"a": 0.002, "b": 0.001}, {"a": 0.003, "b": 0.001}).axes
    assert [b.get_width() for b in boxes(ax)] == [2.0, 1.0]
    assert [list(line.get_xdata()) for line in ax.lines] == [[3.0], [1.0]]
    with pytest.raises(MinillmError, match="same names"):
        kernels.beside_figure({"a": 1.0}, {"b": 1.0})
