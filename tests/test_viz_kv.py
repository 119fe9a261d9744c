"""Figures and the memory calculator of lesson 02: the numbers in them, not their looks."""

import math
from dataclasses import replace

import pytest

from minillm.cache.contiguous import kv_bytes
from minillm.errors import MinillmError
from minillm.models.presets import preset
from minillm.roofline import cost
from minillm.roofline.device import device
from minillm.viz import kv, style

H200 = device("h200")
SMALL, BIG = preset("smollm2-135m"), preset("llama-3.1-8b")


def lines(ax):
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.get_lines()]


def texts(fig):
    return [t.get_text() for ax in fig.axes for t in ax.texts]


def test_crossover_lies_between_its_neighbours_and_is_exact_on_a_power_law():
    x = [1, 4, 16, 64]
    assert kv.crossover(x, x, [1.0] * 4) == pytest.approx(2.0)
    assert kv.crossover(x, [math.sqrt(v) for v in x], [1.0] * 4, ratio=3.0) == pytest.approx(9.0)
    assert kv.crossover(x, [5, 6, 7, 8], [1.0] * 4) == 1  # reached from the start
    assert kv.crossover(x, [1.0] * 4, [1.0] * 4) is None


def test_growth_figure_shows_predictions_as_lines_and_measurements_as_points():
    fig = kv.growth_figure([8, 16, 32], [0.02, 0.05, 0.1], [0.02, 0.02, 0.02], {8: 0.03}, {8: 0.01, 16: 0.02})
    drawn = lines(fig.axes[0])
    assert ([8, 16, 32], pytest.approx([20, 50, 100])) == drawn[0]
    assert ([8], pytest.approx([30])) in [(x, y) for x, y in drawn]
    assert any("twice as fast from 14 tokens" in t for t in texts(fig))
    assert not any("twice" in t for t in texts(kv.growth_figure([8, 16], [1, 1], [1, 1])))


def test_kv_outweighs_the_weights_where_the_figure_marks_it():
    fig = kv.kv_versus_weights_figure({"small": SMALL, "big": BIG})
    marks = [x[0] for x, y in lines(fig.axes[0]) if len(x) == 1]
    for mark, config in zip(marks, (SMALL, BIG), strict=True):
        assert kv_bytes(config, 1, 2) * mark == pytest.approx(cost.weight_bytes(config, "bfloat16"))


def test_mha_gives_each_query_head_its_own_keys():
    assert kv.as_mha(BIG).num_kv_heads == 32
    assert cost.kv_bytes_per_token(kv.as_mha(BIG), "bfloat16") == 4 * cost.kv_bytes_per_token(BIG, "bfloat16")


def test_trails_cross_the_ridge_with_batch_and_come_back_with_context():
    ridge = H200.ridge("bfloat16")
    by_batch = kv.trail("b", BIG, H200, "bfloat16", [[(1, 128)] * 8, [(1, 128)] * 512])
    by_context = kv.trail("c", BIG, H200, "bfloat16", [[(1, 128)] * 512, [(1, 4096)] * 512], [1.0, 2.0])
    assert by_batch.points[0][0] < ridge < by_batch.points[1][0]
    assert by_context.points[0][0] > ridge > by_context.points[1][0]
    flops = cost.total(cost.step(BIG, [(1, 4096)] * 512, "bfloat16")).flops
    assert by_context.points[1][2] == pytest.approx(flops / 2.0)
    fig = kv.trails_figure(H200, "bfloat16", [by_batch, by_context])
    roof_x, roof_y = lines(fig.axes[0])[0]
    assert roof_x[1] == pytest.approx(ridge)
    assert roof_y[1] == roof_y[2] == pytest.approx(H200.peak("bfloat16") / 1e12)
    for t in (by_batch, by_context):  # no prediction above the roof
        for x, y, _ in t.points:
            assert y <= min(H200.peak("bfloat16"), x * H200.roof_bandwidth) * 1.0001


def test_batch_figure_gives_time_and_throughput():
    left, right = kv.batch_figure([1, 2], [0.1, 0.1], [0.1, 0.2]).axes
    assert lines(left)[1] == ([1, 2], pytest.approx([100, 200]))
    assert lines(right)[0] == ([1, 2], pytest.approx([10, 20]))


@pytest.mark.parametrize(("kv_dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float8", 1), (None, 2)])
def test_memory_plan_is_the_engine_s_formula(kv_dtype, size):
    plan = kv.memory_plan(BIG, H200, 8, 1000, "bfloat16", kv_dtype)
    assert plan.kv == kv_bytes(BIG, 8000, size)
    assert plan.weights == cost.weight_bytes(BIG, "bfloat16")
    assert plan.fits
    assert plan.kv_seconds == pytest.approx(plan.kv / 4.8e12)
    room = plan.tokens_that_fit
    assert plan.weights + room * plan.kv_per_token <= plan.memory < plan.weights + (room + 1) * plan.kv_per_token


def test_memory_plan_says_no_and_refuses_nonsense():
    plan = kv.memory_plan(preset("llama-3.1-70b"), device("l4"), 1, 1)
    assert not plan.fits
    assert plan.tokens_that_fit == 0
    with pytest.raises(MinillmError, match="kv_dtype 'int3'"):
        kv.memory_plan(BIG, H200, 1, 1, "bfloat16", "int3")
    with pytest.raises(MinillmError, match="at least 1"):
        kv.memory_plan(BIG, H200, 0, 1)


def test_memory_figure_stacks_weights_and_kv():
    plan = kv.memory_plan(BIG, H200, 64, 4096)
    fig = kv.memory_figure(plan, "H200")
    weights, held = fig.axes[0].patches[:2]
    assert weights.get_width() == pytest.approx(plan.weights / 1e9)
    assert held.get_x() == pytest.approx(weights.get_width())
    assert held.get_width() == pytest.approx(plan.kv / 1e9)
    assert "does not fit" in kv.memory_figure(replace(plan, memory=1)).axes[0].get_title(loc="left")


@pytest.mark.parametrize(("n", "text"), [(12, "12 B"), (131072, "131.1 kB"), (16.06e9, "16.1 GB"), (2e12, "2.0 TB")])
def test_sizes(n, text):
    assert kv.size(n) == text


def test_calculator_redraws_when_a_control_moves():
    box = kv.kv_calculator({"big": BIG, "small": SMALL}, {"h200": H200, "l4": device("l4")})
    model, _, _, kv_dtype, heads, batch, context, picture, words = box.children
    assert bytes(picture.value).startswith(b"\x89PNG")
    assert "131.1 kB" in words.value
    before = bytes(picture.value)
    for control, value, expected in (
        (kv_dtype, "float8", "65.5 kB"),
        (heads, "MHA", "262.1 kB"),
        (model, "small", "34.6 kB"),
        (batch, 1024, "34.6 kB"),
        (context, 131072, "34.6 kB"),
    ):
        control.value = value
        assert bytes(picture.value) != before, control.description
        assert expected in words.value
        before = bytes(picture.value)


def test_figures_are_small_and_the_same_every_time():
    make = lambda: kv.kv_versus_weights_figure({"small": SMALL, "big": BIG})
    first = style.png(make())
    assert first == style.png(make())
    assert len(first) < 100_000
