"""Figures of the roofline: the roof with work on it, predictions beside measurements, curves over a batch. Lesson 00.

Every function takes plain numbers in SI units (FLOP/s, bytes/s, seconds, bytes) and gives a matplotlib figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from minillm.errors import MinillmError
from minillm.roofline.device import Device
from minillm.viz import style
from minillm.viz.units import common_scale, si


@dataclass(frozen=True)
class Series:
    """Points on a roofline that belong together: (FLOPs per byte, FLOP/s), with an optional word at each.

    measured: drawn filled, and below the roof if nothing lies; otherwise hollow, what the roof promises.
    """

    name: str
    points: Sequence[tuple[float, float]]
    words: Sequence[str] = field(default=())
    measured: bool = False


def attainable(intensity: float, peak: float, bandwidth: float) -> float:
    """FLOP/s under the roof: min(peak, intensity * bandwidth) (Williams, Waterman, Patterson, 2009)."""
    return min(peak, intensity * bandwidth)


def roofline(
    device: Device, dtype: str, series: Sequence[Series] = (), title: str = "", span: tuple[float, float] | None = None
) -> Figure:
    """The roof of a device in one dtype, the ridge named, and points on and under it.

    span: FLOPs/byte at the left and right edge, for pictures that are compared; without it they fit the points.
    """
    peak, bandwidth, ridge = device.peak(dtype), device.roof_bandwidth, device.ridge(dtype)
    unit, letter = _rate_unit(peak)
    xs = [x for s in series for x, _ in s.points] + [ridge]
    ys = [y for s in series for _, y in s.points] + [peak]
    if min(xs) <= 0 or min(ys) <= 0:
        raise MinillmError("a roofline has logarithmic axes: every point needs FLOPs/byte and FLOP/s above 0")
    low, high = min(min(xs), ridge / 20) / 1.8, max(max(xs), ridge * 6) * 1.8
    if span is not None:
        low, high = span
    fig, (ax,) = style.figure(height=4.4)
    roof = np.geomspace(low, high, 200)
    ax.plot(roof, np.minimum(peak, roof * bandwidth) / unit, color=style.BLACK, linewidth=2, zorder=2)
    bottom = min(min(ys), low * bandwidth) / unit / 1.8
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, max(max(ys), peak) / unit * 4))
    style.label(ax, high, peak / unit, f"peak {si(peak, 'FLOP/s')}", ha="right", dx=-4, dy=24)
    _corner(ax, f"left of the ridge:\n{si(bandwidth, 'B/s')} times the intensity", style.BLACK, ha="left")
    _mark(ax, ridge, f"ridge {ridge:.3g}")
    for i, s in enumerate(series):
        _draw_series(ax, s, i, unit)
    style.name_axes(
        ax, "arithmetic intensity (FLOPs per byte)", f"arithmetic ({letter}FLOP/s, {dtype})", title or device.name
    )
    style.plain_ticks(ax)
    if series:
        ax.legend(handles=[_handle(s, i) for i, s in enumerate(series)], fontsize=style.SMALL, loc="lower right")
    return fig


def compare(
    names: Sequence[str],
    predicted: Sequence[float],
    measured: Sequence[float | Sequence[float]],
    unit: str,
    bounds: Sequence[tuple[float, float]] | None = None,
    title: str = "",
) -> Figure:
    """Predicted beside measured, one line a thing; the number at the right is measured / predicted.

    measured: a number, or all samples of one (the median is the dot, all of them a thin bar).
    bounds: lower and upper of each prediction, drawn as a band.
    """
    samples = [np.atleast_1d(np.asarray(m, dtype=float)) for m in measured]
    medians = [float(np.median(s)) for s in samples]
    scale, letter = common_scale([*predicted, *medians])
    fig, (ax,) = style.figure(height=1.5 + 0.42 * len(names))
    y = np.arange(len(names))[::-1]
    if bounds is not None:
        low, high = np.array(bounds).T / scale
        ax.barh(y, high - low, left=low, height=0.5, color=style.SKY, alpha=0.35, label="lower to upper bound")
    for at, s in zip(y, samples):
        ax.plot([s.min() / scale, s.max() / scale], [at, at], color=style.VERMILLION, linewidth=1.5)
    ax.plot(np.array(predicted) / scale, y, "D", color=style.BLUE, markersize=7, fillstyle="none", label="predicted")
    ax.plot(np.array(medians) / scale, y, "o", color=style.VERMILLION, markersize=6, label="measured")
    shown = [*predicted, *(x for s in samples for x in s), *(x for pair in bounds or () for x in pair)]
    log = max(shown) > 12 * min(shown)  # one scale fits all, or the small ones need a logarithm
    ax.set(xscale="log" if log else "linear", yticks=y, ylim=(-0.7, len(names) - 0.3))
    if not log:
        ax.set_xlim(0, max(shown) / scale * 1.05)
    ax.set_yticklabels(names, fontsize=style.SMALL)
    for at, p, m in zip(y, predicted, medians):
        ax.annotate(
            f"{m / p:.2f}×", (1.0, at), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=style.SMALL,
        )  # fmt: skip
    style.name_axes(
        ax,
        f"{_noun(unit)} ({letter}{unit}{', log scale' if log else ''})",
        "",
        title or "measured / predicted at the right",
    )
    style.plain_ticks(ax)
    ax.legend(fontsize=style.SMALL, loc="upper center", bbox_to_anchor=(0.5, -0.28 / (1.5 + 0.42 * len(names)) * 2.4),
              ncols=3, frameon=False)  # fmt: skip
    return fig


def against(
    x: Sequence[float],
    expected: Sequence[float],
    measured: Sequence[Sequence[float]] | None,
    x_name: str,
    y_name: str = "time",
    bounds: tuple[Sequence[float], Sequence[float]] | None = None,
    log: bool = True,
    title: str = "",
) -> Figure:
    """Seconds over something that grows: the predicted line, its lower and upper bound as a band, measured samples.

    `measured` holds the samples of each x, or is None for a prediction alone.
    """
    dots = [] if measured is None else [np.asarray(m, dtype=float) for m in measured]
    scale, letter = common_scale([*expected, *(float(np.median(d)) for d in dots)])
    fig, (ax,) = style.figure()
    if bounds is not None:
        low, high = (np.asarray(b, dtype=float) / scale for b in bounds)
        ax.fill_between(x, low, high, color=style.SKY, alpha=0.3, linewidth=0, label="lower to upper bound")
    ax.plot(x, np.asarray(expected) / scale, **style.PREDICTED, label="predicted")
    for at, d in zip(x, dots):
        ax.plot([at, at], [d.min() / scale, d.max() / scale], color=style.VERMILLION, linewidth=1.5)
    if dots:
        medians = [float(np.median(d)) / scale for d in dots]
        ax.plot(x, medians, **style.MEASURED, label="measured: median, all samples")
    if log:
        ax.set(xscale="log", yscale="log")
        style.plain_ticks(ax, x)
    ax.legend(fontsize=style.SMALL, loc="upper left", frameon=False)
    ax.margins(x=0.05)
    style.name_axes(ax, x_name, f"{y_name} ({letter}s)", title)
    return fig


def batch_curves(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    y_name: str,
    x_name: str = "sequences decoded together (batch)",
    marks: Mapping[str, float] | None = None,
    log_y: bool = True,
    title: str = "",
) -> Figure:
    """Something over the batch, one line each, named at its right end; `marks` are vertical lines with a word."""
    fig, (ax,) = style.figure()
    ends: list[tuple[float, float, str, str]] = []
    for i, (name, (x, y)) in enumerate(curves.items()):
        color = style.PALETTE[i % len(style.PALETTE)]
        ax.plot(x, y, color=color, linestyle=style.LINES[i % len(style.LINES)], linewidth=1.9,
                marker=style.MARKERS[i % len(style.MARKERS)], markersize=4)  # fmt: skip
        ends.append((float(x[-1]), float(y[-1]), name, color))
    ax.set_xscale("log", base=2)
    if log_y:
        ax.set_yscale("log")
    ax.margins(x=0.03, y=0.12)
    for word, at in (marks or {}).items():
        _mark(ax, at, word)
    style.name_axes(ax, x_name, y_name, title)
    longest = max((x for x, _ in curves.values()), key=len)
    style.plain_ticks(ax, [x for x in longest if float(np.log2(x)).is_integer()])
    _label_ends(ax, ends, log_y)
    return fig


def bandwidth_by_size(
    sizes: Sequence[float], rates: Sequence[float], roof: float, caches: Mapping[str, float], title: str = ""
) -> Figure:
    """bytes/s of the same read over ever larger arrays; what lies above the memory's roof came from a cache."""
    fig, (ax,) = style.figure()
    sizes_mb, rates_gb = np.asarray(sizes) / 2**20, np.asarray(rates) / 1e9
    lie = rates_gb > roof / 1e9 * 1.05
    ax.plot(sizes_mb, rates_gb, color=style.GREY, linewidth=1, zorder=1)
    ax.plot(sizes_mb[lie], rates_gb[lie], "X", color=style.VERMILLION, markersize=8, label="above the roof: a lie")
    ax.plot(sizes_mb[~lie], rates_gb[~lie], "o", color=style.GREEN, markersize=6, label="under the roof")
    ax.axhline(roof / 1e9, color=style.BLACK, linewidth=1.8, label=f"memory's roof, {si(roof, 'B/s')}")
    ax.set(xscale="log", ylim=(0, max(rates_gb.max(), roof / 1e9) * 1.3))
    for name, size in caches.items():
        ax.axvline(size / 2**20, color=style.GREY, linestyle=":", linewidth=1)
        ax.annotate(name, (size / 2**20, 0.0), (3, 6), xycoords=("data", "axes fraction"),
                    textcoords="offset points", fontsize=style.SMALL, color=style.GREY)  # fmt: skip
    style.name_axes(ax, "bytes of the array (MiB)", "apparent bandwidth (GB/s)", title)
    style.plain_ticks(ax)
    ax.legend(fontsize=style.SMALL, loc="upper right")
    return fig


