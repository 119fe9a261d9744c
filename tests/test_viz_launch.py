"""Figures of lesson 07: the model of time behind the lanes, and the numbers in the pictures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.errors import MinillmError
from minillm.viz import launch, style

SECONDS = st.floats(1e-7, 1e-3)
KERNELS = st.lists(SECONDS, min_size=1, max_size=30)


@given(KERNELS, SECONDS)
def test_a_kernel_waits_for_its_launch_and_for_the_one_before(kernels, host):
    lanes = launch.launched(kernels, host)
    for i, ((_, ready), (begin, end)) in enumerate(zip(lanes.host, lanes.device, strict=True)):
        before = lanes.device[i - 1][1] if i else 0.0
        assert begin == max(ready, before)
        assert end - begin == pytest.approx(kernels[i])
    most = max(len(kernels) * host, sum(kernels))
    assert most <= lanes.seconds * (1 + 1e-9)
    assert lanes.seconds <= (len(kernels) * host + sum(kernels)) * (1 + 1e-9)
    assert 0 <= lanes.idle + 1e-9 <= 1


@given(KERNELS, SECONDS, st.floats(0, 1e-6))
def test_a_replay_is_one_launch_and_all_kernels(kernels, launch_s, gap):
    lanes = launch.replayed(kernels, launch_s, gap)
    assert len(lanes.host) == 1
    assert lanes.seconds == pytest.approx(launch_s + sum(kernels) + gap * (len(kernels) - 1))


@pytest.mark.parametrize(("kernels", "host"), [([], 1e-6), ([1e-6, 0.0], 1e-6), ([1e-6], 0.0)])
def test_lanes_without_work_are_refused_in_words(kernels, host):
    with pytest.raises(MinillmError, match="more than 0 s"):
        launch.launched(kernels, host)


def test_bars_end_where_their_parts_sum_to_and_a_negative_residual_is_not_drawn():
    bars = {"predicted": {"product": 0.01, "calls": 0.005}, "measured": {"product": 0.012, "Python and rest": -0.001}}
    ax = launch.account_figure(bars).axes[0]
    ends = [p.get_x() + p.get_width() for p in ax.patches]
    assert ends == pytest.approx([10, 15, 12, 12])


def test_the_timeline_shows_every_call_once_to_scale():
    calls = [("linear", "product", 20e-6), ("add", "small operator", 5e-6), ("view", "view", 1e-6)] * 4
    axes = launch.timeline_figure(calls).axes
    bars = [p for ax in axes for p in ax.patches]
    assert [b.get_width() for b in bars] == pytest.approx([1e6 * s for _, _, s in calls])
    assert axes[0].get_xlim()[1] - axes[0].get_xlim()[0] == pytest.approx(axes[1].get_xlim()[1] - axes[1].get_xlim()[0])


def test_one_call_makes_a_timeline_too():
    assert len(launch.timeline_figure([("linear", "product", 20e-6)]).axes[0].patches) == 1


def test_the_knee_is_where_bytes_take_as_long_as_a_call():
    ax = launch.knee_figure([10, 1000, 100_000], [5e-6, 6e-6, 1e-4], overhead=6e-6, bandwidth=12e9).axes[0]
    assert ax.texts[0].get_text() == "bytes = call: 6,000 numbers"


def test_measured_steps_stand_beside_the_lines_in_ms():
    measured = {"m": {"eager": [5e-3, 6e-3], "graph": [2e-4, 3e-4]}}
    figure = launch.pays_figure([1, 4], {"m": [1e-4, 2e-4]}, {"m": {"plain": 4e-3}}, measured)
    points = [list(line.get_ydata()) for line in figure.axes[0].lines if "measured" in str(line.get_label())]
    assert points == [pytest.approx([5, 6]), pytest.approx([0.2, 0.3])]


def test_all_pictures_are_made_and_repeat_byte_for_byte():
    make = [
        lambda: launch.size_figure([1e6, 1e8], [1e-4, 1e-2], 5e-3, [5.1e-3, 15e-3], [6e-3, 17e-3]),
        lambda: launch.batches_figure([1, 2, 4, 8], {"a": ([1, 1, 2, 3], [1, 1, 2, 4]), "b": ([1] * 4, [1] * 4)}),
        lambda: launch.lanes_figure(
            {"eager": launch.launched([1e-6] * 9, 4e-6), "graph": launch.replayed([1e-6], 8e-6)}
        ),
        lambda: launch.pays_figure([1, 4, 16], {"m": [1e-4, 2e-4, 3e-4]}, {"m": {"plain": 4e-3, "fused": 1e-3}}),
    ]
    for figure in make:
        assert style.png(figure()) == style.png(figure())


def test_the_explorer_draws_what_its_sliders_say():
    box = launch.lanes_explorer()
    count, host, kernel, picture = box.children
    before = picture.value
    host.value, kernel.value = 2.0, 20.0
    ways = {
        "launched one by one": launch.launched([20e-6] * count.value, 2e-6),
        "replayed as a graph": launch.replayed([20e-6] * count.value, 8e-6, 1e-6),
    }
    assert before != picture.value == style.png(launch.lanes_figure(ways))
