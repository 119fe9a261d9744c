"""Figures and explorer of lesson 12: the numbers in them, not their looks."""

from __future__ import annotations

import pytest

from minillm.events import Event
from minillm.viz import pressure, style


def log(steps=30, sent_back=(4, 9), live=8, cached=1, free=1):
    out = []
    for i in range(steps):
        if i in sent_back:
            out.append(Event(i, 0.0, "preempted", "b", {"how": "recompute", "computed": 5, "blocks": 1}))
        rows = [("a", 1, i), *([("b", 5, 0)] if i in (0, *sent_back) else [])]
        out.append(Event(i, 0.0, "step", "", {
            "rows": rows, "waiting": 1, "running": 2, "free": free, "cached": cached, "live": live,
            "seconds": 0.01, "schedule_seconds": 0.001,
        }))  # fmt: skip
    return [*out, Event(steps, 0.0, "finished", "a", {"reason": "length", "output_tokens": steps})]


def test_the_pressure_figure_counts_what_the_log_says():
    fig = pressure.pressure_figure({"one": log(), "two": log(10, ())})
    first, second = fig.axes
    title = first.get_title(loc="left")
    assert title == "one: 1 done in 30 steps, 2 sent back, 22% of tokens computed again"
    assert list(first.get_lines()[0].get_xdata()) == [4, 9]
    assert "0 sent back, 0% of tokens" in second.get_title(loc="left")
    assert first.get_xlim() == second.get_xlim() == (0, 30)  # the same work on the same scale
    tops = [max(v[1] for path in c.get_paths() for v in path.vertices) for c in first.collections[:3]]
    assert tops == pytest.approx([100, 90, 80])  # free, cached, live, stacked


def test_a_line_shows_how_much_of_the_pool_holds_tokens():
    fig = pressure.pressure_figure({"one": log(8, ())}, block_size=4)
    line = fig.axes[0].get_lines()[0]
    assert list(line.get_ydata()) == pytest.approx([100 * (i + 1 + 5) / 40 for i in range(8)])  # a grows, b stays at 5


def test_long_logs_are_thinned_and_every_preemption_is_still_marked():
    fig = pressure.pressure_figure({"long": log(2000, range(0, 2000, 10))})
    assert len(fig.axes[0].get_lines()[0].get_xdata()) == 200
    assert all(len(path.vertices) < 3 * pressure.POINTS for c in fig.axes[0].collections for path in c.get_paths())


def test_watermark_figure_shows_both_curves_over_all_shares():
    left, right = pressure.watermark_figure([0, 0.01, 0.05], [10, 12, 11], [30, 8, 0], "tokens/s").axes
    assert list(left.get_lines()[0].get_ydata()) == [10, 12, 11]
    assert list(right.get_lines()[0].get_ydata()) == [30, 8, 0]
    assert [t.get_text() for t in left.get_xticklabels()] == ["0", "1", "5"]


def test_crossover_figure_draws_predictions_as_lines_and_measurements_as_points():
    fig = pressure.crossover_figure([16, 32], [1.0, 2.0], {"link": [0.5, 1.0]}, {"link": [0.6, 1.1]}, "here")
    lines = [(list(line.get_ydata()), line.get_linestyle()) for line in fig.axes[0].get_lines()]
    assert lines[0][0] == [1000, 2000]
    assert lines[1][0] == [500, 1000]
    assert lines[2] == ([600, 1100], "None")


def test_break_even_figure_names_cards_and_links():
    fig = pressure.break_even_figure([16, 32], {"card": [1e9, 2e9]}, {"PCIe": 32e9})
    card, link = fig.axes[0].get_lines()
    assert list(card.get_ydata()) == [1, 2]
    assert set(link.get_ydata()) == {32}
    assert {"card", "PCIe"} <= {t.get_text() for t in fig.axes[0].texts}


def test_signature_figure_puts_each_log_where_its_shares_are():
    fig = pressure.signature_figure({"calm": (0.0, 0.9), "storm": (0.8, 0.95)})
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in fig.axes[0].get_lines()] == [
        (0, 90), (80, 95),
    ]  # fmt: skip
    assert {"calm", "storm"} <= {t.get_text() for t in fig.axes[0].texts}


def test_the_explorer_draws_the_run_its_sliders_name():
    runs = {(10, 0.0): log(), (10, 0.05): log(20), (20, 0.0): log(25), (20, 0.05): log(15, ())}
    box = pressure.pressure_explorer(runs)
    (size, mark), picture = box.children[0].children, box.children[1]
    for (blocks, share), run in runs.items():
        size.value, mark.value = blocks, share
        name = f"{blocks} blocks, watermark {100 * share:g} %"
        assert bytes(picture.value) == style.png(pressure.pressure_figure({name: run}))
