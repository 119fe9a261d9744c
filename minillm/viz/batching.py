"""Picture of lesson 09: what a larger batch gives everybody together, and what it costs each. Plain numbers in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from minillm.viz import style


class Served(NamedTuple):
    """How requests were served: tokens a second of all, median seconds to a first token, and between tokens."""

    throughput: float
    first_token: float
    between: float


def served_figure(
    seats: Sequence[int], predicted: Sequence[Served], measured: Sequence[Served], knee: float | None = None
) -> Figure:
    """Throughput, wait for the first token and time between tokens against the most requests at once.

    knee: where a step takes twice as long as that of one request; a dotted line.
    """
    fig, axes = style.figure(10.0, 3.4, columns=3)
    names = ("tokens per second, all requests", "wait for the first token (s)", "time between tokens (ms)")
    for ax, name, field, scale in zip(axes, names, Served._fields, (1.0, 1.0, 1e3), strict=True):
        lines = [[scale * getattr(s, field) for s in side] for side in (predicted, measured)]
        ax.plot(seats, lines[0], label="predicted", **style.PREDICTED)
        ax.plot(seats, lines[1], label="measured", **style.MEASURED)
        ax.set_xscale("log", base=2)
        style.plain_ticks(ax, seats)
        ax.set_ylim(0, 1.15 * max(map(max, lines)))
        if knee is not None and seats[0] <= knee <= seats[-1]:
            ax.axvline(knee, color=style.GREY, linewidth=1.2, linestyle=":")
        style.name_axes(ax, "most requests at once", name)
    axes[1].legend(fontsize=style.SMALL, loc="upper right", frameon=False)
    if knee is not None and seats[0] <= knee <= seats[-1]:
        style.label(axes[0], knee, 0.03 * axes[0].get_ylim()[1], "knee", style.GREY, dx=4, dy=6)
    return fig
