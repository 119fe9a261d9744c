"""Two pictures of lesson 15: the two state machines of a handoff, and the loads at which only a split keeps a promise.

Both take plain data and return a matplotlib figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch

from minillm.errors import MinillmError
from minillm.viz import style

Message = tuple[float, str, str]  # where in time (0 is the first state), "down" (P to D) or "up", what it says
P_ROW, D_ROW, WIDE, HIGH = 2.0, 0.0, 0.62, 0.42
HELD, ENDS, LOST = "#FBE7B8", "#CFE8DE", "#F6D5C3"


def protocol_figure(
    prefill: Sequence[str], decode: Sequence[str], messages: Sequence[Message], exits: Mapping[str, Sequence[str]],
    held: Sequence[str] = (),
) -> Figure:  # fmt: skip
    """P's states in a row, D's below, in order of time; messages between them; under each of D's its way out.

    exits: state of D -> events that end there in a recompute. held: D's states that hold blocks.
    """
    if not prefill or not decode or not set(exits) | set(held) <= set(decode):
        raise MinillmError(f"the ways out are those of D's states, {', '.join(decode)}; got {', '.join(exits)}")
    fig, (ax,) = style.figure(9.5, 4.5)
    for y, states in ((P_ROW, prefill), (D_ROW, decode)):
        for x, state in enumerate(states):
            colour = HELD if y == D_ROW and state in held else ENDS if state == states[-1] else "white"
            _box(ax, x, y, state.replace("_", " "), colour)
            if x:
                _arrow(ax, (x - 1 + WIDE / 2, y), (x - WIDE / 2, y), style.BLACK)
    for when, way, words in messages:
        top, bottom = (when, P_ROW - HIGH / 2 - 0.04), (when, D_ROW + HIGH / 2 + 0.04)
        start, end = (top, bottom) if way == "down" else (bottom, top)
        _arrow(ax, start, end, style.BLUE)
        style.label(ax, when, (P_ROW + D_ROW) / 2, words, style.BLUE, dx=4, linespacing=1.3)
    most = max((len(words) for words in exits.values()), default=0)
    floor = D_ROW - HIGH / 2 - 0.3 - 0.185 * most
    for state, causes in exits.items():
        at = list(decode).index(state)
        _arrow(ax, (at, D_ROW - HIGH / 2), (at, floor), style.VERMILLION)
        how = {"dx": 5, "va": "top", "linespacing": 1.25}
        style.label(ax, at, D_ROW - HIGH / 2 - 0.12, "\n".join(causes), style.VERMILLION, **how)
    if exits:
        ends_at = [list(decode).index(state) for state in exits]
        first, last = min(ends_at), max(ends_at)
        words = "recompute: D gives back what it holds, and computes the prompt"
        _box(ax, (first + last) / 2, floor - HIGH / 2, words, LOST, last - first + WIDE)
    for y, who in ((P_ROW, "P"), (D_ROW, "D")):
        ax.text(-0.62, y, who, fontsize=style.SIZE + 3, ha="center", va="center", fontweight="bold")
    handles = [Patch(facecolor=HELD, edgecolor=style.BLACK, label="holds blocks"),
               Patch(facecolor=ENDS, edgecolor=style.BLACK, label="a good end")]  # fmt: skip
    fig.legend(handles=handles, loc="outside upper right", ncols=2, fontsize=style.SMALL, frameon=False)
    ax.set(xlim=(-0.8, max(len(prefill), len(decode)) - 0.45), ylim=(floor - HIGH - 0.1, P_ROW + HIGH / 2 + 0.15))
    ax.set_axis_off()
    return fig


def _box(ax: Any, x: float, y: float, words: str, colour: str, wide: float = WIDE) -> None:
    ax.add_patch(
        FancyBboxPatch((x - wide / 2, y - HIGH / 2), wide, HIGH, boxstyle="round,pad=0,rounding_size=0.08",
                       facecolor=colour, edgecolor=style.BLACK, linewidth=1)
    )  # fmt: skip
    ax.text(x, y, words, ha="center", va="center", fontsize=style.SMALL)


def _arrow(ax: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    how = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", end, start, arrowprops=how)


def strip_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """A bar a prompt length and bandwidth, over the offered load: up to where both keep the promise, and which of the
    two keeps it alone from there on. rows: as of `split_planner.break_even`.
    """
    if not rows or not any(r["colocated"] or r["split"] for r in rows):
        raise MinillmError("strips need rows in which somebody serves: prompt_tokens, bandwidth, colocated and split")
    prompts = sorted({r["prompt_tokens"] for r in rows})
    bandwidths = sorted({r["bandwidth"] for r in rows})
    fig, (ax,) = style.figure(8.5, 1.1 + 0.27 * len(rows))
    served = [rate for r in rows for rate in (r["colocated"], r["split"]) if rate]
    left, right = min(served) / 2, 1.6 * max(served)
    ticks = {}
    for r in rows:
        y = -prompts.index(r["prompt_tokens"]) * (len(bandwidths) + 0.7) - bandwidths.index(r["bandwidth"])
        ticks[y] = f"{r['prompt_tokens']:,} tokens, {r['bandwidth'] / 1e9:g} GB/s"
        low, high = sorted(max(left, r[kind]) for kind in ("colocated", "split"))
        ax.barh(y, low - left, 0.8, left, color="#D0D0D0")
        ax.barh(y, high - low, 0.8, low, color=style.BLUE if r["split"] > r["colocated"] else style.ORANGE)
    ax.set_yticks(list(ticks), list(ticks.values()), fontsize=style.SMALL)
    ax.set_xscale("log")
    ax.set_xlim(left, right)
    style.plain_ticks(ax)
    ax.grid(False, axis="y")
    style.name_axes(ax, "offered (requests/s)", "")
    handles = [Patch(facecolor=colour, label=words) for colour, words in (
        ("#D0D0D0", "both keep the promise"), (style.ORANGE, "only co-located engines do"),
        (style.BLUE, "only a split does"))]  # fmt: skip
    fig.legend(handles=handles, loc="outside upper right", ncols=3, fontsize=style.SMALL, frameon=False)
    return fig
