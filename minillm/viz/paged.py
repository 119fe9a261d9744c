"""Pictures of lesson 06: memory over time, the price of a block size, decode steps, split-KV.

Every function takes plain numbers and returns a matplotlib figure. Block tables have a file of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from minillm.errors import MinillmError
from minillm.kernels.splits import split_range
from minillm.viz import style
from minillm.viz.block_tables import COLORS, FREE


class Usage(NamedTuple):
    """Memory at one moment of a simulation, in tokens: written, held by somebody, and whether anyone waits."""

    written: int
    held: int
    waiting: bool


def share_written(log: Sequence[Usage], of: int | None = None) -> float:
    """Mean share of memory that holds tokens while requests wait: of `of` tokens, or of what is held."""
    busy = [u for u in log if u.waiting]
    if not busy:
        raise MinillmError("nobody ever waited: memory that nobody wants is not wasted; send more requests")
    return sum(u.written for u in busy) / (sum(u.held for u in busy) if of is None else of * len(busy))


def memory_over_time_figure(panels: Mapping[str, Sequence[Usage]], size: int) -> Figure:
    """Each panel: how the `size` tokens of a memory are used, step by step, stacked; written below, free on top."""
    fig, axes = style.figure(9.5, 2.9, columns=len(panels))
    longest = max(len(log) for log in panels.values())
    for ax, (name, log) in zip(axes, panels.items(), strict=True):
        every = -(-longest // 240)  # means of a few steps: more points than pixels help nobody
        x = range(0, len(log), every)
        written, held = (
            [100 * sum(values[i : i + every]) / len(values[i : i + every]) / size for i in x]
            for values in ([u.written for u in log], [u.held for u in log])
        )
        ax.fill_between(x, 0, 100, color=FREE, linewidth=0)
        ax.fill_between(x, written, held, facecolor="white", edgecolor=style.ORANGE, hatch="////", linewidth=0.3)
        ax.fill_between(x, 0, written, color=style.BLUE, alpha=0.85, linewidth=0)
        ax.set(xlim=(0, longest), ylim=(0, 100))
        words = f"{name}\n{100 * share_written(log, size):.0f} % holds tokens, done at {len(log):,}"
        style.name_axes(ax, "step", "", "")
        ax.set_title(words, fontsize=style.SMALL, loc="left")
        ax.xaxis.set_major_locator(MaxNLocator(4))
    axes[0].set_ylabel("share of memory (%)", fontsize=style.SIZE)
    handles = [
        Patch(facecolor=style.BLUE, alpha=0.85, label="holds a token"),
        Patch(facecolor="white", edgecolor=style.ORANGE, hatch="////", label="held, nothing in it"),
        Patch(facecolor=FREE, edgecolor=style.GREY, label="free (holes)"),
    ]
    fig.legend(handles=handles, ncols=3, loc="outside lower center", fontsize=style.SMALL, frameon=False)
    return fig


def useful_share_figure(
    block_sizes: Sequence[int],
    predicted: Sequence[float],
    measured: Sequence[float],
    others: Mapping[str, float],
    target: float = 0.95,
) -> Figure:
    """Share of held memory with tokens in it against block size; `others`: a line each for what has no blocks."""
    fig, (ax,) = style.figure(7.5, 3.9)
    ax.plot(
        block_sizes, [100 * p for p in predicted], label="predicted: mean length and half a block", **style.PREDICTED
    )
    ax.plot(block_sizes, [100 * m for m in measured], label="measured in the simulation", **style.MEASURED)
    ax.axhline(100 * target, color=style.GREEN, linewidth=1.4)
    style.label(ax, block_sizes[-1], 100 * target, f"{100 * target:.0f} %", style.GREEN, dx=4, dy=7, ha="right")
    for name, share in others.items():
        ax.axhline(100 * share, color=style.GREY, linewidth=1.2, linestyle=":")
        style.label(ax, block_sizes[0], 100 * share, name, style.GREY, dx=0, dy=7)
    ax.set_xscale("log", base=2)
    ax.set_ylim(0, 105)
    style.plain_ticks(ax, block_sizes)
    ax.legend(fontsize=style.SMALL, loc="lower right", frameon=False, bbox_to_anchor=(1.0, 0.36))
    style.name_axes(ax, "tokens a block", "held memory that holds tokens (%)")
    return fig


def steps_figure(
    contexts: Sequence[int], predicted: Mapping[str, Sequence[float]], measured: Mapping[str, Sequence[float]]
) -> Figure:
    """Seconds of a decode step against context, a colour each for every kind of cache: line predicted, point seen."""
    fig, (ax,) = style.figure(7.5, 3.8)
    for i, (name, line) in enumerate(predicted.items()):
        color, mark = style.PALETTE[i], style.MARKERS[i]
        ax.plot(contexts, [1e3 * s for s in line], color=color, linestyle=style.LINES[i], linewidth=1.8)
        ax.plot(contexts, [1e3 * s for s in measured[name]], mark, color=color, markersize=6.5)
        style.label(ax, contexts[-1], 1e3 * line[-1], name, color, dx=8)
    ax.set_xscale("log", base=2)
    ax.set_xlim(contexts[0] * 0.9, contexts[-1] * 1.7)
    ax.set_ylim(bottom=0)
    style.plain_ticks(ax, contexts)
    style.name_axes(
        ax, "context of each sequence (tokens)", "decode step (ms)", "lines: predicted; points: measured here"
    )
    return fig


def multiprocessors_figure(heads: int, splits: Sequence[int], multiprocessors: int) -> Figure:
    """Which multiprocessors have work when one sequence of `heads` KV heads is cut into so many parts.

    Programs are dealt out in order, one each, and start again at the first when there are more than multiprocessors.
    """
    fig, axes = style.figure(2.6 * len(splits) + 0.6, 3.1, columns=len(splits))
    columns = 12
    rows = -(-multiprocessors // columns)
    for ax, parts in zip(axes, splits, strict=True):
        count = [0] * multiprocessors
        first: dict[int, int] = {}
        for program in range(heads * parts):
            count[program % multiprocessors] += 1
            first.setdefault(program % multiprocessors, program // parts)
        for i in range(multiprocessors):
            color = COLORS[first[i] % len(COLORS)] if i in first else FREE
            x, y = i % columns, -(i // columns)
            ax.add_patch(Rectangle((x, y), 0.86, 0.86, facecolor=color, edgecolor=style.GREY, linewidth=0.5))
            if count[i] > 1:
                ax.text(x + 0.43, y + 0.4, str(count[i]), fontsize=style.SMALL - 3, ha="center", va="center")
        busy = len(first)
        ax.set(xlim=(-0.2, columns), ylim=(-rows + 0.8, 1.0), aspect="equal")
        ax.set_axis_off()
        part = "1 part" if parts == 1 else f"{parts} parts"
        ax.set_title(
            f"{part}: {heads * parts} programs,\n{busy} of {multiprocessors} busy", fontsize=style.SMALL, loc="left"
        )
    return fig


def split_figure(contexts: Mapping[str, int], splits: int, tile: int) -> Figure:
    """How the kernel cuts sequences of different length into the same number of parts, in whole tiles; then the merge.

    A part without tokens is drawn as an empty box: its program ends at once.
    """
    fig, (ax,) = style.figure(8.5, 1.0 + 0.75 * len(contexts))
    longest = max(contexts.values())
    box = 0.16 * longest
    for row, (name, context) in enumerate(contexts.items()):
        y = -row
        empty = 0
        for part in range(splits):
            first, end = split_range(context, part, splits, tile)
            if first == end:
                empty += 1
                continue
            color = COLORS[part % len(COLORS)]
            ax.add_patch(
                Rectangle((first, y), end - first, 0.55, facecolor=color, alpha=0.75, edgecolor="white", linewidth=1.5)
            )
            words = f"o, lse {part}" if end - first > 0.11 * longest else str(part)
            if end - first < 0.025 * longest:
                continue  # too narrow for a word
            ax.text((first + end) / 2, y + 0.27, words, fontsize=style.SMALL - 1, ha="center", va="center")
        words = f"merge {splits - empty}" + (f", skip {empty}" if empty else "")
        ax.annotate(
            words, (1.02 * longest + box * 0.12, y + 0.27), (1.02 * longest + box * 0.3, y + 0.27),
            fontsize=style.SMALL, va="center",
        )  # fmt: skip
        ax.text(-0.01 * longest, y + 0.27, f"{name}\n{context:,} tokens", fontsize=style.SMALL, ha="right", va="center")
    ax.set(xlim=(-0.2 * longest, 1.3 * longest), ylim=(-len(contexts) + 0.7, 0.8))
    ax.set_yticks([])
    ax.set_xticks(range(0, longest + 1, _round(longest / 5)))
    ax.grid(False)
    ax.spines["left"].set_visible(False)
    style.name_axes(ax, "token of the sequence", "")
    return fig


def _round(x: float) -> int:
    power: int = 10 ** (len(str(int(x))) - 1)
    return max(1, int(x) // power * power)
