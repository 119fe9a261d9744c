"""Pictures of lesson 15: a handoff in time, the break-even, goodput over load, and what piles up.

Every function takes plain data and returns a matplotlib figure. Data are in seconds, bytes and requests/s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minillm.errors import MinillmError
from minillm.viz import style

# What happens in a lane of a handoff, in the order in which it happens.
KINDS = {
    "compute": (style.ORANGE, "computes the prompt"), "send": (style.BLUE, "on the line"),
    "wait": ("#D0D0D0", "waits"), "decode": (style.GREEN, "first token"),
}  # fmt: skip
Span = tuple[str, float, float, str]  # lane, from, to (seconds), kind
PAYS = 1.1


def handoff_figure(panels: Mapping[str, Sequence[Span]], title: str = "") -> Figure:
    """A panel a way of handing over: lanes over one time axis (ms), a box a span, a line where the last one ends."""
    if not panels or not all(panels.values()):
        raise MinillmError("a handoff without spans cannot be drawn; give each panel at least one")
    if odd := [kind for spans in panels.values() for *_, kind in spans if kind not in KINDS]:
        raise MinillmError(f"a span is one of {', '.join(KINDS)}, got {odd[0]!r:.60}")
    lanes = {name: list(dict.fromkeys(lane for lane, *_ in spans)) for name, spans in panels.items()}
    fig, axes = style.figure(8.5, 0.9 + sum(0.45 * len(x) + 0.5 for x in lanes.values()), rows=len(panels))
    most = max(end for spans in panels.values() for _, _, end, _ in spans)
    for ax, (name, spans) in zip(axes, panels.items(), strict=True):
        for lane, start, end, kind in spans:
            y = -lanes[name].index(lane)
            box = Rectangle((1e3 * start, y - 0.36), 1e3 * (end - start), 0.72, facecolor=KINDS[kind][0],
                            edgecolor="white", linewidth=0.4)  # fmt: skip
            ax.add_patch(box)
        last = 1e3 * max(end for _, _, end, _ in spans)
        ax.axvline(last, color=style.BLACK, linestyle=":", linewidth=1)
        style.label(ax, last, 0.35 - len(lanes[name]) / 2, f"{last:,.3g} ms", dx=3)
        ax.set_xlim(0, 1.13e3 * most)
        ax.set_ylim(0.5 - len(lanes[name]), 0.5)
        ax.set_yticks([-i for i in range(len(lanes[name]))], lanes[name], fontsize=style.SMALL)
        ax.grid(False, axis="y")
        style.name_axes(ax, "", "", name)
    axes[-1].set_xlabel("time (ms)", fontsize=style.SIZE)
    used = [k for k in KINDS if any(k == kind for spans in panels.values() for *_, kind in spans)]
    handles = [Patch(facecolor=KINDS[k][0], label=KINDS[k][1]) for k in used]
    fig.legend(handles=handles, ncols=4, loc="outside upper right", fontsize=style.SMALL, frameon=False, title=title)
    return fig


def break_even_figure(
    panels: Mapping[str, Sequence[Mapping[str, Any]]], marks: Mapping[str, float] | None = None
) -> Figure:
    """A map a panel: bandwidth against prompt length; colour and number are split over co-located goodput.

    rows as of `split_planner.break_even`, of a full grid. A cell where a split pays is framed. marks: name -> bytes/s,
    written over the columns.
    """
    if not panels or not all(panels.values()):
        raise MinillmError("a map needs rows: prompt_tokens, bandwidth and gain of every cell of a grid")
    columns = 2 if len(panels) == 4 else min(3, len(panels))
    rows_of = -(-len(panels) // columns)
    fig, axes = style.figure(1.2 + 3.6 * columns, 0.6 + 2.4 * rows_of, columns=columns, rows=rows_of)
    norm = LogNorm(0.25, 4.0)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    for ax, (name, rows) in zip(axes, panels.items(), strict=False):
        prompts = sorted({r["prompt_tokens"] for r in rows})
        bandwidths = sorted({r["bandwidth"] for r in rows})
        at = {(r["prompt_tokens"], r["bandwidth"]): r for r in rows}
        if len(at) != len(prompts) * len(bandwidths):
            raise MinillmError(f"{name}: {len(at)} cells are no grid of {len(prompts)} x {len(bandwidths)}")
        for y, m in enumerate(prompts):
            for x, b in enumerate(bandwidths):
                _cell(ax, x, y, at[m, b], norm)
        ax.set_xlim(-0.5, len(bandwidths) - 0.5)
        ax.set_ylim(-0.5, len(prompts) - 0.5)
        ax.set_xticks(range(len(bandwidths)), [f"{b / 1e9:g}" for b in bandwidths])
        ax.set_yticks(range(len(prompts)), [f"{m:,}" for m in prompts])
        ax.grid(False)
        style.name_axes(
            ax,
            "bandwidth of the line (GB/s)" if ax in axes[-columns:] else "",
            "prompt (tokens)" if ax in axes[::columns] else "",
            name,
        )
        for mark, bandwidth in (marks or {}).items():
            at_x = float(np.interp(math.log(bandwidth), [math.log(b) for b in bandwidths], range(len(bandwidths))))
            ax.axvline(at_x, color=style.GREY, linestyle=":", linewidth=1)
            style.label(ax, at_x, len(prompts) - 0.62, mark, style.GREY, dx=2)
    lost = any(math.isinf(row["gain"]) for rows in panels.values() for row in rows)
    never = " (∞: together they cannot keep it)" if lost else ""
    handles = [
        Patch(
            facecolor=_color(2.0, norm),
            edgecolor=style.BLACK,
            linewidth=1.6,
            label=f"a split pays: {PAYS:g} or more" + never,
        ),
        Patch(facecolor=_color(0.5, norm), label="stay together"),
    ]
    fig.legend(handles=handles, ncols=2, loc="outside lower center", fontsize=style.SMALL, frameon=False)
    return fig


def _color(gain: float, norm: LogNorm) -> Any:
    import matplotlib

    return matplotlib.colormaps["PuOr"](float(norm(min(4.0, max(0.25, gain)))))


def _cell(ax: Any, x: int, y: int, row: Mapping[str, Any], norm: LogNorm) -> None:
    gain, pays = row["gain"], row["gain"] >= PAYS
    box = Rectangle((x - 0.47, y - 0.46), 0.94, 0.92, facecolor=_color(gain, norm),
                    edgecolor=style.BLACK if pays else "white", linewidth=1.6 if pays else 0.4)  # fmt: skip
    ax.add_patch(box)
    words = "∞" if math.isinf(gain) else "neither" if not row["split"] and not row["colocated"] else f"{gain:.2f}"
    dark = not 0.4 < gain < 2.6 and words != "neither"
    ax.text(x, y, words, ha="center", va="center", fontsize=style.SMALL, color="white" if dark else style.BLACK)


def load_figure(
    rows: Sequence[Mapping[str, Any]], paced: Mapping[str, Sequence[tuple[float, float]]] | None = None, slo: str = ""
) -> Figure:
    """Share of requests in time over the offered rate: lines predicted, marks what a paced fleet did.

    rows: as of `split_planner.over_load`. paced: "colocated" or "split" -> (rate, share) of each run.
    """
    if not rows:
        raise MinillmError("a curve over the load needs rows, one an offered rate")
    fig, (ax,) = style.figure(7.5, 3.6)
    for kind, color, line, marker in (("colocated", style.ORANGE, "-", "s"), ("split", style.BLUE, "--", "o")):
        points = [(r["rate"], r[kind]["ok"]) for r in rows if r[kind] is not None]
        if not points:
            continue
        name = next(r[kind]["name"] for r in rows if r[kind] is not None)
        ax.plot(*zip(*points, strict=True), color=color, linestyle=line, linewidth=1.8, label=f"{name}, predicted")
        if done := (paced or {}).get(kind):
            ax.plot(
                *zip(*done, strict=True), color=color, linestyle="none", marker=marker, label=f"{name}, paced fleet"
            )
    ax.axhline(0.9, color=style.GREY, linewidth=0.8)
    style.label(ax, 0, 0.9, "nine in ten", style.GREY, dx=1, dy=-7)
    ax.set(ylim=(-0.03, 1.06), xlim=(0, 1.03 * max(r["rate"] for r in rows)))
    style.name_axes(ax, "offered (requests/s)", f"share in time{f' ({slo})' if slo else ''}")
    ax.legend(fontsize=style.SMALL, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return fig


def pile_up_figure(panels: Mapping[str, Sequence[Any]]) -> Figure:
    """A panel a fleet: prompts that wait, requests that wait at decode, and the share of decode's blocks, over time.

    panels: name -> samples with time (s), input_queue, decode_queue and kv_share, as of `paced.FleetRun`.
    """
    if not panels or not all(panels.values()):
        raise MinillmError("a pile-up without samples cannot be drawn; give each fleet at least one")
    fig, axes = style.figure(3.6 * len(panels) + 1.4, 3.4, columns=len(panels))
    most = max(1, *(max(s.input_queue, s.decode_queue) for samples in panels.values() for s in samples))
    for ax, (name, samples) in zip(axes, panels.items(), strict=True):
        times = [s.time for s in samples]
        ax.plot(times, [s.input_queue for s in samples], color=style.ORANGE, label="prompts that wait for prefill")
        ax.plot(
            times,
            [s.decode_queue for s in samples],
            color=style.BLUE,
            linestyle="--",
            label="requests that wait at decode",
        )
        right = ax.twinx()
        right.plot(
            times,
            [100 * s.kv_share for s in samples],
            color=style.GREEN,
            linestyle=":",
            label="KV blocks at decode in use",
        )
        right.set_ylim(0, 105)
        right.spines[["top"]].set_visible(False)
        right.tick_params(labelsize=style.SMALL, labelright=ax is axes[-1])
        ax.set_ylim(-0.03 * most, 1.05 * most)
        style.name_axes(ax, "time (s)", "requests" if ax is axes[0] else "", name)
        if ax is axes[-1]:
            right.set_ylabel("blocks (%)", fontsize=style.SIZE, color=style.GREEN)
    handles, labels = axes[0].get_legend_handles_labels()
    more = right.get_legend_handles_labels()
    fig.legend([*handles, *more[0]], [*labels, *more[1]], ncols=3, loc="outside lower center", fontsize=style.SMALL,
               frameon=False)  # fmt: skip
    return fig


def worst_figure(
    predicted: Mapping[str, float], measured: Mapping[str, float], first: Mapping[str, float | None] | None = None
) -> Figure:
    """The longest wait of a stream for a token, predicted and measured, and the newcomer's first token; seconds."""
    if not measured or set(predicted) != set(measured):
        raise MinillmError(f"each way needs a prediction and a measurement, got {list(predicted)} and {list(measured)}")
    fig, (left, right) = style.figure(9.5, 1.2 + 0.55 * len(measured), columns=2)
    for i, name in enumerate(measured):
        left.plot(1e3 * predicted[name], -i, color=style.BLUE, marker="|", markersize=18, markeredgewidth=2.5,
                  linestyle="none", label="predicted" if not i else "_")  # fmt: skip
        left.plot(1e3 * measured[name], -i, **style.MEASURED, label="measured" if not i else "_")
        if first and (seconds := first.get(name)) is not None:
            right.plot(1e3 * seconds, -i, **style.MEASURED)
    left.set_xscale("log")
    for ax in (left, right):
        ax.set_ylim(0.5 - len(measured), 0.5)
        ax.set_yticks([-i for i in range(len(measured))], list(measured) if ax is left else [""] * len(measured))
    right.set_xlim(0, 1.08 * right.dataLim.xmax if right.lines else None)  # no mark is cut at the edge
    style.plain_ticks(left)
    style.name_axes(left, "worst gap of a stream (ms)", "", "those who were there")
    style.name_axes(right, "first token of the document (ms)", "", "the one who came")
    left.set_yticks([-i for i in range(len(measured))], list(measured), fontsize=style.SMALL)
    fig.legend(loc="outside lower center", ncols=2, fontsize=style.SMALL, frameon=False)
    return fig
