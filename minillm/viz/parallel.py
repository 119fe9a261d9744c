"""Pictures of lesson 14: a layer on ranks, what a sum costs, when ranks pay, a pipeline's timetable and bubble, plans.

Pure functions from data to figure. Times in seconds, bytes in bytes, unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minillm.errors import MinillmError
from minillm.parallel.pipeline import bubble
from minillm.roofline.comm import Link, Sample
from minillm.viz import style
from minillm.viz.units import si

TERMS = {"compute": style.BLUE, "all_reduce": style.VERMILLION, "all_gather": style.ORANGE, "send": style.PURPLE,
         "idle": "#DDDDDD"}  # fmt: skip
SPEAKS = ("all_reduce", "all_gather", "send")
WHOLE = "#CCCCCC"  # what every rank has


def layer_figure(ranks: int = 2) -> Figure:
    """A layer of a transformer on so many ranks, as products of matrices: what is grey all have, a color is one rank's.

    Matrices stand as in x A = y, so a column-parallel one is cut by its columns. Drawn for 2 to 4 ranks.
    """
    if not 2 <= ranks <= 4:
        raise MinillmError(f"a layer is drawn for 2 to 4 ranks, got {ranks}")
    fig, (ax,) = style.figure(10.5, 4.6)
    halves = (
        ("attention", "q, k, v", "whole heads", "each rank its own heads:\nnothing is said", "o"),
        ("MLP", "gate, up", "features", "each feature for itself:\nnothing is said", "down"),
    )
    for i, (half, first, what, between, second) in enumerate(halves):
        _half(ax, 5.0 * i, ranks, half, first, what, between, second)
    ax.set(xlim=(-0.9, 21.2), ylim=(9.4, -0.9))
    ax.set_aspect("equal")
    ax.set_axis_off()
    ax.grid(False)
    handles = [Patch(facecolor=WHOLE, label="whole, on every rank")]
    handles += [Patch(facecolor=style.PALETTE[r], label=f"rank {r} alone") for r in range(ranks)]
    fig.legend(handles=handles, ncols=ranks + 1, loc="outside lower center", fontsize=style.SMALL, frameon=False)
    return fig


def _half(ax: Axes, y: float, ranks: int, half: str, first: str, what: str, between: str, second: str) -> None:
    """x A, cut by columns, then B, cut by rows; N parts of a sum, and the sum. D is 2 long, F 3, the tokens 0.6."""
    rows, d, f = 0.6, 2.0, 3.0
    middle = y + 1.6

    def box(x: float, width: float, height: float, cut: str = "", top: float | None = None, color: str = WHOLE) -> None:
        top = middle - height / 2 if top is None else top
        for r in range(ranks if cut else 1):
            at = (
                (x + r * width / ranks, top) if cut == "columns" else (x, top + r * height / ranks) if cut else (x, top)
            )
            size = (width / ranks, height) if cut == "columns" else (width, height / ranks) if cut else (width, height)
            ax.add_patch(Rectangle(at, *size, facecolor=style.PALETTE[r] if cut else color, edgecolor="white", lw=1.2))

    def words(x: float, at: float, text: str, **how: Any) -> None:
        ax.text(x, at, text, ha="center", va="center", fontsize=style.SMALL, **how)

    ax.text(-0.8, y - 0.45, half, fontsize=style.SIZE, weight="bold", va="center")
    box(0.0, d, rows)
    words(1.0, middle + 0.75, "x")
    words(2.5, middle, "×")
    box(3.0, f, d, "columns")
    words(4.5, middle + 1.45, f"{first}: cut by outputs")
    words(6.5, middle, "=")
    box(7.0, f, rows, "columns")
    words(8.5, middle - 0.75, what)
    words(8.5, middle + 0.95, between, color=style.GREY)
    words(10.5, middle, "×")
    box(11.0, d, f, "rows")
    words(12.0, middle + 1.95, f"{second}: cut by inputs")
    words(13.5, middle, "=")
    step = 0.95
    top = middle - (step * (ranks - 1) + rows) / 2
    for r in range(ranks):
        box(14.0, d, rows, top=top + r * step, color=style.PALETTE[r])
        if r:
            words(15.0, top + r * step - (step - rows) / 2, "+", weight="bold")
    words(15.0, top + step * (ranks - 1) + rows + 0.45, "parts of a sum")
    words(17.3, middle, "all-reduce", color="white", weight="bold",
          bbox={"boxstyle": "rarrow,pad=0.35", "facecolor": style.BLACK, "edgecolor": "none"})  # fmt: skip
    box(18.7, d, rows)
    words(19.7, middle + 0.95, "whole again:\n+ x, norm")


def all_reduce_figure(samples: Sequence[Sample], link: Link, held_out: Sequence[int] = (), title: str = "") -> Figure:
    """Seconds of an all-reduce over its bytes, both logarithmic. Dashed: the fitted cost, and the two parts of it.

    samples: (bytes, ranks, seconds), all of one number of ranks. held_out: the sizes that the fit has not seen.
    """
    if not samples or len({ranks for _, ranks, _ in samples}) != 1:
        raise MinillmError("a picture of all-reduces needs samples, all of one number of ranks")
    ranks = samples[0][1]
    fig, (ax,) = style.figure(8.5, 3.6)
    low, high = min(n for n, *_ in samples) / 1.5, max(n for n, *_ in samples) * 1.5
    at = [low * (high / low) ** (i / 60) for i in range(61)]
    ax.plot(at, [1e6 * link.all_reduce(n, ranks) for n in at], **style.PREDICTED, label="a + 2 (N - 1) / N x bytes / B")
    thin: dict[str, Any] = {"color": style.GREY, "linewidth": 1.0, "linestyle": ":"}
    latency = link.latency(ranks)
    ax.plot(at, [1e6 * latency] * len(at), label="latency a", **thin)
    moving = [1e6 * (link.all_reduce(n, ranks) - latency) for n in at]
    ax.plot(at, moving, label="bytes / bandwidth", **(thin | {"linestyle": "-."}))
    for name, known, look in (
        ("measured, in the fit", True, {}),
        ("measured, not seen by it", False, {"fillstyle": "none"}),
    ):
        points = [(n, 1e6 * s) for n, _, s in samples if (n not in set(held_out)) == known]
        if points:
            ax.plot(*zip(*points, strict=True), **(style.MEASURED | look), label=name)
    ax.set(xscale="log", yscale="log", ylim=(min(1e6 * min(s for *_, s in samples), 1e6 * latency or 1e9) / 3, None))
    style.plain_ticks(ax)
    ax.set_xticks([n for n, *_ in samples][::2], [si(n, "B", 2) for n, *_ in samples][::2])
    ax.minorticks_off()
    style.name_axes(ax, "bytes of the tensor", "time (µs)", title or f"all-reduce over {ranks} ranks")
    ax.legend(fontsize=style.SMALL, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return fig


def ranks_figure(
    times: Mapping[str, Mapping[int, float]], title: str = "", measured: Mapping[int, float] | None = None
) -> Figure:
    """Time of a token over the number of ranks, a line for each link. Dotted: N ranks, N times as fast.

    times: name -> {ranks: seconds}; the dotted line starts at the first one's time on its smallest number of ranks.
    """
    if not times or not all(times.values()):
        raise MinillmError("a picture of ranks needs a time for some number of ranks in every line")
    fig, (ax,) = style.figure(7.5, 4.0)
    sizes = sorted({n for line in times.values() for n in line})
    first = next(iter(times.values()))
    least = min(first)
    span = [least, sizes[-1]]
    ax.plot(span, [1e3 * first[least] * least / n for n in span], color=style.GREY, linestyle=":", linewidth=1.2,
            label="N times as fast")  # fmt: skip
    for i, (name, line) in enumerate(times.items()):
        look = {"color": style.PALETTE[i], "marker": style.MARKERS[i], "linestyle": style.LINES[i % 4], "markersize": 5}
        ax.plot(list(line), [1e3 * t for t in line.values()], label=name, **look)
    if measured:
        ax.plot(list(measured), [1e3 * t for t in measured.values()], **style.MEASURED, label="measured")
    ax.set(xscale="log", yscale="log")
    style.plain_ticks(ax, x=sizes)
    low, high = ax.get_ylim()
    ax.set_yticks([n * 10**k for k in range(-3, 6) for n in (1, 2, 5) if low <= n * 10**k <= high])
    style.name_axes(ax, "ranks", "time of a token (ms)", title)
    ax.legend(fontsize=style.SMALL, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return fig


def stages_figure(panels: Mapping[str, Sequence[Sequence[tuple[float, float]]]]) -> Figure:
    """A panel for each pipeline, a row for each stage: (start, end) in seconds of each micro-batch, in order."""
    if not panels or not all(panels.values()):
        raise MinillmError("a timetable has at least one stage")
    most = max(len(rows) for rows in panels.values())
    fig, axes = style.figure(3.4 * len(panels) + 0.8, 0.9 + 0.36 * most, columns=len(panels))
    end = max(b for rows in panels.values() for row in rows for _, b in row)
    for ax, (name, rows) in zip(axes, panels.items(), strict=True):
        _stages(ax, rows)
        ax.set_xlim(0, end * 1.01)
        style.name_axes(ax, "time (s)", "stage" if ax is axes[0] else "", name)
    return fig


def _stages(ax: Axes, rows: Sequence[Sequence[tuple[float, float]]]) -> None:
    last = max(b for row in rows for _, b in row)
    for s, row in enumerate(rows):
        ax.add_patch(Rectangle((0, s - 0.4), last, 0.8, facecolor="#F7F7F7", edgecolor="#CCCCCC", hatch="///", lw=0))
        for m, (a, b) in enumerate(row):
            color = style.PALETTE[m % len(style.PALETTE)]
            ax.add_patch(Rectangle((a, s - 0.4), b - a, 0.8, facecolor=color, edgecolor="white", alpha=0.85))
            if b - a > last / 24:
                ax.text((a + b) / 2, s, str(m), ha="center", va="center", fontsize=style.SMALL - 1, color="white")
    ax.set_yticks(range(len(rows)))
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.grid(False)


def bubble_figure(measured: Mapping[tuple[int, int], float], most: int = 16) -> Figure:
    """Idle share of a pipeline over micro-batches: (S - 1) / (M + S - 1), a line for each number of stages.

    measured: (stages, micro-batches) -> idle share.
    """
    if not measured:
        raise MinillmError("a picture of bubbles needs at least one run")
    fig, (ax,) = style.figure(7.5, 3.6)
    for i, s in enumerate(sorted({s for s, _ in measured})):
        m = list(range(1, most + 1))
        look = style.PREDICTED | {"color": style.PALETTE[i]}
        ax.plot(m, [100 * bubble(s, x) for x in m], **look)
        style.label(ax, most, 100 * bubble(s, most), f"{s} stages", style.PALETTE[i])
        points = [(x, 100 * y) for (t, x), y in measured.items() if t == s]
        ax.plot(*zip(*points, strict=True), **(style.MEASURED | {"color": style.PALETTE[i]}))
    for look, name in ((style.PREDICTED, "(S - 1) / (M + S - 1)"), (style.MEASURED, "paced run")):
        ax.plot([], [], **(look | {"color": style.GREY}), label=name)
    ax.set(xlim=(0, most * 1.15), ylim=(0, None))
    ax.set_xticks([x for x in (1, 2, 4, 8, 16, 32) if x <= most])
    style.name_axes(ax, "micro-batches", "stages idle (%)", "the bubble")
    ax.legend(fontsize=style.SMALL, frameon=False, loc="upper right")
    return fig


def terms_figure(steps: Mapping[str, Mapping[str, float]], title: str = "") -> Figure:
    """A bar for each plan: where the time of its step goes. steps: name -> {"compute": s, "all_reduce": s, ...}."""
    if not steps or any(set(terms) - set(TERMS) for terms in steps.values()):
        raise MinillmError(f"a step has the terms {', '.join(TERMS)}")
    fig, (ax,) = style.figure(8.5, 0.9 + 0.34 * len(steps))
    longest = max(sum(terms.values()) for terms in steps.values())
    for i, terms in enumerate(steps.values()):
        at = 0.0
        for name, color in TERMS.items():
            taken = terms.get(name, 0.0)
            ax.add_patch(Rectangle((1e3 * at, i - 0.36), 1e3 * taken, 0.72, facecolor=color, edgecolor="white", lw=0.4))
            at += taken
        said = sum(terms.get(n, 0.0) for n in SPEAKS) / at if at else 0.0
        style.label(ax, 1e3 * at, i, f"{1e3 * at:.1f} ms, {said:.0%} talking", style.BLACK)
    ax.set_yticks(range(len(steps)), list(steps), fontsize=style.SMALL)
    ax.set(xlim=(0, 1e3 * longest * 1.35), ylim=(len(steps) - 0.5, -0.5))
    ax.grid(False, axis="y")
    style.name_axes(ax, "time of a step (ms)", "", title)
    seen = [n for n in TERMS if any(terms.get(n) for terms in steps.values())]
    handles = [Patch(facecolor=TERMS[n], label=n.replace("_", "-")) for n in seen]
    fig.legend(handles=handles, ncols=len(seen), loc="outside lower center", fontsize=style.SMALL, frameon=False)
    return fig
