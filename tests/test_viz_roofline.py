"""Figures of lessons 00 and 01: made from their data, axes named with units, the same bytes twice; widgets follow."""

import numpy as np
import pytest

from minillm.errors import MinillmError
from minillm.models.presets import preset
from minillm.roofline.device import device
from minillm.roofline.predict import predict_step
from minillm.viz import layers, style
from minillm.viz import roofline as viz

A100 = device("a100")
POINTS = [(1.0, 1.5e12), (64.0, 1.0e14), (512.0, 2.5e14)]


def figures(scale=1.0):
    """One of each, from data that `scale` changes."""
    x = [1, 8, 64]
    times = [0.010 * scale, 0.02, 0.08]
    work = viz.Series("gate_up", [(i, r * scale) for i, r in POINTS], "abc", True)
    samples, bounds = [[t, 1.2 * t] for t in times], [(t / 2, 2 * t) for t in times]
    curves = {"old": (x, times), "new": (x, times[::-1])}
    return {
        "roofline": viz.roofline(A100, "bf16", [work]),
        "compare": viz.compare(["a", "b", "c"], times, samples, "s", bounds),
        "against": viz.against(x, times, samples, "tokens computed", bounds=(times, times)),
        "batch_curves": viz.batch_curves(curves, "time per token (s)", marks={"ridge": 9}),
        "bandwidth": viz.bandwidth_by_size([2**20, 2**24, 2**28], [9e10 * scale, 6e10, 3e10], 3.5e10, {"L3": 2**25}),
        "bound_map": viz.bound_map([1, 2], [0], [["memory", "compute" if scale == 1 else "memory"]]),
        "layer_errors": layers.error_map({"ours": scale * np.geomspace(1e-5, 1e-2, 12).reshape(3, 4)}, 1e-4),
    }  # fmt: skip


@pytest.mark.parametrize("name", figures())
def test_figures_are_functions_of_their_data(name):
    once, again, other = (style.png(figures(scale)[name]) for scale in (1.0, 1.0, 1.7))
    assert once == again, "two runs differ"
    assert once != other, "the data do not reach the picture"
    assert once.startswith(b"\x89PNG")
    assert len(once) < 100_000


@pytest.mark.parametrize("name", figures())
def test_axes_are_named_with_units(name):
    fig = figures()[name]
    units = {
        "roofline": ("FLOPs per byte", "TFLOP/s, bf16"),
        "compare": ("(ms", None),  # the y axis holds the names of things
        "against": ("tokens", "(ms)"),
        "batch_curves": ("batch", "(s)"),
        "bandwidth": ("MiB", "GB/s"),
        "bound_map": ("batch", "tokens"),
        "layer_errors": ("position", "layer"),
    }[name]
    ax = fig.axes[0]
    for text, unit in zip((ax.get_xlabel(), ax.get_ylabel()), units):
        assert unit is None or unit in text, f"{name}: axis {text!r} lacks {unit!r}"
    assert fig.get_size_inches()[0] <= 8


def test_no_figure_stays_open_in_pyplot():
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    figures()
    assert plt.get_fignums() == before


def lines_of(fig):
    return [(np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for line in fig.axes[0].get_lines()]


def test_the_roof_has_its_knee_at_the_ridge():
    x, y = lines_of(viz.roofline(A100, "bf16"))[0]
    assert y.max() == pytest.approx(A100.peak("bf16") / 1e12)
    slope = x < A100.ridge("bf16") * 0.99
    assert y[slope] == pytest.approx(x[slope] * A100.roof_bandwidth / 1e12)
    assert (y[~slope] >= 0.98 * y.max()).all()


def test_points_stand_where_the_data_say():
    drawn = lines_of(viz.roofline(A100, "bf16", [viz.Series("work", POINTS, measured=True)]))
    assert any(np.allclose(x, [1, 64, 512]) and np.allclose(y, [1.5, 100, 250]) for x, y in drawn if len(x) == 3)


def test_compare_shows_the_median_and_the_ratio():
    fig = viz.compare(["a"], [0.010], [[0.011, 0.012, 0.050]], "s")
    assert "1.20×" in [t.get_text() for t in fig.axes[0].texts]
    assert any(np.allclose(x, 12.0) for x, y in lines_of(fig) if len(x) == 1)


def test_compare_takes_a_logarithm_only_when_sizes_differ():
    near, far = (viz.compare(["a", "b"], [0.01, b], [0.01, b], "s").axes[0] for b in (0.05, 5.0))
    assert (near.get_xscale(), far.get_xscale()) == ("linear", "log")
    assert near.get_xlim()[0] == 0
    assert "log" in far.get_xlabel()


def test_a_rate_above_the_roof_is_called_a_lie():
    fig = viz.bandwidth_by_size([2**20, 2**24, 2**28], [9e10, 3.52e10, 3e10], 3.5e10, {})
    by_name = {line.get_label(): list(line.get_ydata()) for line in fig.axes[0].get_lines()}
    assert by_name["above the roof: a lie"] == [90.0]
    assert by_name["under the roof"] == [35.2, 30.0]  # within five percent of the roof is the roof


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.039e12, "2.04 TB/s"), (35.2e9, "35.2 GB/s"), (0.07, "70.0 mB/s"), (999.9e9, "1.00 TB/s"), (0, "0 B/s")],
)
def test_si_keeps_three_digits(value, text):
    assert viz.si(value, "B/s") == text


