"""Figures and the stepper of lesson 05: the numbers in them, not their looks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minillm.errors import MinillmError
from minillm.viz import flash, style

SIZES = st.integers(1, 9)


@given(n=st.integers(1, 24), history=st.integers(0, 24), block_m=SIZES, block_n=SIZES)
def test_tiles_cover_the_scores_once_and_their_kind_is_what_the_mask_says(n, history, block_m, block_n):
    mask = torch.ones(n, history + n).tril(history).bool()
    seen = torch.zeros(n, history + n)
    for row, rows, key, keys, kind in flash.tiles(n, block_m, block_n, history):
        part = mask[row : row + rows, key : key + keys]
        seen[row : row + rows, key : key + keys] += 1
        assert kind == (flash.WHOLE if part.all() else flash.EDGE if part.any() else flash.SKIPPED)
    assert bool((seen == 1).all())


def test_square_tiles_skip_the_upper_triangle():
    assert flash.tile_counts(64, 16, 16) == {"whole": 6, "edge": 4, "skipped": 6}
    assert flash.tile_counts(8, 4, 4, history=8) == {"whole": 5, "edge": 2, "skipped": 1}
    words = [t.get_text() for t in flash.tiling_figure(64, 16, 16).legends[0].get_texts()]
    assert words[0].startswith("6 every row")
    assert words[1].startswith("4 on the edge")
    assert words[2].startswith("6 ")


def test_the_state_figure_ends_with_the_sum_of_the_whole_row():
    scores = [0.5, 2.0, -1.0, 3.0, 0.0, 1.0]
    bars = flash.state_figure(scores, 2).axes[1].patches
    total = bars[-2].get_height() + bars[-1].get_height()
    assert total == pytest.approx(sum(math.exp(s - 3.0) for s in scores))
    words = [t.get_text() for t in flash.state_figure(scores, 2).axes[1].texts]
    assert words == [f"x {math.exp(-1.0):.2f}"]  # the maximum grows once after the first tile


def steps(n=8, block=4, d=3):
    found = []
    for row in range(0, n, block):
        for key in range(0, row + block, block):
            fill = float(len(found))
            found.append(
                flash.Step(row, block, key, block, torch.full((block,), fill), torch.ones(block), torch.ones(block, d))
            )
    return found


def test_the_stepper_shows_the_state_of_the_tile_it_stands_on():
    figure = flash.stepper_figure(8, 4, 4, steps(), 2)
    assert "tile 3 of 3: keys 4 to 7" in figure.axes[0].get_title(loc="left")
    assert [bar.get_width() for bar in figure.axes[1].patches] == [2.0] * 4
    assert list(figure.axes[1].get_lines()[0].get_xdata()) == [1.0] * 4  # before: the same rows, one tile ago
    assert not flash.stepper_figure(8, 4, 4, steps(), 1).axes[1].get_lines()  # the first tile of its rows
    widget = flash.tiling_stepper(8, 4, 4, steps())
    slider, picture, words = widget.children
    first = picture.value
    slider.value = 2
    assert picture.value != first
    assert "queries 4 to 7, keys 4 to 7: on the edge" in words.value


def test_lines_are_formulas_and_points_what_was_counted():
    bytes_ = flash.bytes_figure([64, 128], {"naive": [1e7, 4e7], "flash": [5e6, 9e6]}, {"flash": {64: 5.5e6}})
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in bytes_.axes[0].get_lines()]
    assert ([64, 128], [10, 40]) in drawn
    assert ([64], [5.5]) in drawn
    times = flash.times_figure([64], {"naive": [0.002]}, {"naive": {64: 0.003}})
    drawn = [list(line.get_ydata()) for line in times.axes[0].get_lines()]
    assert drawn == [[pytest.approx(2.0)], [pytest.approx(3.0)]]
    assert style.png(times)[:4] == b"\x89PNG"


def test_impossible_pictures_are_refused():
    with pytest.raises(MinillmError, match="at least 1, got 0"):
        flash.tiles(0, 4, 4)
    with pytest.raises(MinillmError, match="there are 3 tiles"):
        flash.stepper_figure(8, 4, 4, steps(), 3)
    with pytest.raises(MinillmError, match="finite"):
        flash.state_figure([math.nan], 2)
