"""Pictures of lesson 12: blocks over time with preemptions, the watermark, where copying beats computing, signatures.

Every function takes plain data and returns a matplotlib figure; `pressure_explorer` is the widget around the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from minillm.events import Event
from minillm.pressure import memory, recomputed
from minillm.viz import style
from minillm.viz.block_tables import FREE

POINTS = 240  # more points than pixels help nobody


def pressure_figure(panels: Mapping[str, Sequence[Event]], block_size: int | None = None) -> Figure:
    """A row for each log: its pool by step, live below, cached, free on top; a mark where a request was sent back.

    block_size draws a line as well: the share of the pool's slots that hold a token.
    """
    fig, axes = style.figure(9.0, 0.5 + 1.85 * len(panels), rows=len(panels))
    longest = max(sum(e.kind == "step" for e in log) for log in panels.values())
    for ax, (name, log) in zip(axes, panels.items(), strict=True):
        pool = list(memory(log))
        every = -(-longest // POINTS)
        x = range(0, len(pool), every)
        live, kept = (
            [100 * sum(f(m) / m.total for m in pool[i : i + every]) / len(pool[i : i + every]) for i in x]
            for f in (lambda m: m.live, lambda m: m.live + m.cached)
        )
        ax.fill_between(x, 0, 100, color=FREE, linewidth=0)
        ax.fill_between(x, live, kept, facecolor="white", edgecolor=style.GREEN, hatch="////", linewidth=0.3)
        ax.fill_between(x, 0, live, color=style.BLUE, alpha=0.85, linewidth=0)
        if block_size is not None:
            full = [100 * m.tokens / (block_size * m.total) for m in pool]
            line = [sum(full[i : i + every]) / len(full[i : i + every]) for i in x]
            ax.plot(x, line, color=style.BLACK, linewidth=1.4)
        number = {m.step: i for i, m in enumerate(pool)}
        marks = sorted(number.get(e.step, len(pool)) for e in log if e.kind == "preempted")
        ax.plot(marks, [106] * len(marks), "|", color=style.VERMILLION, markersize=7, markeredgewidth=1.2)
        ax.set(xlim=(0, longest), ylim=(0, 113))
        ax.set_yticks([0, 50, 100])
        again, total = recomputed(log)
        done = sum(e.kind == "finished" for e in log)
        words = f"{name}: {done} done in {len(pool):,} steps, {len(marks):,} sent back"
        ax.set_title(f"{words}, {again / max(1, total):.0%} of tokens computed again", fontsize=style.SMALL, loc="left")
        ax.set_ylabel("blocks (%)", fontsize=style.SIZE)
        ax.xaxis.set_major_locator(MaxNLocator(6))
    axes[-1].set_xlabel("step", fontsize=style.SIZE)
    handles: list[Any] = [
        Patch(facecolor=style.BLUE, alpha=0.85, label="live: in a block table"),
        Patch(facecolor="white", edgecolor=style.GREEN, hatch="////", label="cached"),
        Patch(facecolor=FREE, edgecolor=style.GREY, label="free"),
        axes[0].plot([], [], "|", color=style.VERMILLION, markersize=8, label="a request is sent back")[0],
    ]
    if block_size is not None:
        handles.insert(1, axes[0].plot([], [], color=style.BLACK, linewidth=1.4, label="holds tokens")[0])
    fig.legend(handles=handles, ncols=len(handles), loc="outside lower center", fontsize=style.SMALL, frameon=False)
    return fig


def watermark_figure(shares: Sequence[float], rates: Sequence[float], sent_back: Sequence[int], unit: str) -> Figure:
    """Throughput (left) and preemptions (right) against the share of blocks that admission leaves free."""
    fig, (left, right) = style.figure(9.0, 3.4, columns=2)
    x = range(len(shares))
    for ax, values, color, mark in ((left, rates, style.BLUE, "o"), (right, sent_back, style.VERMILLION, "s")):
        ax.plot(x, values, "-" + mark, color=color, linewidth=1.6, markersize=6)
        ax.set_xticks(list(x), [f"{100 * s:g}" for s in shares])
        ax.set_ylim(0, 1.14 * max(values))
        ax.margins(x=0.09)
        for i, value in enumerate(values):
            style.label(ax, i, value, f"{value:,.0f}", color, dx=0, dy=10, ha="center")
    style.name_axes(left, "blocks left free at admission (%)", unit, "throughput")
    style.name_axes(right, "blocks left free at admission (%)", "times a request was sent back", "preemptions")
    return fig


def crossover_figure(
    contexts: Sequence[int], recompute: Sequence[float], swaps: Mapping[str, Sequence[float]],
    measured: Mapping[str, Sequence[float]] | None = None, title: str = "",
) -> Figure:  # fmt: skip
    """Seconds to take a request's KV away and bring it back, against its tokens.

    recompute and each of `swaps` (a line a bandwidth) are predicted; `measured` has points under the same names.
    """
    fig, (ax,) = style.figure(7.8, 4.0)
    for i, (name, line) in enumerate({"compute again": recompute, **swaps}.items()):
        color, mark = style.PALETTE[i % len(style.PALETTE)], style.MARKERS[i % len(style.MARKERS)]
        width = 2.6 if i == 0 else 1.6
        ax.plot(contexts, [1e3 * s for s in line], linestyle=style.LINES[i], color=color, linewidth=width)
        style.label(ax, contexts[-1], 1e3 * line[-1], name, color, dx=8, dy=(0, -7, 7)[i % 3])
        if measured and name in measured:
            ax.plot(contexts, [1e3 * s for s in measured[name]], mark, color=color, markersize=6.5)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlim(contexts[0] * 0.9, contexts[-1] * (contexts[-1] / contexts[0]) ** 0.42)
    style.plain_ticks(ax, contexts)
    style.name_axes(ax, "tokens of the request", "time (ms)", title)
    return fig


def break_even_figure(
    contexts: Sequence[int], needed: Mapping[str, Sequence[float]], links: Mapping[str, float]
) -> Figure:
    """The bandwidth, bytes/s each way, above which a swap beats computing again: a line a card, and real links."""
    fig, (ax,) = style.figure(7.8, 4.2)
    for i, (name, line) in enumerate(needed.items()):
        color = style.PALETTE[i]
        ax.plot(contexts, [b / 1e9 for b in line], linestyle=style.LINES[i], color=color, linewidth=2)
        style.label(ax, contexts[-1], line[-1] / 1e9, name, color, dx=8)
    for name, bandwidth in links.items():
        ax.axhline(bandwidth / 1e9, color=style.GREY, linewidth=1.1, linestyle=":")
        style.label(ax, contexts[0], bandwidth / 1e9, name, style.GREY, dx=2, dy=7)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlim(contexts[0] * 0.9, contexts[-1] * (contexts[-1] / contexts[0]) ** 0.4)
    ax.set_ylim(top=2.5 * max(links.values()) / 1e9)
    style.plain_ticks(ax, contexts)
    words = "a link above a card's line: swap; below: compute"
    style.name_axes(ax, "tokens of the request", "link, each way (GB/s)", words)
    return fig


def signature_figure(points: Mapping[str, tuple[float, float]]) -> Figure:
    """One point a log: (share of tokens computed again, share of memory with tokens while others wait for it)."""
    fig, (ax,) = style.figure(7.0, 4.0)
    for i, (name, (again, useful)) in enumerate(points.items()):
        color, mark = style.PALETTE[i % len(style.PALETTE)], style.MARKERS[i % len(style.MARKERS)]
        ax.plot([100 * again], [100 * useful], mark, color=color, markersize=9)
        far = again > 0.6
        style.label(ax, 100 * again, 100 * useful, name, color, dx=-9 if far else 9, ha="right" if far else "left")
    ax.set(xlim=(-4, 100), ylim=(0, 106))
    corners = {(62, 66): "storm:\nmemory full, work repeated", (24, 12): "fragmentation:\nmemory empty"}
    for (x, y), words in corners.items():
        ax.text(x, y, words, fontsize=style.SMALL, color=style.GREY, style="italic", va="center")
    style.name_axes(ax, "tokens computed again (% of all computed)", "memory with tokens while others wait (%)")
    return fig


def pressure_explorer(runs: Mapping[tuple[int, float], Sequence[Event]]) -> Any:
    """Sliders over finished runs: {(blocks of the pool, watermark): log}."""
    import ipywidgets as widgets

    sizes, marks = sorted({size for size, _ in runs}), sorted({mark for _, mark in runs})
    wide: dict[str, Any] = {"style": {"description_width": "130px"}, "layout": widgets.Layout(width="420px")}
    size = widgets.SelectionSlider(options=sizes, value=sizes[0], description="blocks in the pool", **wide)
    mark = widgets.SelectionSlider(
        options=[(f"{100 * m:g} %", m) for m in marks], value=marks[0], description="watermark", **wide
    )
    picture = widgets.Image(format="png", layout=widgets.Layout(max_width="900px"))

    def redraw(_change: Any = None) -> None:
        name = f"{size.value:,} blocks, watermark {100 * mark.value:g} %"
        picture.value = style.png(pressure_figure({name: runs[size.value, mark.value]}))

    for control in (size, mark):
        control.observe(redraw, names="value")
    redraw()
    return widgets.VBox([widgets.HBox([size, mark]), picture])