def test_attainable_is_the_lower_of_the_two_roofs():
    assert viz.attainable(10, 300.0, 2.0) == 20.0
    assert viz.attainable(1000, 300.0, 2.0) == 300.0


def test_bad_data_are_refused_in_words():
    with pytest.raises(MinillmError, match="above 0"):
        viz.roofline(A100, "bf16", [viz.Series("norm", [(0.0, 1e9)])])
    with pytest.raises(MinillmError, match="prefill"):
        viz.bound_map([1], [0], [["prefill"]])
    with pytest.raises(MinillmError, match="contexts, batches"):
        viz.bound_map([1, 2], [0], [["memory"]])
    with pytest.raises(MinillmError, match="layers, positions"):
        layers.error_map({"ours": np.zeros(3)}, 1e-4)


def test_errors_below_the_tolerance_stay_white():
    errors = np.array([[1e-7, 1e-2], [1e-5, 1.0]])
    shown = layers.error_map({"ours": errors}, tolerance=1e-4).axes[0].images[0].get_array()
    assert shown.mask.tolist() == [[True, False], [True, False]]


# The classifier: no fixed label for a phase ---------------------------------------------------------------


def test_the_label_follows_batch_context_and_new_tokens():
    model = preset("llama-3.1-70b")
    label = lambda rows: predict_step(model, rows, A100).bound
    assert label([(1, 128)]) == "memory"
    assert label([(1, 128)] * 512) == "compute"  # decode, and compute-bound
    assert label([(1, 4096)] * 512) == "memory"  # the same batch, a longer context
    assert label([(16, 0)]) == "memory"  # prefill, and memory-bound
    assert label([(2048, 0)]) == "compute"


def test_the_map_draws_the_classifier():
    fig = viz.bound_map([1, 512], [128, 4096], [["memory", "compute"], ["memory", "memory"]])
    assert [t.get_text() for t in fig.axes[0].texts] == ["mem", "comp", "mem", "mem"]


# The explorer -------------------------------------------------------------------------------------------------------


@pytest.fixture
def explorer():
    from minillm.viz.roofline_explorer import RooflineExplorer

    return RooflineExplorer({"mine": device("l4")})


@pytest.mark.parametrize(
    ("control", "value"),
    [
        ("model", "llama-3.1-70b"),
        ("device", "mine"),
        ("dtype", "float32"),
        ("batch", 256),
        ("context", 65536),
        ("new", 64),
    ],
)
def test_the_explorer_redraws_when_a_control_moves(explorer, control, value):
    image, text = bytes(explorer.image.value), explorer.text.value
    getattr(explorer, control).value = value
    assert explorer.text.value != text
    assert bytes(explorer.image.value) != image
    assert bytes(explorer.image.value).startswith(b"\x89PNG")


def test_the_explorer_says_what_the_prediction_says(explorer):
    explorer.model.value, explorer.device.value = "llama-3.1-8b", "a100"
    explorer.batch.value, explorer.context.value, explorer.new.value = 4, 1024, 1
    p = predict_step(preset("llama-3.1-8b"), [(1, 1024)] * 4, A100)
    assert f"{p.tokens_per_s:,.1f} tokens/s in all" in explorer.text.value
    assert "<b>memory</b>-bound" in explorer.text.value
    assert ": fits" in explorer.text.value
    explorer.new.value = 2048
    assert "<b>compute</b>-bound" in explorer.text.value
    explorer.batch.value, explorer.context.value = 1024, 65536
    assert "<b>does not fit</b>" in explorer.text.value
