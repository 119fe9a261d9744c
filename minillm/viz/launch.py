"""Pictures of lesson 07: what a call costs, where the microseconds of a decode step go, host and device side by side.

Every function takes plain numbers and returns a matplotlib figure; times in seconds. `launched` and `replayed` are the
two models of time behind the lanes: a host that launches kernel after kernel, and a graph that is launched once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minillm.errors import MinillmError
from minillm.viz import style

# What a recorded call does, and its look in every picture here.
KINDS = {
    "product": (style.BLUE, ""),
    "attention": (style.GREEN, ".."),
    "small operator": (style.VERMILLION, ""),
    "view": (style.SKY, "//"),
    "Python and rest": (style.ORANGE, "xx"),
    "weights and FLOPs": (style.BLUE, ""),
    "calls": (style.VERMILLION, ""),
}


@dataclass(frozen=True)
class Lanes:
    """When the host was busy with each launch and the device with each kernel: (begin, end) in seconds."""

    host: tuple[tuple[float, float], ...]
    device: tuple[tuple[float, float], ...]

    @property
    def seconds(self) -> float:
        return max(self.host[-1][1], self.device[-1][1])

    @property
    def idle(self) -> float:
        """Share of the step in which the device has nothing to do."""
        return 1 - sum(b - a for a, b in self.device) / self.seconds


def launched(kernels: Sequence[float], host: float) -> Lanes:
    """Each launch takes the host `host` seconds; a kernel begins when it is launched and the one before it is over."""
    _judge(kernels, host)
    calls, work, end = [], [], 0.0
    for i, seconds in enumerate(kernels):
        calls.append((i * host, (i + 1) * host))
        begin = max(end, (i + 1) * host)
        end = begin + seconds
        work.append((begin, end))
    return Lanes(tuple(calls), tuple(work))


def replayed(kernels: Sequence[float], launch: float, gap: float = 0.0) -> Lanes:
    """One launch of `launch` seconds for all kernels, which then follow each other at a distance of `gap`."""
    _judge(kernels, launch)
    work, end = [], launch - gap
    for seconds in kernels:
        work.append((end + gap, end + gap + seconds))
        end = work[-1][1]
    return Lanes(((0.0, launch),), tuple(work))


def _judge(kernels: Sequence[float], host: float) -> None:
    if not kernels or min(kernels) <= 0 or host <= 0:
        raise MinillmError(f"lanes need kernels and launches of more than 0 s, got {list(kernels)[:4]!r} and {host!r}")


def knee_figure(elements: Sequence[int], seconds: Sequence[float], overhead: float, bandwidth: float) -> Figure:
    """Time of x + y against the size of x: flat while it costs a call, rising once it costs its bytes (fp32)."""
    fig, (ax,) = style.figure(7.5, 3.8)
    moved = [12 * n / bandwidth for n in elements]  # two numbers read, one written, four bytes each
    ax.plot(elements, [1e6 * (overhead + s) for s in moved], label="predicted: call + bytes", **style.PREDICTED)
    ax.plot(elements, [1e6 * s for s in moved], color=style.GREY, linestyle=":", label="bytes alone")
    ax.plot(elements, [1e6 * s for s in seconds], label="measured", **style.MEASURED)
    ax.set(xscale="log", yscale="log")
    low = min(1e6 * min(seconds), 1e6 * overhead) / 6
    ax.set_ylim(low, 2e6 * max(seconds))
    knee = overhead * bandwidth / 12
    ax.axvline(knee, color=style.GREY, linewidth=1.0)
    style.label(ax, knee, low, f"bytes = call: {knee:,.0f} numbers", style.GREY, dx=5, dy=9)
    ax.legend(fontsize=style.SMALL, loc="upper left", frameon=False)
    style.plain_ticks(ax)
    style.name_axes(ax, "numbers in x (fp32)", "time of x + y (µs)")
    return fig


def account_figure(bars: Mapping[str, Mapping[str, float]], title: str = "") -> Figure:
    """Stacked bars, one a row: {row: {kind: seconds}}. Kinds keep their colour and order from row to row."""
    fig, (ax,) = style.figure(8.0, 1.3 + 0.62 * len(bars))
    longest = max(sum(max(0.0, s) for s in parts.values()) for parts in bars.values())
    for row, parts in enumerate(bars.values()):
        left = 0.0
        for kind, seconds in parts.items():
            color, hatch = _look(kind)
            width = max(0.0, seconds)
            ax.barh(row, 1e3 * width, 0.62, 1e3 * left, color=color, hatch=hatch, edgecolor="white", linewidth=0.8)
            if width > 0.07 * longest:
                _inside(ax, 1e3 * (left + width / 2), row, f"{1e3 * width:.3g}", bool(hatch))
            left += width
        style.label(ax, 1e3 * left, row, f"{1e3 * left:.3g} ms")
    ax.set_yticks(range(len(bars)), list(bars), fontsize=style.SIZE)
    ax.invert_yaxis()
    ax.set_xlim(0, 1e3 * longest * 1.14)
    ax.grid(False, axis="y")
    kinds = dict.fromkeys(kind for parts in bars.values() for kind in parts)
    _legend(fig, kinds)
    style.name_axes(ax, "time (ms)", "", title)
    return fig


def timeline_figure(calls: Sequence[tuple[str, str, float]], title: str = "") -> Figure:
    """Calls one after the other, (name, kind, seconds) each, drawn to scale in two rows of equal length."""
    fig, axes = style.figure(9.0, 3.6, rows=2)
    ends, clock = [], 0.0
    for _, _, seconds in calls:
        clock += seconds
        ends.append(clock)
    cut = min(range(len(calls)), key=lambda i: max(ends[i], clock - ends[i])) + 1
    pieces = [p for p in (calls[:cut], calls[cut:]) if p]
    width = 1e6 * max(sum(s for _, _, s in piece) for piece in pieces)
    start = 0.0
    for ax, piece in zip(axes, pieces, strict=False):
        left = start
        for name, kind, seconds in piece:
            color, hatch = _look(kind)
            ax.barh(0, 1e6 * seconds, 0.9, left, color=color, hatch=hatch, edgecolor="white", linewidth=0.6)
            if 1e6 * seconds > 0.05 * width:
                _inside(ax, left + 5e5 * seconds, 0, name.replace(" ", "\n"), bool(hatch))
            left += 1e6 * seconds
        ax.set(xlim=(start, start + width), ylim=(-0.5, 0.5), yticks=[])
        ax.grid(False)
        ax.spines["left"].set_visible(False)
        start = left
    for ax in axes[len(pieces) :]:
        ax.set_axis_off()
    _legend(fig, dict.fromkeys(kind for _, kind, _ in calls))
    style.name_axes(axes[0], "", "", title)
    style.name_axes(axes[len(pieces) - 1], "time since the layer began (µs)", "")
    return fig


def size_figure(
    weights: Sequence[float], bytes_alone: Sequence[float], calls: float, predicted: Sequence[float],
    measured: Sequence[float],
) -> Figure:  # fmt: skip
    """Seconds of a decode step against bytes of weights, for models with the same number of calls."""
    fig, (ax,) = style.figure(7.5, 4.0)
    mb = [w / 1e6 for w in weights]
    ms = lambda values: [1e3 * v for v in values]
    ax.plot(mb, ms(bytes_alone), color=style.GREY, linestyle=":", linewidth=1.6)
    ax.axhline(1e3 * calls, color=style.GREEN, linewidth=1.4, linestyle="-.")
    ax.plot(mb, ms(predicted), label="predicted: work + calls", **style.PREDICTED)
    ax.plot(mb, ms(measured), label="measured", **style.MEASURED)
    ax.set(xscale="log", yscale="log")
    ax.set_ylim(1e3 * min(*bytes_alone, calls) / 1.6, 4e3 * max(*measured, *predicted))
    style.label(ax, mb[0], 1e3 * bytes_alone[0], "bytes alone", style.GREY, dx=10, dy=-2)
    style.label(ax, mb[-1], 1e3 * calls, "calls alone", style.GREEN, dx=0, dy=-9, ha="right")
    ax.legend(fontsize=style.SMALL, loc="upper left", frameon=False)
    style.plain_ticks(ax)
    style.name_axes(ax, "bytes of weights (MB)", "time of one decode step (ms)")
    return fig


def batches_figure(batches: Sequence[int], models: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """A decode step over that of one stream, against the batch: {model: (predicted seconds, measured seconds)}."""
    fig, (ax,) = style.figure(7.5, 3.9)
    for i, (name, (predicted, measured)) in enumerate(models.items()):
        color, mark = style.PALETTE[i], style.MARKERS[i]
        ax.plot(batches, [p / predicted[0] for p in predicted], color=color, linestyle="--", linewidth=1.6)
        ax.plot(batches, [m / measured[0] for m in measured], mark, color=color, markersize=6.5, label=name)
    ax.plot(batches, batches, color=style.GREY, linestyle=":", linewidth=1.2)
    middle = len(batches) // 2
    style.label(ax, batches[middle], batches[middle], "one after the other", style.GREY, dx=-8, dy=6, ha="right")
    ax.set(xscale="log", yscale="log")
    ax.set_ylim(0.6, 1.4 * batches[-1])
    style.plain_ticks(ax, batches)
    ax.legend(fontsize=style.SMALL, loc="upper left", frameon=False, bbox_to_anchor=(0, 0.98))
    title = "dashed: predicted; points: measured here"
    style.name_axes(ax, "streams decoded together", "step time, one stream = 1", title)
    return fig


def lanes_figure(lanes: Mapping[str, Lanes], until: float | None = None) -> Figure:
    """Host above device for each way of launching, on one time axis (µs); `until` cuts the axis."""
    fig, axes = style.figure(8.5, 1.0 + 1.25 * len(lanes), rows=len(lanes))
    end = 1e6 * (until or max(way.seconds for way in lanes.values()))
    for ax, (name, way) in zip(axes, lanes.items(), strict=True):
        for row, spans, color in ((1, way.host, style.ORANGE), (0, way.device, style.BLUE)):
            bars = [(1e6 * a, 1e6 * (b - a)) for a, b in spans]
            ax.broken_barh(bars, (row - 0.38, 0.76), facecolors=color, edgecolors="white", linewidth=0.7)
        ax.set(xlim=(0, end), ylim=(-0.6, 1.6))
        ax.set_yticks([1, 0], ["host", "device"], fontsize=style.SIZE)
        ax.grid(False, axis="y")
        text = f"{name}: {1e6 * way.seconds:,.0f} µs, device idle {way.idle:.0%} of it"
        style.name_axes(ax, "", "", text)
    style.name_axes(axes[-1], "time (µs)", "", axes[-1].get_title(loc="left"))
    return fig


def lanes_explorer() -> Any:
    """A widget: kernels of a step, seconds of a launch and of a kernel; it draws `lanes_figure`."""
    import ipywidgets as w

    wide = {"style": {"description_width": "150px"}, "layout": w.Layout(width="520px"), "continuous_update": False}
    count = w.IntSlider(min=3, max=60, value=30, description="kernels", **wide)
    host = w.FloatSlider(min=0.5, max=60, value=4, step=0.5, description="a launch (µs)", **wide)
    kernel = w.FloatSlider(min=0.5, max=60, value=1.5, step=0.5, description="a kernel (µs)", **wide)
    picture = w.Image(format="png")

    def redraw(_: Any = None) -> None:
        kernels = [1e-6 * kernel.value] * count.value
        ways = {
            "launched one by one": launched(kernels, 1e-6 * host.value),
            "replayed as a graph": replayed(kernels, 8e-6, 1e-6),
        }
        picture.value = style.png(lanes_figure(ways))

    for control in (count, host, kernel):
        control.observe(redraw, names="value")
    redraw()
    return w.VBox([count, host, kernel, picture])


def pays_figure(
    batches: Sequence[int], device: Mapping[str, Sequence[float]], host: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
) -> Figure:  # fmt: skip
    """Device time of a decode step against the batch, and the host's launches as horizontal lines: {model: seconds}.

    measured: {model: {side: seconds of each batch}}, drawn as points.
    """
    fig, axes = style.figure(9.0, 3.5 if measured is None else 3.9, columns=len(device))
    seen = [s for sides in (measured or {}).values() for times in sides.values() for s in times]
    top = 2e3 * max([*seen, *(max(*device[m], *host[m].values()) for m in device)])
    low = 0.5e3 * min(min(min(device[m]), *host[m].values()) for m in device)
    for i, (ax, (model, seconds)) in enumerate(zip(axes, device.items(), strict=True)):
        ax.plot(batches, [1e3 * s for s in seconds], color=style.BLUE, marker="o", markersize=4, linewidth=1.8)
        for j, (name, launches) in enumerate(host[model].items()):
            color = (style.VERMILLION, style.GREEN, style.PURPLE)[j]
            ax.axhline(1e3 * launches, color=color, linestyle=style.LINES[j + 1], linewidth=1.5)
            if i == 0:
                style.label(ax, batches[0], 1e3 * launches, name, color, dx=0, dy=-9 if j else 7)
        for j, (side, times) in enumerate((measured or {}).get(model, {}).items()):
            color, mark = ((style.VERMILLION, "s"), (style.BLUE, "D"))[j % 2]
            ms = [1e3 * s for s in times]
            ax.plot(batches, ms, mark, color=color, markersize=5.5, linestyle="none", label=f"{side}, measured")
        ax.set(xscale="log", yscale="log", ylim=(low, top))
        style.plain_ticks(ax, [b for b in batches if b in (1, 4, 16, 64, 256)])
        style.name_axes(ax, "streams decoded together", "time a step (ms)" if i == 0 else "", model)
    style.label(axes[0], batches[0], 1e3 * next(iter(device.values()))[0], "device", style.BLUE, dx=0, dy=-11)
    if measured:
        fig.legend(*axes[0].get_legend_handles_labels(), fontsize=style.SMALL, loc="outside upper right", ncols=2,
                   frameon=False)  # fmt: skip
    return fig


def _look(kind: str) -> tuple[Any, str]:
    return KINDS.get(kind, (style.PURPLE, "\\\\"))


def _inside(ax: Axes, x: float, y: float, text: str, hatched: bool) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85} if hatched else None
    color = style.BLACK if hatched else "white"
    ax.text(x, y, text, color=color, fontsize=style.SMALL - 1, ha="center", va="center", bbox=box)


def _legend(fig: Figure, kinds: Mapping[str, Any]) -> None:
    patches = [Patch(facecolor=_look(k)[0], hatch=_look(k)[1], edgecolor="white", label=k) for k in kinds]
    fig.legend(handles=patches, fontsize=style.SMALL, loc="outside upper right", ncols=4, frameon=False)