def bound_map(
    batches: Sequence[int], contexts: Sequence[int], labels: Sequence[Sequence[str]], title: str = ""
) -> Figure:
    """Which ceiling a decode step meets, for every batch (columns) and context (rows of `labels`)."""
    fig, (ax,) = style.figure(height=3.6)
    known = {"memory": 0.0, "compute": 1.0}
    if unknown := {word for row in labels for word in row} - set(known):
        raise MinillmError(f"a bound is 'memory' or 'compute', got {sorted(unknown)}")
    grid = np.array([[known[word] for word in row] for row in labels])
    if grid.shape != (len(contexts), len(batches)):
        raise MinillmError(f"labels are {grid.shape}, expected (contexts, batches) {(len(contexts), len(batches))}")
    for i, row in enumerate(grid):
        for j, value in enumerate(row):
            color, word = ((style.SKY, "mem"), (style.ORANGE, "comp"))[int(value)]
            ax.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=color, edgecolor="white", linewidth=1.5))
            ax.text(j, i, word, ha="center", va="center", fontsize=style.SMALL)
    ax.set(xlim=(-0.5, len(batches) - 0.5), ylim=(-0.5, len(contexts) - 0.5))
    ax.set_xticks(range(len(batches)), [str(b) for b in batches])
    ax.set_yticks(range(len(contexts)), [f"{c:,}" for c in contexts])
    ax.grid(False)
    style.name_axes(ax, "sequences decoded together (batch)", "context (tokens)", title)
    return fig


