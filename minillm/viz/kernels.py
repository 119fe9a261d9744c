"""Pictures of lesson 04: what each lane of a kernel touches, and bytes with and without fusion.

Data in, figure out: the lanes are addresses that the interpreter saw, the bytes are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minillm.errors import MinillmError
from minillm.viz import style

LANE_COLORS = (style.SKY, style.ORANGE, style.GREEN, style.PURPLE, style.YELLOW)  # black text is legible on each
NOBODY = "#BBBBBB"


@dataclass(frozen=True)
class Lanes:
    """One load or store of one program: the element that each lane points at, and which lanes the mask lets through.

    elements are places in the tensor's memory, counted from its first element; below 0 or behind its end is nobody's.
    """

    program: int
    elements: Sequence[int]
    mask: Sequence[bool]


def lanes_figure(
    lanes: Mapping[str, Sequence[Lanes]], width: int, rows: int, title: str = "", unit: str = "row"
) -> Figure:
    """A map of lanes for each name: a line a program, a box a lane, with the number of the element it points at.

    The colour is that of the row of the tensor, [rows, width], that the element belongs to; grey is behind the
    tensor. A hatched box is masked: it points there and does not touch it. A thick frame marks an element that is
    touched and belongs to another row than the program's first lane.
    """
    if not lanes or width < 1 or rows < 1:
        raise MinillmError(f"lanes_figure needs lanes and a tensor of rows and columns, got [{rows}, {width}]")
    most = max(len(one.elements) for group in lanes.values() for one in group)
    programs = max(len(group) for group in lanes.values())
    fig, axes = style.figure(7.5, 0.9 + len(lanes) * (0.6 + 0.32 * programs), rows=len(lanes))
    for ax, (name, group) in zip(axes, lanes.items()):
        for y, one in enumerate(group):
            own = one.elements[0] // width
            for x, (element, on) in enumerate(zip(one.elements, one.mask)):
                row = element // width
                inside = 0 <= element < rows * width
                color = LANE_COLORS[row % len(LANE_COLORS)] if inside else NOBODY
                stolen = bool(on) and (not inside or row != own)
                ax.add_patch(
                    Rectangle(
                        (x + 0.06, y + 0.1), 0.88, 0.8, facecolor=color if on else "white",
                        edgecolor=style.VERMILLION if stolen else style.GREY, linewidth=2.2 if stolen else 0.7,
                        hatch=None if on else "////",
                    )
                )  # fmt: skip
                look: dict[str, Any] = {"fontsize": 7.5, "ha": "center", "va": "center"}
                if not on:
                    look["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
                ax.text(x + 0.5, y + 0.5, str(element), **look)
        ax.set_xlim(0, most)
        ax.set_ylim(programs, 0)
        ax.grid(False)
        ax.set_yticks([i + 0.5 for i in range(len(group))], [f"program {one.program}" for one in group])
        ax.set_xticks([i + 0.5 for i in range(most)], [str(i) for i in range(most)])
        ax.tick_params(length=0)
        ax.set_title(name, fontsize=style.SIZE, loc="left")
    axes[-1].set_xlabel("lane; the number in a box is the element it points at", fontsize=style.SIZE)
    shown = [
        Patch(
            facecolor=LANE_COLORS[r % len(LANE_COLORS)], edgecolor=style.GREY, label=f"{unit} {r}" if rows > 1 else unit
        )
        for r in range(min(rows, len(LANE_COLORS)))
    ]
    flat = [(one, e, on) for group in lanes.values() for one in group for e, on in zip(one.elements, one.mask)]
    if any(not 0 <= e < rows * width and on for _, e, on in flat):
        shown.append(Patch(facecolor=NOBODY, edgecolor=style.GREY, label="behind the tensor"))
    if any(not on for _, _, on in flat):
        shown.append(Patch(facecolor="white", edgecolor=style.GREY, hatch="////", label="masked"))
    if any(on and e // width != one.elements[0] // width for one, e, on in flat):
        shown.append(Patch(facecolor="white", edgecolor=style.VERMILLION, linewidth=2.2, label="not the program's own"))
    fig.legend(handles=shown, loc="outside lower center", ncols=min(len(shown), 3), fontsize=style.SMALL, frameon=False)
    if title:
        fig.suptitle(title, fontsize=style.SIZE + 1, x=0.01, ha="left")
    return fig


def fusion_figure(unfused: Mapping[str, Sequence[tuple[str, float]]], fused: Mapping[str, float], unit: str) -> Figure:
    """Bytes of each part: torch operator by operator, stacked, and those of one fused kernel below it.

    unfused {part: [(operator, bytes), ...]} and fused {part: bytes} have the same parts; `unit` names the numbers.
    """
    if list(unfused) != list(fused):
        raise MinillmError(f"fusion_figure wants the same parts twice, got {list(unfused)} and {list(fused)}")
    fig, (ax,) = style.figure(7.5, 0.9 + 1.05 * len(unfused))
    longest = max(sum(size for _, size in ops) for ops in unfused.values())
    ticks = []
    for i, (part, ops) in enumerate(unfused.items()):
        left = 0.0
        for j, (name, size) in enumerate(ops):
            color = LANE_COLORS[j % len(LANE_COLORS)]
            ax.barh(i - 0.2, size, 0.36, left=left, color=color, edgecolor="white", linewidth=1.0)
            if size > 0.012 * longest * len(name):
                ax.text(left + size / 2, i - 0.2, name, fontsize=7.5, ha="center", va="center")
            left += size
        ax.barh(i + 0.2, fused[part], 0.36, color=style.VERMILLION)
        style.label(ax, left, i - 0.2, f"{left:.3g}", style.GREY, dx=4)
        words = f"fused: {fused[part]:.3g}, {left / fused[part]:.1f} times less"
        style.label(ax, fused[part], i + 0.2, words, style.VERMILLION, dx=4)
        ticks.append(part)
    ax.set_yticks(range(len(ticks)), ticks)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.1 * longest)
    ax.grid(False, axis="y")
    style.name_axes(ax, unit, "")
    return fig


def shares_figure(steps: Mapping[str, tuple[float, float, float]]) -> Figure:
    """How far fusion can go in a whole step. {step: (rest, between unfused, between fused)} in seconds.

    Two bars a step, as shares of the unfused one: products and attention, and what lies between them.
    """
    fig, (ax,) = style.figure(7.5, 0.9 + 0.85 * len(steps))
    for i, (rest, before, after) in enumerate(steps.values()):
        whole = rest + before
        for y, between, color in ((i - 0.18, before, style.ORANGE), (i + 0.18, after, style.VERMILLION)):
            ax.barh(y, 100 * rest / whole, 0.32, color=style.SKY)
            ax.barh(y, 100 * between / whole, 0.32, left=100 * rest / whole, color=color)
        style.label(ax, 100, i - 0.18, f"{100 * before / whole:.2g} % between", style.VERMILLION, dx=4)
        words = f"{100 * after / (rest + after):.2g} %, {whole / (rest + after):.2f} times as fast"
        style.label(ax, 100 * (rest + after) / whole, i + 0.18, words, style.VERMILLION, dx=4)
    ax.set_yticks(range(len(steps)), list(steps))
    ax.invert_yaxis()
    ax.set_xlim(0, 148)
    ax.set_xticks(range(0, 101, 20))
    ax.grid(False, axis="y")
    handles = [
        Patch(color=style.SKY, label="products and attention"),
        Patch(color=style.ORANGE, label="between, torch operators"),
        Patch(color=style.VERMILLION, label="between, fused"),
    ]
    fig.legend(handles=handles, loc="outside upper left", ncols=3, fontsize=style.SMALL, frameon=False)
    style.name_axes(ax, "time of the step (% of the unfused one, predicted)", "")
    return fig


def beside_figure(predicted: Mapping[str, float], measured: Mapping[str, float]) -> Figure:
    """Seconds predicted (hollow bars) and measured (points) of the same names, one under the other."""
    if list(predicted) != list(measured):
        raise MinillmError(f"beside_figure wants the same names twice, got {list(predicted)} and {list(measured)}")
    fig, (ax,) = style.figure(7.5, 1.0 + 0.55 * len(predicted))
    for i, (name, seconds) in enumerate(predicted.items()):
        ax.barh(i, 1e3 * seconds, 0.5, facecolor="white", edgecolor=style.BLUE, linestyle="--", linewidth=1.6)
        ax.plot([1e3 * measured[name]], [i], "o", color=style.VERMILLION, markersize=7)
        words = f"{measured[name] / seconds:.1f} times the prediction"
        style.label(ax, 1e3 * max(seconds, measured[name]), i, words, style.GREY, dx=9)
    ax.set_yticks(range(len(predicted)), list(predicted))
    ax.invert_yaxis()
    ax.set_xlim(0, 1.5e3 * max(*predicted.values(), *measured.values()))
    ax.grid(False, axis="y")
    style.name_axes(ax, "time (ms); dashed: predicted before, points: measured here", "")
    return fig
