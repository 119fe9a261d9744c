"""Pictures of lesson 10: gaps in streams, a mixed batch token by token, the price of a budget, goodput.

Every function takes plain data and returns a matplotlib figure; `budget_explorer` is the widget around `plan_figure`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from minillm.errors import MinillmError
from minillm.viz import style
from minillm.viz.timeline import CHUNK, DECODE, FREE

PlannedStep = tuple[int, int, float]  # decode tokens, prompt tokens, seconds


class Priced(NamedTuple):
    """What a budget costs: worst seconds between two tokens of a stream, and seconds to the prompt's first token."""

    worst: float
    first_token: float


def gaps_figure(panels: Mapping[str, Mapping[str, Sequence[float]]], arrival: float = 0.0) -> Figure:
    """When each stream's tokens came, a mark each, in a row a stream and a panel a run; the longest gap is a bar.

    panels: name -> stream -> seconds of its tokens, rising. arrival: when the long prompt came, a dotted line. Raises
    MinillmError for a stream with fewer than two tokens: it has no gap.
    """
    rows = sum(len(streams) for streams in panels.values())
    fig, axes = style.figure(9.5, 0.9 + 0.55 * len(panels) + 0.26 * rows, rows=len(panels))
    end = max(t for streams in panels.values() for times in streams.values() for t in times)
    for ax, (name, streams) in zip(axes, panels.items(), strict=True):
        for i, (stream, times) in enumerate(streams.items()):
            if len(times) < 2:
                raise MinillmError(f"stream {stream!r} has {len(times)} tokens; a gap needs two")
            length, start = max((b - a, a) for a, b in pairwise(times))
            ax.plot([start, start + length], [-i, -i], color=style.VERMILLION, linewidth=5, solid_capstyle="butt")
            ax.plot(times, [-i] * len(times), "|", color=DECODE, markersize=9, markeredgewidth=1.4)
            ax.annotate(
                f"{length:.2f} s", (start + length, -i), (4, 0), textcoords="offset points", fontsize=style.SMALL - 1,
                va="center", color=style.VERMILLION, bbox={"facecolor": "white", "linewidth": 0, "pad": 0.6},
            )  # fmt: skip
        ax.axvline(arrival, color=style.BLACK, linewidth=1.2, linestyle=":")
        ax.set_yticks([-i for i in range(len(streams))], list(streams), fontsize=style.SMALL)
        ax.set(xlim=(min(0.0, arrival) - 0.02 * end, 1.06 * end), ylim=(0.4 - len(streams), 0.6))
        ax.grid(False, axis="y")
        ax.set_title(name, fontsize=style.SIZE, loc="left")
        if ax is not axes[-1]:
            ax.tick_params(labelbottom=False)
    axes[-1].set_xlabel("time (s)", fontsize=style.SIZE)
    handles = [
        axes[0].plot([], [], "|", color=DECODE, markersize=9, markeredgewidth=1.4, label="a token")[0],
        Patch(facecolor=style.VERMILLION, label="the stream's longest gap"),
        axes[0].plot([], [], ":", color=style.BLACK, label="the long prompt comes")[0],
    ]
    fig.legend(handles=handles, ncols=3, loc="outside upper left", fontsize=style.SMALL, frameon=False)
    return fig


def batch_figure(rows: Sequence[tuple[str, int, int]]) -> Figure:
    """One flat batch as a mask: a line for each new token, a column for each position of its own sequence.

    rows: (name, tokens computed before, new tokens). Dark: it sees itself; middle: tokens of this step; light: history
    that is read from the cache.
    """
    total = sum(n for _, _, n in rows)
    width = max(start + n for _, start, n in rows)
    grid = [
        [0 if p > start + i else 3 if p == start + i else 2 if p >= start else 1 for p in range(width)]
        for _, start, n in rows
        for i in range(n)
    ]
    fig, (ax,) = style.figure(9.0, 1.0 + 0.19 * total)
    colors = ListedColormap(["white", style.SKY, CHUNK, style.BLACK])
    ax.pcolormesh(range(width + 1), range(total + 1), grid, cmap=colors, vmin=0, vmax=3, edgecolors="white", lw=0.6)
    ax.invert_yaxis()
    ax.grid(False)
    ends = list(accumulate(n for _, _, n in rows))
    for end in ends[:-1]:
        ax.axhline(end, color=style.GREY, linewidth=1.0)
    names = [f"{name}: {n} new, {start} before" for name, start, n in rows]
    ax.set_yticks([end - n / 2 for end, (_, _, n) in zip(ends, rows, strict=True)], names, fontsize=style.SMALL)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    ax.set_xlabel("position in the token's own sequence", fontsize=style.SIZE)
    handles = [
        Patch(facecolor=style.SKY, label="history, in the cache"), Patch(facecolor=CHUNK, label="new in this step"),
        Patch(facecolor=style.BLACK, label="the token itself"),
    ]  # fmt: skip
    fig.legend(handles=handles, ncols=3, loc="outside upper left", fontsize=style.SMALL, frameon=False)
    return fig


