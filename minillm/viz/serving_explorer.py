"""What each of many users felt: a dot a request, where it came and how long it waited. Lesson 13.

`felt_figure` is pure; `felt_explorer` wraps it in a slider over runs, such as one for each offered rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minillm.errors import MinillmError
from minillm.trace.latency import Stamps, summarize
from minillm.viz import style

PANEL_PT, LINE_PT = 190.0, 11.0  # height of a panel, about, and of a line of small text
LEAST_S = 1e-3  # of the time axis: what is faster is felt as nothing


def felt_figure(
    panels: Mapping[str, Sequence[Stamps]], target_s: float | None = None, marks: Mapping[str, float] | None = None
) -> Figure:
    """A panel a run: each request's time to first token (s, logarithmic) over the time at which it was sent (s).

    Blue is within target_s, vermilion later, a cross at the foot was turned away. Mean and P99 of those that were
    answered are lines. marks: name -> time of the stamps, dotted verticals. Raises MinillmError if nothing was sent.
    """
    if not panels or not all(panels.values()):
        raise MinillmError("a run without requests cannot be drawn; give each panel at least one")
    zero = {name: min(s.sent for s in run) for name, run in panels.items()}
    waits = [s.ttft for run in panels.values() for s in run if s.ttft is not None]
    low, high = max(LEAST_S, min(waits, default=1.0)) / 2.5, max([*waits, target_s or 0.0, LEAST_S]) * 2
    end = max(1e-3, *(s.sent - zero[name] for name, run in panels.items() for s in run))
    fig, axes = style.figure(5.4 * len(panels) if len(panels) > 1 else 7.5, 3.8, columns=len(panels))
    for ax, (name, run) in zip(axes, panels.items(), strict=True):
        ax.set(yscale="log", ylim=(low / 1.6, high), xlim=(-0.03 * end, 1.22 * end))
        _dots(ax, run, zero[name], target_s, low)
        _lines(ax, run, 1.02 * end, target_s)
        for mark, at in (marks or {}).items():
            ax.axvline(at - zero[name], color=style.GREY, linestyle=":", linewidth=1)
            style.label(ax, at - zero[name], high / 1.3, mark, style.GREY, dx=3)
        style.name_axes(ax, "sent at (s)", "time to first token (s)" if ax is axes[0] else "", name)
        style.plain_ticks(ax)
    handles, labels = axes[0].get_legend_handles_labels()
    for ax in axes[1:]:
        more = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
        handles += [h for text, h in more.items() if text not in labels]
        labels += [text for text in more if text not in labels]
    if handles:
        fig.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=style.SMALL, frameon=False)
    return fig


def _dots(ax: Axes, run: Sequence[Stamps], zero: float, target_s: float | None, foot: float) -> None:
    answered = [(s.sent - zero, s.ttft) for s in run if s.ok and s.ttft is not None]
    late = [p for p in answered if target_s is not None and p[1] > target_s]
    good = [p for p in answered if target_s is None or p[1] <= target_s]
    away = [s.sent - zero for s in run if not s.ok]
    small: dict[str, Any] = {"linestyle": "none", "markersize": 4, "alpha": 0.75, "markeredgewidth": 0}
    if good:
        words = "began to answer" + (f" within {target_s:g} s" if target_s is not None else "")
        ax.plot(*zip(*good, strict=True), marker="o", color=style.BLUE, label=words, **small)
    if late:
        ax.plot(*zip(*late, strict=True), marker="s", color=style.VERMILLION, label="later", **small)
    if away:
        ax.plot(away, [foot / 1.2] * len(away), "x", color=style.GREY, markersize=4, label="turned away at once")


def _lines(ax: Axes, run: Sequence[Stamps], right: float, target_s: float | None) -> None:
    found = summarize(s.ttft for s in run if s.ok)
    lines = []  # value, words, style, colour, width
    if found is not None:
        lines += [(found.mean, f"mean {_seconds(found.mean)}", "--", style.BLACK, 1.4)]
        lines += [(found.p99, f"P99 {_seconds(found.p99)}", "-.", style.PURPLE, 1.4)]
    if target_s is not None:
        lines += [(target_s, "target", "-", style.GREY, 0.8)]
    lines.sort(key=lambda line: line[0])
    low, high = ax.get_ylim()
    heights = [PANEL_PT * math.log(value / low) / math.log(high / low) for value, *_ in lines]
    over: dict[str, Any] = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5}}  # other lines
    for (value, words, line, color, width), at, place in zip(lines, heights, apart(heights, LINE_PT), strict=True):
        ax.axhline(value, color=color, linestyle=line, linewidth=width)
        style.label(ax, right, value, words, color, dx=2, dy=place - at, **over)


def apart(places: Sequence[float], least: float) -> list[float]:
    """Ascending places, moved until none is closer than least to the next; a group keeps its middle."""
    groups: list[tuple[float, int]] = []  # middle, how many
    for place in places:
        groups.append((place, 1))
        while len(groups) > 1 and groups[-1][0] - groups[-2][0] < least * (groups[-1][1] + groups[-2][1]) / 2:
            (upper, m), (lower, n) = groups.pop(), groups.pop()
            groups.append(((upper * m + lower * n) / (m + n), m + n))
    return [middle + least * (i - (n - 1) / 2) for middle, n in groups for i in range(n)]


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value >= 0.1 else f"{1e3 * value:.2g} ms"


def felt_explorer(runs: Mapping[str, Sequence[Stamps]], target_s: float | None = None, what: str = "run") -> Any:
    """A widget: a slider over named runs around `felt_figure`."""
    import ipywidgets as w

    slider = w.SelectionSlider(options=list(runs), description=what, continuous_update=False,
                               layout=w.Layout(width="420px"))  # fmt: skip
    picture = w.Image(format="png", layout=w.Layout(max_width="750px"))

    def redraw(_change: Any = None) -> None:
        picture.value = style.png(felt_figure({f"{what}: {slider.value}": runs[slider.value]}, target_s))

    slider.observe(redraw, names="value")
    redraw()
    return w.VBox([slider, picture])
