"""Figures of lesson 13: the numbers in them, not their looks."""

from __future__ import annotations

import pytest
from matplotlib.patches import Rectangle

from minillm.errors import MinillmError
from minillm.roofline.capacity import StepModel, knee, predict_load
from minillm.server import tracing
from minillm.viz import serving


def at(ax, label):
    (line,) = [line for line in ax.get_lines() if line.get_label().startswith(label)]
    return list(line.get_xdata()), list(line.get_ydata())


MODEL = StepModel(20e-3, 0.8e-3, 1.5e-3)
POINTS = [serving.Point(2.0, 2.0, 2.0, 0.1, 0.2), serving.Point(8.0, 6.0, 1.0, 3.0, 9.0)]


def test_the_saturation_curve_holds_measured_and_predicted():
    rates = [1.0, 3.0, 5.0]
    predicted = [predict_load(MODEL, r, 100, 40, 32) for r in rates]
    top = knee(MODEL, 100, 40, 32)
    left, right = serving.saturation_figure(POINTS, predicted, top, measured_knee=6.1).axes
    assert at(left, "served, measured") == ([2.0, 8.0], [2.0, 6.0])
    assert at(left, "goodput, measured") == ([2.0, 8.0], [2.0, 1.0])
    assert at(left, "served, predicted") == (rates, [p.served for p in predicted])
    assert at(right, "TTFT mean, measured")[1] == pytest.approx([100.0, 3000.0]), "the same quantity as predicted"
    assert at(right, "TTFT p99")[1] == pytest.approx([200.0, 9000.0])
    assert at(right, "TTFT mean, predicted")[1] == pytest.approx([1e3 * p.ttft_s for p in predicted])
    for ax in (left, right):
        assert at(ax, "knee, predicted")[0][0] == top
    assert at(left, "knee, measured")[0][0] == 6.1


def test_a_curve_can_be_drawn_before_anything_is_measured():
    predicted = [predict_load(MODEL, r, 100, 40, 32) for r in (1.0, 99.0)]
    left, right = serving.saturation_figure([], predicted, knee(MODEL, 100, 40, 32)).axes
    assert not [line for line in left.get_lines() if "measured" in line.get_label()]
    assert len(at(right, "TTFT mean, predicted")[0]) == 1  # beyond the knee there is no finite mean
    with pytest.raises(MinillmError):
        serving.saturation_figure([], [], 1.0)


def test_spans_lie_end_to_end_and_sum_to_the_whole():
    life = [("queue", 0.2), ("prefill", 0.1), ("decode", 0.7)]
    fig = serving.spans_figure({"a": (1.0, life), "b": (1.5, [("queue", 0.0), ("decode", 0.5)])})
    (ax,) = fig.axes
    boxes = [p for p in ax.patches if isinstance(p, Rectangle)]
    assert [(b.get_x(), b.get_width()) for b in boxes] == [
        pytest.approx(x) for x in ((0.0, 200.0), (200.0, 100.0), (300.0, 700.0), (500.0, 500.0))
    ]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b"]
    legend = [t.get_text() for t in fig.legends[0].get_texts()]
    assert legend == ["queue", "prefill", "decode"]
    assert tuple(serving.STAGES) == tracing.STAGES
    with pytest.raises(MinillmError, match="stage"):
        serving.spans_figure({"a": (0.0, [("lunch", 1.0)])})