# Helpers ------------------------------------------------------------------------------------------------------------


def _rate_unit(peak: float) -> tuple[float, str]:
    return (1e12, "T") if peak >= 1e13 else (1e9, "G")


def _noun(unit: str) -> str:
    return {"s": "time", "B/s": "bandwidth", "FLOP/s": "arithmetic", "B": "size", "tok/s": "speed"}.get(unit, "value")


def _handle(s: Series, i: int) -> Line2D:
    color, marker = style.PALETTE[i % len(style.PALETTE)], style.MARKERS[i % len(style.MARKERS)]
    handle = Line2D([], [], linestyle="none", marker=marker, markersize=7, color=color, label=s.name)
    handle.set_markerfacecolor(color if s.measured else "white")
    return handle


def _draw_series(ax: Axes, s: Series, i: int, unit: float) -> None:
    h, color = _handle(s, i), style.PALETTE[i % len(style.PALETTE)]
    x, y = np.array([p[0] for p in s.points]), np.array([p[1] for p in s.points]) / unit
    if s.measured:
        ax.plot(x, y, color=color, linewidth=0.8, alpha=0.5, zorder=3)
    ax.plot(x, y, linestyle="none", marker=h.get_marker(), markersize=7, color=color,
            markerfacecolor=h.get_markerfacecolor(), zorder=4)  # fmt: skip
    for at, rate, word in zip(x, y, s.words):
        style.label(ax, at, rate, word, color, ha="center", dx=0, dy=-11 if s.measured else 10)


def _corner(ax: Axes, text: str, color: str, ha: str) -> None:
    """A remark in the upper left or right corner."""
    x = 0.02 if ha == "left" else 0.98
    ax.text(x, 0.97, text, transform=ax.transAxes, ha=ha, va="top", fontsize=style.SMALL, color=color)


def _mark(ax: Axes, x: float, word: str) -> None:
    """A dotted vertical line with a word at its top."""
    ax.axvline(x, color=style.GREY, linestyle=":", linewidth=1)
    ax.annotate(word, (x, 1.0), (-4, -4), xycoords=("data", "axes fraction"), textcoords="offset points", ha="right",
                va="top", fontsize=style.SMALL, color=style.GREY)  # fmt: skip


def _label_ends(ax: Axes, ends: list[tuple[float, float, str, str]], log_y: bool) -> None:
    """Names at the right ends of lines, pushed apart where they would overlap (distances in points)."""
    fig = ax.figure
    fig.canvas.draw()  # fixes the transform
    ordered = sorted(ends, key=lambda e: e[1])
    height = [ax.transData.transform((x, y))[1] * 72 / style.DPI for x, y, _, _ in ordered]
    placed: list[float] = []
    for h in height:
        placed.append(max(h, placed[-1] + 12) if placed else h)
    for (x, y, name, color), h, at in zip(ordered, height, placed):
        style.label(ax, x, y, name, color, dx=6, dy=at - h, annotation_clip=False)
