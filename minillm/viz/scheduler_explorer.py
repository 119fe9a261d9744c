"""One step of an engine as its scheduler saw it: who waits, who runs, which blocks and how much of the budget.

`scheduler_figure` is pure; `scheduler_explorer` wraps it in a slider over the steps of an event log. Lessons 09 to 12.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minillm.events import Event
from minillm.viz import style
from minillm.viz.lives import State, state_at, steps
from minillm.viz.timeline import CHUNK, DECODE, FREE, HIT, PREEMPTED, WAIT

MOST = 16  # of a queue, and of the running requests, that are drawn


def scheduler_figure(events: Iterable[Event], step: int, budget: int | None = None) -> Figure:
    """Step `step` of a log, counted from 0: queue, running requests with what this step computes, blocks, budget.

    budget: most tokens a step may compute. Raises MinillmError for a step that is not there.
    """
    state = state_at(list(events), step)
    rows = max(4, min(MOST, len(state.queue)), min(MOST, len(state.rows) + len(state.held)))
    fig, (left, right, low) = _panels(1.9 + 0.25 * rows)
    _queue(left, state, rows)
    _running(right, state, rows)
    _bars(low, state, budget)
    return fig


def _panels(height: float) -> tuple[Figure, list[Axes]]:
    fig, axes = style.figure(9.5, height, columns=2, rows=2)
    grid = axes[0].get_gridspec()
    assert grid is not None
    grid.set_height_ratios([height - 1.3, 0.75])
    grid.set_width_ratios([1.0, 2.1])
    for ax in axes[2:]:
        ax.remove()
    low = fig.add_subplot(grid[1, :])
    for ax in (*axes[:2], low):
        ax.grid(False)
        ax.set_axis_off()
    return fig, [*axes[:2], low]


def _queue(ax: Axes, state: State, rows: int) -> None:
    for i, q in enumerate(state.queue[:MOST]):
        color = PREEMPTED if q.preempted else WAIT
        ax.add_patch(Rectangle((0, -i + 0.1), 0.95, 0.75, facecolor="white", edgecolor=color, linewidth=1.2))
        words = f"{q.request_id}: {q.tokens} tokens, waits {q.steps}" + (f", p{q.priority:+d}" if q.priority else "")
        ax.text(0.03, -i + 0.46, words, fontsize=style.SMALL - 1, va="center")
    more = len(state.queue) - MOST
    ax.set_title(
        f"queue: {len(state.queue)}" + (f" ({more} not shown)" if more > 0 else ""), fontsize=style.SIZE, loc="left"
    )
    ax.set(xlim=(0, 1), ylim=(-rows + 0.9, 1.1))


def _running(ax: Axes, state: State, rows: int) -> None:
    longest = max([1, *(r.tokens for r in state.rows)])
    for i, r in enumerate(state.rows[:MOST]):
        y = -i + 0.1
        color = DECODE if r.decode else CHUNK
        ax.add_patch(Rectangle((0, y), r.tokens, 0.75, facecolor=FREE, edgecolor=WAIT, linewidth=0.6))
        ax.add_patch(Rectangle((0, y), r.computed, 0.75, facecolor=DECODE, alpha=0.3, linewidth=0))
        if hit := state.hits.get(r.request_id):
            ax.add_patch(Rectangle((0, y), hit, 0.75, facecolor=HIT, alpha=0.6, linewidth=0))
        ax.add_patch(Rectangle((r.computed, y), r.new, 0.75, facecolor=color, linewidth=0))
        done = ", finished" if r.request_id in state.finished else ""
        words = f"{r.computed} + {r.new} of {r.tokens}{done}"
        ax.text(r.tokens + 0.015 * longest, y + 0.36, words, fontsize=style.SMALL - 1, va="center")
    at = min(len(state.rows), MOST)
    for i, name in enumerate(state.held[: max(0, MOST - at)]):
        ax.text(0, -(at + i) + 0.46, "runs, gets nothing in this step", fontsize=style.SMALL - 1, va="center",
                color=WAIT)  # fmt: skip
        ax.text(-0.015 * longest, -(at + i) + 0.46, name, fontsize=style.SMALL - 1, va="center", ha="right")
    for i, r in enumerate(state.rows[:MOST]):
        ax.text(-0.015 * longest, -i + 0.46, r.request_id, fontsize=style.SMALL - 1, va="center", ha="right")
    s = state.step
    said = [f"step {state.index}: {len(state.rows)} requests, {s.prefill} prompt tokens, {s.decode} decode"]
    said += [f"preempted {', '.join(state.preempted)}"] if state.preempted else []
    ax.set_title("; ".join(said), fontsize=style.SIZE, loc="left")
    ax.set(xlim=(-0.08 * longest, 1.45 * longest), ylim=(-rows + 0.9, 1.1))


def _bars(ax: Axes, state: State, budget: int | None) -> None:
    s = state.step
    tokens = s.decode + s.prefill
    most = max(budget or tokens, tokens, 1)
    bars = [("tokens", most, [(s.decode, DECODE, "decode"), (s.prefill, CHUNK, "prompt")])]
    if s.free is not None and s.live is not None and s.cached is not None:
        total = s.live + s.cached + s.free
        bars.append(("blocks", total, [(s.live, DECODE, "live"), (s.cached, HIT, "cached"), (s.free, FREE, "free")]))
    for i, (name, size, parts) in enumerate(bars):
        at = 0.0
        for n, color, _ in parts:
            ax.add_patch(Rectangle((at, -i), n / size, 0.6, facecolor=color, alpha=0.85, linewidth=0))
            at += n / size
        ax.add_patch(Rectangle((0, -i), 1, 0.6, fill=False, edgecolor=WAIT, linewidth=0.8))
        ax.text(-0.01, -i + 0.3, name, fontsize=style.SMALL, ha="right", va="center")
        words = ", ".join(f"{n} {what}" for n, _, what in parts)
        of = f" of {budget}" if name == "tokens" and budget is not None else ""
        ax.text(1.01, -i + 0.3, words + of, fontsize=style.SMALL, va="center")
    ax.set(xlim=(-0.08, 1.45), ylim=(-len(bars) + 0.8, 0.8))


def scheduler_explorer(events: Iterable[Event], budget: int | None = None) -> Any:
    """A widget: a slider and two buttons over the steps of a log, around `scheduler_figure`."""
    import ipywidgets as w

    log = list(events)
    last = len(steps(log)) - 1
    slider = w.IntSlider(value=0, min=0, max=last, description="step", continuous_update=False)
    back, on = w.Button(description="one back"), w.Button(description="one on")
    picture = w.Image(format="png", layout=w.Layout(max_width="950px"))

    def redraw(_change: Any = None) -> None:
        picture.value = style.png(scheduler_figure(log, slider.value, budget))

    def move(by: int) -> Any:
        def act(_: Any) -> None:
            slider.value = min(last, max(0, slider.value + by))

        return act

    slider.observe(redraw, names="value")
    back.on_click(move(-1))
    on.on_click(move(1))
    redraw()
    return w.VBox([w.HBox([slider, back, on]), picture])
