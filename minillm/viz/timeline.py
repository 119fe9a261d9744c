"""What an engine did, request by request and step by step: the picture of an event log. Lessons 09 to 12.

`timeline` draws one log, `timelines` several over one x axis. Both are pure: a log in, a figure out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from minillm.errors import MinillmError
from minillm.events import Event
from minillm.viz import style
from minillm.viz.lives import Axis, Life, Step, lives, steps

CHUNK, DECODE, WAIT, PREEMPTED, HIT = style.ORANGE, style.BLUE, style.GREY, style.VERMILLION, style.GREEN
FREE = "#F2F2F2"
MOST = 40  # rows that can be read in one picture
X_NAME = {"step": "step", "time": "time (s)"}


def timeline(
    events: Iterable[Event], by: Axis = "step", *, budget: int | None = None, requests: Sequence[str] | None = None,
    title: str = "", width: float = 9.5, strips: Sequence[str] = ("blocks", "tokens"),
) -> Figure:  # fmt: skip
    """Requests in the order of arrival, one a row, over the steps (or seconds) of a log.

    events: an `EventLog`, or any events in order. by: "step" or "time". budget: most tokens a step may compute, drawn
    as a line. requests: ids of those to draw; otherwise the first 40. strips: what is drawn below, "blocks" (left out
    where the cache has none) and "tokens" of each step. Raises MinillmError for a log without a step.
    """
    log = list(events)
    rows, words = _chosen(lives(log, by), requests)
    every = steps(log, by)
    wanted = [s for s in strips if s == "tokens" or (s == "blocks" and every[0].free is not None)]
    if unknown := [s for s in strips if s not in ("blocks", "tokens")]:
        raise MinillmError(f"a timeline has the strips 'blocks' and 'tokens', got {unknown[0]!r}")
    heights = [_height(rows), *[0.85] * len(wanted)]
    fig, axes = style.figure(width, sum(heights) + 0.9, rows=len(heights))
    if (grid := axes[0].get_gridspec()) is not None:
        grid.set_height_ratios(heights)
    end = max(s.end for s in every)
    _rows(axes[0], rows, end, width)
    axes[0].set_title(title + words, fontsize=style.SIZE + 1, loc="left")
    for ax, what in zip(axes[1:], wanted, strict=True):
        (_blocks if what == "blocks" else _tokens)(ax, every, budget)
    _x_axes(axes, end, by)
    fig.legend(handles=_legend(rows), ncols=8, loc="outside upper left", fontsize=style.SMALL, frameon=False)
    return fig


def timelines(
    panels: Mapping[str, Iterable[Event]], by: Axis = "step", *, width: float = 9.5, ids: bool = True
) -> Figure:
    """Several logs below each other over one x axis, so that their lengths can be compared. Requests only, no strips.

    panels: title -> events. ids: name rows by request id; otherwise by number, so that the same work has the same names
    in each panel. Raises MinillmError for a log without a step.
    """
    logs = {name: list(events) for name, events in panels.items()}
    drawn = {name: _chosen(lives(log, by), None) for name, log in logs.items()}
    heights = [_height(rows) + 0.25 for rows, _ in drawn.values()]
    fig, axes = style.figure(width, sum(heights) + 0.8, rows=len(heights))
    if (grid := axes[0].get_gridspec()) is not None:
        grid.set_height_ratios(heights)
    end = max(s.end for log in logs.values() for s in steps(log, by))
    for ax, (name, (rows, words)) in zip(axes, drawn.items(), strict=True):
        if not ids:
            rows = [replace(one, request_id=str(i)) for i, one in enumerate(rows)]
        _rows(ax, rows, end, width)
        ax.set_title(name + words, fontsize=style.SIZE, loc="left")
    _x_axes(axes, end, by)
    every = [one for rows, _ in drawn.values() for one in rows]
    fig.legend(handles=_legend(every), ncols=8, loc="outside upper left", fontsize=style.SMALL, frameon=False)
    return fig


def _chosen(every: list[Life], requests: Sequence[str] | None) -> tuple[list[Life], str]:
    """The rows to draw, and what to say about those that are left out."""
    if requests is not None:
        by_id = {one.request_id: one for one in every}
        if unknown := [r for r in requests if r not in by_id]:
            raise MinillmError(f"this log has no request {unknown[0]!r}; it has {', '.join(list(by_id)[:8])}")
        return [by_id[r] for r in requests], ""
    if len(every) > MOST:
        return every[:MOST], f"   (the first {MOST} of {len(every)} requests)"
    return every, ""


def _height(rows: Sequence[Life]) -> float:
    """Inches: a row needs less when there are many."""
    return max(0.9, len(rows) * min(0.3, max(0.15, 4.5 / max(1, len(rows)))) + 0.2)


def _rows(ax: Axes, rows: Sequence[Life], end: float, width: float) -> None:
    points = 72 * (width - 1.2) / max(end, 1e-9)  # on paper, for one unit of x
    for i, one in enumerate(rows):
        y = -i
        for s in one.spans:
            _span(ax, s.kind, s.start, s.end, y, s.tokens, points)
        for m in one.marks:
            _mark(ax, m.kind, m.x, y, m.text)
    size = style.SMALL if len(rows) <= 20 else style.SMALL - 2
    ax.set_yticks([-i for i in range(len(rows))], [_name(one) for one in rows], fontsize=size)
    ax.set_ylim(-len(rows) + 0.4, 0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(False, axis="y")
    ax.set_ylabel("request", fontsize=style.SIZE)


def _name(one: Life) -> str:
    priority = f"p{one.priority:+d}" if one.priority else ""
    return " ".join(word for word in (one.request_id, priority, one.tenant) if word)


def _span(ax: Axes, kind: str, start: float, end: float, y: float, tokens: int, points: float) -> None:
    if kind in ("waiting", "preempted"):
        color, line = (WAIT, ":") if kind == "waiting" else (PREEMPTED, "--")
        ax.plot([start, end], [y, y], color=color, linestyle=line, linewidth=1.2, solid_capstyle="butt")
        return
    if kind == "held":
        ax.add_patch(
            Rectangle((start, y - 0.32), end - start, 0.64, facecolor="white", edgecolor=WAIT, hatch="////", lw=0.4)
        )
        return
    color = CHUNK if kind == "chunk" else DECODE
    ax.add_patch(Rectangle((start, y - 0.38), end - start, 0.76, facecolor=color, edgecolor="white", linewidth=0.5))
    words = f"{tokens}"
    if kind == "chunk" and points * (end - start) > 5.2 * len(words) + 2:
        ax.text((start + end) / 2, y, words, fontsize=style.SMALL - 2, ha="center", va="center")


def _mark(ax: Axes, kind: str, x: float, y: float, text: str) -> None:
    looks: dict[str, Any] = {
        "hit": {"marker": "D", "color": HIT, "markersize": 4.5},
        "preempted": {"marker": "v", "color": PREEMPTED, "markersize": 5},
        "finished": {"marker": "|", "color": style.BLACK, "markersize": 9, "markeredgewidth": 1.8},
        "aborted": {"marker": "x", "color": style.BLACK, "markersize": 6, "markeredgewidth": 1.8},
        "refused": {"marker": "x", "color": PREEMPTED, "markersize": 6, "markeredgewidth": 1.8},
    }
    ax.plot([x], [y], linestyle="none", clip_on=False, zorder=3, label=kind, **looks[kind])
    if kind == "hit":
        style.label(ax, x, y, text, HIT, dx=-5, ha="right", fontsize=style.SMALL - 2)


def _blocks(ax: Axes, every: Sequence[Step], budget: int | None) -> None:
    """Live, cached and free blocks behind each step, stacked; together they are the pool."""
    x = [s.start for s in every] + [every[-1].end]
    layers = [[getattr(s, name) or 0 for s in every] for name in ("live", "cached", "free")]
    low = [0.0] * len(x)
    for values, color, name in zip(layers, (DECODE, HIT, FREE), ("live", "cached", "free"), strict=True):
        high = [a + b for a, b in zip(low, [*values, values[-1]], strict=True)]
        ax.fill_between(x, low, high, step="post", facecolor=color, linewidth=0, alpha=0.85, label=name)
        low = high
    ax.set_ylim(0, max(low) or 1)
    ax.set_ylabel("blocks", fontsize=style.SIZE)
    ax.legend(fontsize=style.SMALL - 1, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _tokens(ax: Axes, every: Sequence[Step], budget: int | None) -> None:
    """Tokens of each step: those of decode steps below, chunks on top."""
    x, w = [s.start for s in every], [s.end - s.start for s in every]
    decode, prefill = [s.decode for s in every], [s.prefill for s in every]
    ax.bar(x, decode, w, align="edge", color=DECODE, linewidth=0, label="decode")
    ax.bar(x, prefill, w, bottom=decode, align="edge", color=CHUNK, linewidth=0, label="prompt")
    if budget is not None:
        ax.axhline(budget, color=style.BLACK, linewidth=1.2, linestyle="--", label="budget")
    ax.set_ylim(0, 1.1 * max([budget or 0, *(s.decode + s.prefill for s in every)]))
    ax.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    ax.set_ylabel("tokens", fontsize=style.SIZE)
    ax.legend(fontsize=style.SMALL - 1, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _x_axes(axes: Sequence[Axes], end: float, by: Axis) -> None:
    for ax in axes:
        ax.set_xlim(0, end * 1.01)
        ax.xaxis.set_major_locator(MaxNLocator(10, integer=by == "step"))
        if ax is not axes[-1]:
            ax.tick_params(labelbottom=False)
    axes[-1].set_xlabel(X_NAME[by], fontsize=style.SIZE)


def _legend(rows: Sequence[Life]) -> list[Any]:
    """What the picture shows, and nothing else."""
    kinds = {s.kind for one in rows for s in one.spans} | {m.kind for one in rows for m in one.marks}
    line = lambda color, how: Line2D([], [], color=color, linestyle=how, linewidth=1.2)
    point = lambda marker, color: Line2D([], [], color=color, marker=marker, linestyle="none", markersize=6)
    looks = {
        "waiting": ("waits", line(WAIT, ":")),
        "chunk": ("prompt (tokens)", Patch(facecolor=CHUNK)),
        "decode": ("decode", Patch(facecolor=DECODE)),
        "held": ("runs, gets nothing", Patch(facecolor="white", edgecolor=WAIT, hatch="////")),
        "hit": ("found in a cache (tokens)", point("D", HIT)),
        "preempted": ("preempted", Line2D([], [], color=PREEMPTED, linestyle="--", marker="v", markersize=5)),
        "finished": ("finished", point("|", style.BLACK)),
        "aborted": ("aborted", point("x", style.BLACK)),
        "refused": ("refused", point("x", PREEMPTED)),
    }
    out = []
    for kind, (words, handle) in looks.items():
        if kind in kinds:
            handle.set_label(words)
            out.append(handle)
    return out
