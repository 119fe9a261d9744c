"""Figures and the explorer of lesson 03: the numbers in them, not their looks."""

import math
import warnings

import pytest
import torch

from minillm.request import SamplingParams
from minillm.viz import sampling, style

P = torch.tensor([0.05, 0.5, 0.3, 0.15], dtype=torch.float64)
LOGITS = P.log().float()


def test_view_without_filters_is_the_model_s_own_distribution():
    seen = sampling.view(LOGITS, SamplingParams())
    assert seen.tokens == (1, 2, 3, 0)
    assert seen.before == pytest.approx((0.5, 0.3, 0.15, 0.05))
    assert seen.after == pytest.approx(seen.before)
    assert (seen.kept, seen.mass) == (4, pytest.approx(1.0))
    assert seen.perplexity == pytest.approx(math.exp(-(P * P.log()).sum().item()))


@pytest.mark.parametrize(
    ("params", "after"),
    [
        ({"top_p": 0.79}, (0.625, 0.375, 0, 0)),
        ({"top_p": 0.81}, (0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0)),  # the token that crosses the boundary stays
        ({"top_k": 1}, (1, 0, 0, 0)),
        ({"min_p": 0.29}, (0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0)),
        ({"temperature": 0.0}, (1, 0, 0, 0)),
        ({"temperature": 0.5}, tuple(p * p / 0.365 for p in (0.5, 0.3, 0.15, 0.05))),
    ],
)
def test_view_after_filters(params, after):
    seen = sampling.view(LOGITS, SamplingParams(**params))
    assert seen.after == pytest.approx(after, abs=1e-6)
    assert seen.kept == sum(a > 0 for a in after)
    assert seen.mass == pytest.approx(sum(b for a, b in zip(after, seen.before, strict=True) if a > 0))


def test_view_figure_hatches_what_was_cut():
    fig = sampling.view_figure(sampling.view(LOGITS, SamplingParams(top_k=2)), lambda t: f" t{t}")
    words = [t.get_text() for t in fig.axes[0].texts]
    assert words == ["0.500 → 0.625", "0.300 → 0.375", "0.150 → cut", "0.050 → cut"]
    assert sum(bool(p.get_hatch()) for p in fig.axes[0].patches) == 2
    assert "2 tokens can be drawn; they held 80.0%" in fig.axes[0].get_title(loc="left")


def test_tokens_of_any_script_are_drawn_without_a_missing_glyph():
    names = ["\n", " a", "你", "🙂", "\ufffd", "é", "x" * 40, "'"]
    seen = sampling.view(torch.arange(8.0), SamplingParams())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert style.png(sampling.view_figure(seen, names.__getitem__))
    assert sampling.printable(" a\n") == "' a\\n'"
    assert sampling.printable("你") == "'\\u{4f60}'"
    assert len(sampling.printable("x" * 40)) == 20


def test_kept_and_temperature_figures_plot_what_they_are_given():
    fig = sampling.kept_figure([0.5, 1.0], {"top-p": [3, 9], "min-p": [2, 4]}, 100)
    drawn = [list(line.get_ydata()) for line in fig.axes[0].get_lines()]
    assert drawn[:2] == [[3, 9], [2, 4]]
    fig = sampling.temperature_figure({1.0: [0.5, 0.3], 2.0: [0.4, 0.35]})
    assert [list(line.get_ydata()) for line in fig.axes[0].get_lines()] == [[0.5, 0.3], [0.4, 0.35]]


def test_draws_figure_scales_probabilities_to_the_number_of_draws():
    fig = sampling.draws_figure(["a", "b"], [0.75, 0.25], {"mine": [70, 30]})
    assert [p.get_height() for p in fig.axes[0].patches] == pytest.approx([75, 25])
    counted = next(line for line in fig.axes[0].get_lines() if line.get_label() == "mine")
    assert list(counted.get_ydata()) == [70, 30]


def test_explorer_redraws_when_a_control_moves():
    flat = torch.zeros(4)
    box = sampling.sampling_explorer(lambda t: f"t{t}", {"peaked": LOGITS, "flat": flat})
    prompt, temperature, top_k, top_p, min_p, picture = box.children
    before = bytes(picture.value)
    assert before.startswith(b"\x89PNG")
    for control, value in ((temperature, 0.5), (top_k, 3), (min_p, 0.2), (top_p, 0.6), (prompt, "flat")):
        control.value = value
        assert bytes(picture.value) != before, control.description
        before = bytes(picture.value)
    temperature.value = 0.0  # greedy is a distribution too
    assert bytes(picture.value) != before
