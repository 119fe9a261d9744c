"""Figures and the explorer of lesson 08: the numbers in them, not their looks."""

import math

import pytest
import torch

from minillm.errors import MinillmError
from minillm.quant import dequantize_int8, quantize_int8
from minillm.viz import quant, quant_explorer


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lines(ax):
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.get_lines()]


def texts(fig):
    return [t.get_text() for ax in fig.axes for t in ax.texts]


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("group", [0, 16, 32])
@pytest.mark.parametrize("zero", [False, True])
def test_the_grid_has_no_more_codes_than_bits_allow_and_errors_of_half_a_step(bits, group, zero):
    w = normal(4, 64) + 0.5
    made = quant.on_grid(w, bits, group, zero=zero)
    for a, b in zip(w.view(-1, group or 64), made.view(-1, group or 64), strict=True):
        levels = 2**bits if zero else 2**bits - 1
        assert len(torch.unique(b)) <= levels
        step = (a.max() - a.min()) / (levels - 1) if zero else 2 * a.abs().max() / (levels - 1)
        assert (a - b).abs().max() <= 0.5001 * step


def test_the_grid_is_the_engines_where_both_have_it():
    w = normal(6, 64)
    assert quant.relative_error(quant.on_grid(w, 8), dequantize_int8(*quantize_int8(w))) < 0.01  # scales in bf16 there
    assert quant.relative_error(quant.on_grid(w, 8, whole=True), w) > quant.relative_error(quant.on_grid(w, 8), w)


@pytest.mark.parametrize(("bits", "group"), [(1, 0), (9, 0), (4, 48)])
def test_bits_and_groups_that_cannot_be_are_refused(bits, group):
    with pytest.raises(MinillmError, match="must divide 64 inputs"):
        quant.on_grid(normal(2, 64), bits, group)


def test_an_outlier_costs_its_own_group_and_nobody_else():
    w = normal(8, 64)
    clean = quant.on_grid(w, 4, 32)
    w[3, 9] = 100.0
    made = quant.on_grid(w, 4, 32)
    changed = (made != clean).view(8, 2, 32).any(-1)
    assert changed.nonzero().tolist() == [[3, 0]]
    assert (quant.on_grid(w, 4, whole=True) != 0).sum() == 1  # one scale for all: nothing but the outlier is left


def test_grid_figure_counts_codes_and_shows_every_weight():
    w = normal(1, 64)[0]
    made = quant.on_grid(w[None], 3)[0]
    fig = quant.grid_figure({"three bits": (w, made), "plain": (w, w)})
    assert f"three bits: {len(torch.unique(made))} codes in use" in fig.axes[0].get_title(loc="left")
    assert "error 0.0%" in fig.axes[1].get_title(loc="left")
    ticks = next(x for x, y in lines(fig.axes[0]) if len(x) == 64 and y[0] == 0.3)
    assert ticks == pytest.approx(w.tolist())


def test_error_maps_share_one_scale_and_say_the_error():
    w = normal(8, 32)
    made = {"good": quant.on_grid(w, 8), "bad": quant.on_grid(w, 2)}
    fig = quant.error_map_figure(w, made)
    images = [ax.get_images()[0] for ax in fig.axes[:2]]
    assert images[0].get_clim() == images[1].get_clim()
    assert images[1].get_array().max() > 20 * images[0].get_array().max()
    assert f"error {quant.relative_error(made['bad'], w):.1%}" in fig.axes[1].get_title(loc="left")


def test_quality_figure_marks_what_fails():
    judged = [quant.Judged("int8", 100, 1.002, 1.01), quant.Judged("int4-g64", 60, 1.35, 1.10)]
    fig = quant.quality_figure(judged, 200)
    assert {"int8", "int4-g64: fails", "gate 1.01", "gate 1.10"} <= set(texts(fig))
    points = [(x[0], y[0]) for x, y in lines(fig.axes[0]) if len(x) == 1]
    assert (100, pytest.approx(0.2)) in points
    assert (60, pytest.approx(35)) in points
    better = quant.quality_figure([quant.Judged("lucky", 50, 0.99, 1.01)], 200)
    assert "lucky" in texts(better)  # below 0 %: drawn at the floor of the logarithmic axis


def test_rows_and_speed_figures_hold_the_given_times():
    fig = quant.rows_figure([1, 2, 4], {"a": [1e-6, 2e-6, 3e-6]}, {"here": 2.0})
    assert ([1, 2, 4], pytest.approx([1, 2, 3])) in [(x, y) for x, y in lines(fig.axes[0])]
    assert "here" in texts(fig)
    fig = quant.speed_figure([1, 2], {"int8": [1e-3, 2e-3]}, {"int8": [3e-3, 4e-3]})
    assert [y for _, y in lines(fig.axes[0])] == [pytest.approx([1, 2]), pytest.approx([3, 4])]


def test_every_head_is_a_point():
    fig = quant.kv_error_figure({"keys": [[0.01, 0.02], [0.03, 0.04]], "values": [[0.01, 0.01], [0.02, 0.02]]})
    (x, y), _ = lines(fig.axes[0])
    assert y == pytest.approx([1, 2, 3, 4])
    assert [round(v) for v in x] == [0, 0, 1, 1]


def test_bytes_a_weight_are_those_of_the_schemes():
    from minillm.quant import SCHEMES

    assert quant.bytes_a_weight(8, 0, 576) == SCHEMES["int8"].weight_bytes(1, 576) / 576
    assert quant.bytes_a_weight(4, 64, 576, zero=True) == SCHEMES["int4-g64"].weight_bytes(1, 576) / 576


def test_the_explorer_redraws_and_says_what_an_outlier_costs():
    row = normal(128)
    _, calm = quant_explorer.outlier_figure(row, 4, 0, 0, False)
    fig, hit = quant_explorer.outlier_figure(row, 4, 0, 30, False)
    _, safe = quant_explorer.outlier_figure(row, 4, 32, 30, False)
    error = lambda words: float(words.split("weights ")[1].split("%")[0])
    assert error(hit) > 90 > error(safe) > 0
    assert error(calm) < 20
    assert max(lines(fig.axes[0])[0][1]) == pytest.approx(30, rel=1e-5)
    box = quant_explorer.quantisation_explorer(row)
    controls, words, picture = box.children
    before, text = bytes(picture.value), words.value
    assert before.startswith(b"\x89PNG")
    controls.children[1].children[0].value = 30
    assert bytes(picture.value) != before
    assert words.value != text
    assert math.isfinite(error(words.value))