def budget_figure(
    budgets: Sequence[int], predicted: Sequence[Priced], measured: Mapping[int, Priced], step: float, target: float
) -> Figure:
    """What a budget does to the streams (left) and to the long prompt (right).

    step: seconds of a decode step without a prompt; target: most seconds between two tokens. Both lines on the left.
    """
    fig, axes = style.figure(9.5, 3.4, columns=2)
    names = ("worst time between tokens (ms)", "the prompt's first token after (s)")
    for ax, name, field, scale in zip(axes, names, Priced._fields, (1e3, 1.0), strict=True):
        ax.plot(budgets, [scale * getattr(p, field) for p in predicted], label="predicted", **style.PREDICTED)
        ax.plot(list(measured), [scale * getattr(m, field) for m in measured.values()], label="measured",
                **style.MEASURED)  # fmt: skip
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        style.plain_ticks(ax, budgets)
        style.name_axes(ax, "budget (tokens a step)", name)
    axes[0].axhline(1e3 * target, color=style.GREEN, linewidth=1.4, linestyle="-.", label="target")
    axes[0].axhline(1e3 * step, color=style.GREY, linewidth=1.2, linestyle=":", label="no prompt")
    axes[0].legend(fontsize=style.SMALL, frameon=False)
    return fig


def plan_figure(plans: Mapping[str, Sequence[PlannedStep]], target: float | None = None) -> Figure:
    """Steps side by side, as wide as they last: their tokens, those of streams below and of prompts on top.

    plans: name -> (decode tokens, prompt tokens, seconds) of each step. target: most seconds a step may last; a step
    that lasts longer is hatched.
    """
    fig, axes = style.figure(9.5, 0.9 + 1.25 * len(plans), rows=len(plans))
    end = max(sum(s for _, _, s in steps) for steps in plans.values())
    for ax, (name, steps) in zip(axes, plans.items(), strict=True):
        ends = list(accumulate(s for _, _, s in steps))
        starts, widths = [0.0, *ends[:-1]], [s for _, _, s in steps]
        late = ["////" if target is not None and s > target else "" for s in widths]
        low = [d for d, _, _ in steps]
        how: dict[str, Any] = {"align": "edge", "edgecolor": "white", "linewidth": 0.6}
        ax.bar(starts, low, widths, color=DECODE, **how)
        ax.bar(starts, [p for _, p, _ in steps], widths, bottom=low, color=CHUNK, hatch=late, **how)
        ax.set_xlim(0, 1.01 * end)
        ax.set_ylabel("tokens", fontsize=style.SIZE)
        ax.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        first = next((e for e, (_, p, _), (_, q, _) in zip(ends, steps, [*steps[1:], (0, 0, 0)], strict=True)
                      if p and not q), ends[-1])  # fmt: skip
        words = f"{name}: longest step {1e3 * max(widths):,.3g} ms, the prompt is done after {1e3 * first:,.3g} ms"
        ax.set_title(words, fontsize=style.SIZE, loc="left")
        if ax is not axes[-1]:
            ax.tick_params(labelbottom=False)
    axes[-1].set_xlabel("time (s)", fontsize=style.SIZE)
    handles = [Patch(facecolor=DECODE, label="decode tokens"), Patch(facecolor=CHUNK, label="prompt tokens")]
    if target is not None:
        handles.append(Patch(facecolor=CHUNK, edgecolor="white", hatch="////", label="the step misses the target"))
    fig.legend(handles=handles, ncols=3, loc="outside upper left", fontsize=style.SMALL, frameon=False)
    return fig


def budget_explorer(plan: Callable[[int], Sequence[PlannedStep]], budgets: Sequence[int], target: float) -> Any:
    """A widget: a slider over budgets around `plan_figure`. plan(budget) gives the steps."""
    import ipywidgets as w

    slider = w.SelectionSlider(options=list(budgets), value=budgets[0], description="budget", continuous_update=False)
    picture = w.Image(format="png", layout=w.Layout(max_width="950px"))

    def redraw(_change: Any = None) -> None:
        plans = {"whole prompt": plan(0), f"at most {slider.value} tokens": plan(slider.value)}
        picture.value = style.png(plan_figure(plans, target))

    slider.observe(redraw, names="value")
    redraw()
    return w.VBox([slider, picture])


def goodput_figure(seats: Sequence[int], all_tokens: Sequence[float], good_tokens: Sequence[float]) -> Figure:
    """Tokens per second against the most requests at once: of all requests, and of those that were served in time."""
    fig, (ax,) = style.figure(7.0, 3.4)
    ax.fill_between(seats, good_tokens, all_tokens, color=FREE)
    ax.plot(seats, all_tokens, color=style.BLUE, linestyle="--", marker="o", label="throughput: all that is computed")
    ax.plot(seats, good_tokens, color=style.VERMILLION, marker="s", label="goodput: of requests served in time")
    ax.set_xscale("log", base=2)
    style.plain_ticks(ax, seats)
    ax.set_ylim(0, 1.3 * max(all_tokens))
    style.name_axes(ax, "most requests at once", "tokens per second")
    ax.legend(fontsize=style.SMALL, frameon=False, loc="upper left")
    return fig
