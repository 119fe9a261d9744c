"""Pictures of lesson 05: the tiles of attention, the state that walks over them, and the bytes that are saved.

Every function takes plain data and returns a matplotlib figure. `tiling_stepper` wraps one of them in a slider.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from minillm.errors import MinillmError
from minillm.viz import style

WHOLE, EDGE, SKIPPED = "whole", "edge", "skipped"
LOOKS: dict[str, dict[str, Any]] = {
    WHOLE: {"facecolor": style.SKY, "edgecolor": "white"},
    EDGE: {"facecolor": style.ORANGE, "edgecolor": "white", "hatch": "///"},
    SKIPPED: {"facecolor": "#F2F2F2", "edgecolor": "white"},
}
WORDS = {
    WHOLE: "every row sees every key: no mask",
    EDGE: "on the edge: masked",
    SKIPPED: "nobody may look: skipped",
}


@dataclass(frozen=True)
class Step:
    """The state of rows `first_row` to `first_row + rows` after the keys `first_key` to `first_key + keys`.

    m, l [rows] and acc [rows, d]: largest score so far, sum of exp(score - m), the same sum weighted with values.
    """

    first_row: int
    rows: int
    first_key: int
    keys: int
    m: Tensor
    l: Tensor
    acc: Tensor


def tile_kind(first_row: int, rows: int, first_key: int, keys: int, history: int = 0) -> str:
    """ "whole", "edge" or "skipped": new token i, at position history + i, sees the keys 0 to history + i."""
    if first_key > history + first_row + rows - 1:
        return SKIPPED
    return WHOLE if first_key + keys - 1 <= history + first_row else EDGE


def tiles(n: int, block_m: int, block_n: int, history: int = 0) -> list[tuple[int, int, int, int, str]]:
    """(first row, rows, first key, keys, kind) of every tile, row by row, skipped ones too. n new tokens."""
    if min(n, block_m, block_n) < 1 or history < 0:
        raise MinillmError(f"n and both tile sizes must be at least 1, got {n}, {block_m} and {block_n}")
    found = []
    for row in range(0, n, block_m):
        rows = min(block_m, n - row)
        for key in range(0, history + n, block_n):
            keys = min(block_n, history + n - key)
            found.append((row, rows, key, keys, tile_kind(row, rows, key, keys, history)))
    return found


def tile_counts(n: int, block_m: int, block_n: int, history: int = 0) -> dict[str, int]:
    """How many tiles of each kind."""
    kinds = [kind for *_, kind in tiles(n, block_m, block_n, history)]
    return {kind: kinds.count(kind) for kind in (WHOLE, EDGE, SKIPPED)}


def tiling_figure(n: int, block_m: int, block_n: int, history: int = 0) -> Figure:
    """The n x (history + n) scores that are never written, in tiles; the causal edge, element by element."""
    fig, (ax,) = style.figure(7.5, 1.3 + 5.2 * n / (history + n))
    _draw_tiles(ax, n, block_m, block_n, history)
    counts = tile_counts(n, block_m, block_n, history)
    handles = [
        Patch(**(LOOKS[kind] | {"edgecolor": "#777777"}), label=f"{counts[kind]} {WORDS[kind]}")
        for kind in (WHOLE, EDGE, SKIPPED)
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=1, fontsize=style.SMALL, frameon=False)
    return fig


def _draw_tiles(
    ax: Axes, n: int, block_m: int, block_n: int, history: int, done: int | None = None, current: int | None = None
) -> None:
    """done: how many computed tiles (skipped ones not counted) are filled; None: all. current: outlined."""
    at = 0
    for row, rows, key, keys, kind in tiles(n, block_m, block_n, history):
        look = dict(LOOKS[kind])
        if kind != SKIPPED:
            if done is not None and at >= done:
                look = {"facecolor": "white", "edgecolor": "#BBBBBB"}
            at += 1
        ax.add_patch(Rectangle((key - 0.5, row - 0.5), keys, rows, linewidth=1.2, zorder=1, **look))
        if kind != SKIPPED and current is not None and at - 1 == current:
            frame = Rectangle((key - 0.5, row - 0.5), keys, rows, linewidth=2.6, zorder=4)
            frame.set(facecolor="none", edgecolor=style.VERMILLION)
            ax.add_patch(frame)
    edge_x, edge_y = [history + 0.5], [-0.5]  # a stair: right of it lies the future
    for i in range(n):
        edge_x += [history + i + 0.5, history + i + 1.5]
        edge_y += [i + 0.5, i + 0.5]
    ax.plot(edge_x[:-1], edge_y[:-1], color=style.BLACK, linewidth=1.3, zorder=3)
    if history:
        ax.axvline(history - 0.5, color=style.GREY, linewidth=1.2, linestyle=":")
        style.label(ax, (history - 1) / 2, -0.7, "history", style.GREY, dx=0, dy=6, ha="center", annotation_clip=False)
        where = history + (n - 1) / 2
        style.label(ax, where, -0.7, "new tokens", style.GREY, dx=0, dy=6, ha="center", annotation_clip=False)
    ax.set(xlim=(-0.7, history + n - 0.3), ylim=(n - 0.3, -0.7), aspect="equal")
    ax.set_xticks(range(0, history + n, block_n))
    ax.set_yticks(range(0, n, block_m))
    ax.grid(False)
    style.name_axes(ax, "key", "query")


def state_figure(scores: Sequence[float], tile: int) -> Figure:
    """One row of scores read tile by tile: the running maximum above, the running sum below, and where it shrinks."""
    s = np.asarray(scores, dtype=float)
    if tile < 1 or s.ndim != 1 or not len(s) or not np.isfinite(s).all():
        raise MinillmError("scores must be a row of finite numbers, and the tile at least 1")
    fig, (top, bottom) = style.figure(7.5, 5.0, rows=2)
    m, l, steps = -math.inf, 0.0, []
    for start in range(0, len(s), tile):
        part = s[start : start + tile]
        new = max(m, float(part.max()))
        kept = l * math.exp(m - new)
        steps.append((start, min(start + tile, len(s)), m, new, l, kept, kept + float(np.exp(part - new).sum())))
        m, l = new, steps[-1][-1]
    top.vlines(np.arange(len(s)), min(0.0, s.min()) - 0.3, s, color=style.SKY, linewidth=3)
    top.plot(np.arange(len(s)), s, "o", color=style.BLUE, markersize=4)
    for start, stop, old, new, before, kept, after in steps:
        top.plot([start - 0.4, stop - 0.6], [new, new], color=style.VERMILLION, linewidth=2)
        middle = (start + stop - 1) / 2
        bottom.bar([middle], [kept], 0.8 * tile, color=style.BLUE)
        bottom.bar(
            [middle], [after - kept], 0.8 * tile, bottom=[kept], color=style.ORANGE, hatch="//", edgecolor="white"
        )
        if old != -math.inf and new > old:
            words = f"x {math.exp(old - new):.2f}"
            bottom.plot([middle - 0.4 * tile, middle + 0.4 * tile], [before, before], ":", color=style.VERMILLION)
            style.label(bottom, middle, max(before, after), words, style.VERMILLION, dx=0, dy=7, ha="center")
    for ax in (top, bottom):
        for edge in range(tile, len(s), tile):
            ax.axvline(edge - 0.5, color="#CCCCCC", linewidth=0.8)
        ax.set_xlim(-0.7, len(s) - 0.3)
        ax.grid(False, axis="x")
    bottom.set_ylim(0, 1.25 * max(max(b, a) for *_, b, _, a in steps))
    style.name_axes(top, "key", "score", "blue: scores; red: m, the largest so far")
    title = "blue: l of earlier tiles, rescaled (dotted: before); hatched: what the tile adds"
    style.name_axes(bottom, "key", "l = sum of exp(score - m)", title)
    return fig


def stepper_figure(n: int, block_m: int, block_n: int, steps: Sequence[Step], at: int, history: int = 0) -> Figure:
    """Where tile number `at` lies, and m, l and acc of its rows once it is folded in."""
    if not 0 <= at < len(steps):
        raise MinillmError(f"there are {len(steps)} tiles, numbered from 0; got {at}")
    step = steps[at]
    fig, (where, m_ax, l_ax, acc_ax) = style.figure(9.5, 3.6, columns=4)
    _draw_tiles(where, n, block_m, block_n, history, done=at + 1, current=at)
    keys = f"keys {step.first_key} to {step.first_key + step.keys - 1}"
    where.set_title(f"tile {at + 1} of {len(steps)}: {keys}", fontsize=style.SIZE, loc="left")
    rows = [step.first_row + i for i in range(step.rows)]
    before = steps[at - 1] if at and steps[at - 1].first_row == step.first_row else None
    for ax, name in ((m_ax, "m"), (l_ax, "l")):
        now = getattr(step, name).tolist()
        ax.barh(rows, now, 0.6, color=style.BLUE if name == "m" else style.ORANGE)
        if before is not None:
            old = getattr(before, name).tolist()
            ax.plot(old, rows, "D", color=style.BLACK, markersize=4, markerfacecolor="white")
        ax.set_ylim(rows[-1] + 0.6, rows[0] - 0.6)
        ax.set_yticks(rows)
        every = [v for s in steps for v in getattr(s, name).tolist() if math.isfinite(v)]
        ax.set_xlim(min(0.0, *every) * 1.1, max(0.1, *every) * 1.1)
        words = {"m": "m: largest score", "l": "l: sum of weights"}[name]
        style.name_axes(ax, words, "", "")
    picture = step.acc.double().numpy()
    limit = max(float(s.acc.abs().max()) for s in steps) or 1.0
    extent = (-0.5, picture.shape[1] - 0.5, rows[-1] + 0.5, rows[0] - 0.5)
    acc_ax.imshow(picture, aspect="auto", cmap="PuOr", vmin=-limit, vmax=limit, extent=extent)
    acc_ax.set_yticks(rows)
    acc_ax.grid(False)
    style.name_axes(acc_ax, f"acc: {picture.shape[1]} numbers a row", "", "")
    m_ax.set_title("bars: now; diamonds: before", fontsize=style.SMALL, loc="left")
    return fig


def tiling_stepper(n: int, block_m: int, block_n: int, steps: Sequence[Step], history: int = 0) -> Any:
    """A widget: a slider through the tiles, each drawn by `stepper_figure`."""
    import ipywidgets as w

    slider = w.IntSlider(value=0, min=0, max=len(steps) - 1, description="tile", layout=w.Layout(width="520px"))
    picture = w.Image(format="png")
    words = w.HTML()

    def redraw(_: Any = None) -> None:
        step = steps[slider.value]
        picture.value = style.png(stepper_figure(n, block_m, block_n, steps, slider.value, history))
        kind = tile_kind(step.first_row, step.rows, step.first_key, step.keys, history)
        words.value = (
            f"queries {step.first_row} to {step.first_row + step.rows - 1}, "
            f"keys {step.first_key} to {step.first_key + step.keys - 1}: {WORDS[kind]}"
        )

    slider.observe(redraw, names="value")
    redraw()
    return w.VBox([slider, picture, words])


def bytes_figure(
    lengths: Sequence[int], lines: Mapping[str, Sequence[float]], counted: Mapping[str, Mapping[int, float]],
    title: str = "",
) -> Figure:  # fmt: skip
    """Bytes against length, in MB: formulas as lines, counted ones as points in the colour of their line."""
    fig, (ax,) = style.figure(7.5, 4.2)
    for i, (name, values) in enumerate(lines.items()):
        color = style.PALETTE[i]
        ax.plot(lengths, [v / 1e6 for v in values], color=color, linestyle=style.LINES[i], linewidth=1.8, label=name)
        found = counted.get(name, {})
        ax.plot(list(found), [v / 1e6 for v in found.values()], style.MARKERS[i], color=color, markersize=7)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    style.plain_ticks(ax, lengths)
    ax.legend(fontsize=style.SMALL, loc="upper left", frameon=False)
    style.name_axes(ax, "tokens S", "moved (MB)", title or "lines: formula; points: counted")
    return fig


def times_figure(
    lengths: Sequence[int], predicted: Mapping[str, Sequence[float]], measured: Mapping[str, Mapping[int, float]],
    title: str = "",
) -> Figure:  # fmt: skip
    """Milliseconds against length: predicted as lines, measured as points."""
    fig, (ax,) = style.figure(7.5, 4.4)
    for i, (name, values) in enumerate(predicted.items()):
        color = style.PALETTE[i]
        ax.plot(lengths, [1e3 * v for v in values], color=color, linestyle=style.LINES[i], linewidth=1.8, label=name)
        found = measured.get(name, {})
        ax.plot(list(found), [1e3 * v for v in found.values()], style.MARKERS[i], color=color, markersize=7)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    style.plain_ticks(ax, lengths)
    ax.legend(fontsize=style.SMALL, loc="upper left", frameon=False)
    style.name_axes(ax, "tokens S", "time (ms)", title or "lines: predicted before; points: measured here")
    return fig
