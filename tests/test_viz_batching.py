"""The figure of lesson 09: the numbers in it, not its looks."""

import pytest

from minillm.viz import style
from minillm.viz.batching import Served, served_figure

SEATS = [1, 4, 16]
PREDICTED = [Served(20.0, 3.0, 0.05), Served(70.0, 1.0, 0.06), Served(120.0, 0.2, 0.13)]
MEASURED = [Served(18.0, 3.3, 0.06), Served(60.0, 1.2, 0.07), Served(100.0, 0.3, 0.16)]


def test_served_figure_draws_both_sides_with_units():
    fig = served_figure(SEATS, PREDICTED, MEASURED, 8.0)
    for ax, field, scale in zip(fig.axes, Served._fields, (1, 1, 1000), strict=True):
        predicted, measured, knee = ax.get_lines()
        assert list(predicted.get_xdata()) == list(measured.get_xdata()) == SEATS
        assert list(predicted.get_ydata()) == pytest.approx([scale * getattr(s, field) for s in PREDICTED])
        assert list(measured.get_ydata()) == pytest.approx([scale * getattr(s, field) for s in MEASURED])
        assert list(knee.get_xdata()) == [8.0, 8.0]
        assert ax.get_ylim()[1] > max(measured.get_ydata())
    assert [ax.get_ylabel().rsplit("(")[-1] for ax in fig.axes[1:]] == ["s)", "ms)"]
    assert len(style.png(fig)) < 75_000


@pytest.mark.parametrize("knee", [None, 0.5, 99.0])
def test_a_knee_outside_the_picture_is_left_out(knee):
    assert all(len(ax.get_lines()) == 2 for ax in served_figure(SEATS, PREDICTED, MEASURED, knee).axes)
