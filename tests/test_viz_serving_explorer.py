"""What each user felt, as a picture: every request is in it once, and where it belongs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from minillm.errors import MinillmError
from minillm.trace.latency import Stamps, summarize
from minillm.viz import style
from minillm.viz.serving_explorer import apart, felt_explorer, felt_figure

RUN = [
    *(Stamps(t, t, ((t + wait, 1), (t + wait + 1, 1)), t + wait + 1, 10, 2, 200)
      for t, wait in ((5.0, 0.1), (6.0, 0.5), (7.0, 1.0), (9.0, 4.0))),
    Stamps(8.0, 8.0, end=8.0, status=429, retry_after_s=2.0),
]  # fmt: skip


def points(ax, label):
    (line,) = [line for line in ax.get_lines() if line.get_label() == label]
    return list(zip(line.get_xdata(), line.get_ydata(), strict=True))


def test_each_request_is_drawn_once_by_what_became_of_it():
    (ax,) = felt_figure({"a": RUN}, 1.0).axes
    good, late, away = (points(ax, t) for t in ("began to answer within 1 s", "later", "turned away at once"))
    assert good == [(0.0, pytest.approx(0.1)), (1.0, pytest.approx(0.5)), (2.0, pytest.approx(1.0))]  # at the target
    assert late == [(4.0, pytest.approx(4.0))]
    assert [x for x, _ in away] == [3.0]
    assert away[0][1] < 0.1
    assert ax.get_ylim()[0] < away[0][1]


def test_mean_and_tail_are_those_of_the_answered():
    (ax,) = felt_figure({"a": RUN}).axes
    found = summarize(s.ttft for s in RUN if s.ok)
    levels = [line.get_ydata()[0] for line in ax.get_lines() if len(set(line.get_ydata())) == 1]
    assert found is not None
    assert {round(found.mean, 9), round(found.p99, 9)} <= {round(v, 9) for v in levels}
    words = [t.get_text() for t in ax.texts]
    assert "mean 1.4 s" in words
    assert any(w.startswith("P99 ") for w in words)


def test_panels_share_their_scales_and_the_same_data_give_the_same_picture():
    panels = {"a": RUN, "b": RUN[:2]}
    fig = felt_figure(panels, 1.0, {"burst": 2.0})
    one, two = fig.axes
    assert one.get_ylim() == two.get_ylim()
    assert one.get_xlim() == two.get_xlim()
    assert style.png(fig) == style.png(felt_figure(panels, 1.0, {"burst": 2.0}))


def test_a_mark_is_a_time_of_the_stamps():
    (ax,) = felt_figure({"a": RUN}, marks={"burst": 7.0}).axes
    assert [2.0, 2.0] in [list(line.get_xdata()) for line in ax.get_lines()]  # the first was sent at 5


def test_everybody_may_be_turned_away_and_nothing_cannot_be_drawn():
    felt_figure({"a": RUN[-1:]}, 1.0)
    with pytest.raises(MinillmError, match="without requests"):
        felt_figure({"a": []})


def test_the_explorer_shows_the_chosen_run():
    box = felt_explorer({"2": RUN, "4": RUN[:2]}, 1.0, "requests/s")
    slider, picture = box.children
    assert picture.value == style.png(felt_figure({"requests/s: 2": RUN}, 1.0))
    slider.value = "4"
    assert picture.value == style.png(felt_figure({"requests/s: 4": RUN[:2]}, 1.0))


def test_labels_of_levels_that_are_close_are_moved_apart_around_their_middle():
    assert apart([0.0, 20.0, 40.0], 11.0) == [0.0, 20.0, 40.0]
    assert apart([0.0, 20.0, 24.0], 11.0) == [0.0, 16.5, 27.5]
    assert apart([0.0, 8.0, 9.0], 11.0) == pytest.approx([17 / 3 - 11, 17 / 3, 17 / 3 + 11])  # all three push
    assert apart([], 11.0) == []


def test_no_two_labels_of_a_panel_lie_on_each_other():
    run = [replace(s, chunks=((s.sent + 0.8, 1),)) if s.ok else s for s in RUN]  # mean, P99 and target almost the same
    fig = felt_figure({"a": run}, 0.78)
    fig.canvas.draw()
    words = {t.get_text().split()[0]: t.get_window_extent() for t in fig.axes[0].texts}
    assert set(words) == {"mean", "P99", "target"}
    for a, b in itertools.combinations(words.values(), 2):
        assert not a.overlaps(b)
