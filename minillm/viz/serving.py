"""Pictures of lesson 13: the saturation curve and its knee, and a request's life.

Every function takes plain data and returns a matplotlib figure. Data are in seconds, axes in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minillm.errors import MinillmError
from minillm.roofline.capacity import Load
from minillm.viz import style

# The stages of `minillm.server.tracing`, in the order in which a request goes through them.
STAGES = {
    "auth": style.YELLOW, "ingress": style.GREY, "preprocess": style.SKY, "admit": style.PURPLE, "queue": "#D0D0D0",
    "prefill": style.ORANGE, "decode": style.BLUE, "post": style.GREEN,
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One measured run. Rates in requests/s, times in seconds."""

    offered: float
    served: float
    goodput: float
    ttft_mean: float
    ttft_p99: float


def saturation_figure(
    points: Sequence[Point],
    predicted: Sequence[Load],
    knee: float,
    *,
    measured_knee: float | None = None,
    slo: str = "",
) -> Figure:
    """Left: served and good requests a second against offered ones. Right: TTFT. Dashed is what was predicted.

    points may be empty: then it is the picture before the measurement. knee: the predicted one, in requests/s.
    """
    if not points and not predicted:
        raise MinillmError("a saturation curve needs points that were measured, or a prediction")
    fig, (left, right) = style.figure(10.0, 4.4, columns=2)
    x, looks = [p.offered for p in points], style.MEASURED | {"linestyle": "-", "linewidth": 1.0}
    rates = [p.rate for p in predicted]
    most = max([*x, *rates, knee]) * 1.05
    left.plot([0, most], [0, most], color=style.GREY, linestyle=":", linewidth=1, label="offered")
    if predicted:
        left.plot(rates, [p.served for p in predicted], **style.PREDICTED, label="served, predicted")
        finite = [p for p in predicted if math.isfinite(p.ttft_s)]
        right.plot(
            [p.rate for p in finite], [1e3 * p.ttft_s for p in finite], **style.PREDICTED, label="TTFT mean, predicted"
        )
    if points:
        left.plot(x, [p.served for p in points], **looks, label="served, measured")
        good = looks | {"color": style.GREEN, "marker": "s"}
        left.plot(x, [p.goodput for p in points], **good, label=f"goodput, measured{f' ({slo})' if slo else ''}")
        right.plot(x, [1e3 * p.ttft_mean for p in points], **looks, label="TTFT mean, measured")
        tail = looks | {"color": style.PURPLE, "marker": "^"}
        right.plot(x, [1e3 * p.ttft_p99 for p in points], **tail, label="TTFT p99, measured")
    for ax in (left, right):
        ax.axvline(knee, color=style.BLUE, linestyle="-.", linewidth=1.4, label="knee, predicted")
        ax.set_xlim(0, most)
    if measured_knee is not None:
        left.axvline(measured_knee, color=style.VERMILLION, linestyle=":", linewidth=1.4, label="knee, measured")
    tops = [p.served for p in points] + [p.served for p in predicted if p.served < math.inf] + [knee]
    left.set_ylim(0, 1.1 * max(tops))
    right.set_yscale("log")
    style.plain_ticks(right)
    style.name_axes(left, "offered (requests/s)", "requests/s", "what comes out")
    style.name_axes(right, "offered (requests/s)", "TTFT (ms)", "what it feels like")
    for ax in (left, right):  # below: no corner of the axes stays empty on every machine
        ax.legend(fontsize=style.SMALL, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return fig


def spans_figure(lives: Mapping[str, tuple[float, Sequence[tuple[str, float]]]], title: str = "") -> Figure:
    """A row for each request: its stages end to end, from its first byte to its last.

    lives: name -> (start in seconds of any clock, [(stage, seconds), ...] in order). Time 0 is the earliest start.
    """
    if unknown := [s for _, spans in lives.values() for s, _ in spans if s not in STAGES]:
        raise MinillmError(f"a request has the stages {', '.join(STAGES)}, got stage {unknown[0]!r:.80}")
    fig, (ax,) = style.figure(9.0, max(1.6, 0.9 + 0.3 * len(lives)))
    first = min((start for start, _ in lives.values()), default=0.0)
    end, seen = 0.0, set()
    for i, (start, spans) in enumerate(lives.values()):
        x = start - first
        for stage, seconds in spans:
            if seconds > 0:
                box = (1e3 * x, -i - 0.36), 1e3 * seconds, 0.72
                ax.add_patch(Rectangle(*box, facecolor=STAGES[stage], edgecolor="white", linewidth=0.4))
                seen.add(stage)
            x += seconds
        end = max(end, x)
    ax.set_xlim(0, 1e3 * end * 1.01 or 1)
    ax.set_ylim(-len(lives) + 0.4, 0.6)
    ax.set_yticks([-i for i in range(len(lives))], list(lives), fontsize=style.SMALL)
    ax.grid(False, axis="y")
    style.name_axes(ax, "time (ms)", "", title)
    handles = [Patch(facecolor=color, label=stage) for stage, color in STAGES.items() if stage in seen]
    fig.legend(handles=handles, ncols=8, loc="outside upper left", fontsize=style.SMALL, frameon=False)
    return fig
