"""What every picture of the course shares: colours, sizes, axes, and how it gets into a notebook.

Colours are Okabe and Ito's (2008), told apart also by colour-blind readers; markers and line styles differ as
well. Figures are made without pyplot, so nothing global is touched and nothing stays open.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#6E6E6E"

PALETTE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))

# What was computed before the measurement, and what was measured: the same two looks in every lesson.
PREDICTED: dict[str, Any] = {"color": BLUE, "linestyle": "--", "linewidth": 1.8}
MEASURED: dict[str, Any] = {"color": VERMILLION, "linestyle": "none", "marker": "o", "markersize": 6}

SIZE, SMALL = 10, 9  # font sizes in points
DPI = 100


def figure(width: float = 7.5, height: float = 4.0, columns: int = 1, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure of `width` x `height` inches with plain axes, row by row."""
    fig = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(fig)
    axes = [fig.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=SMALL)
        ax.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
        ax.set_axisbelow(True)
    return fig, axes


def name_axes(ax: Axes, x: str, y: str, title: str = "") -> None:
    """Labels with units, such as "time per token (ms)"."""
    ax.set_xlabel(x, fontsize=SIZE)
    ax.set_ylabel(y, fontsize=SIZE)
    if title:
        ax.set_title(title, fontsize=SIZE + 1, loc="left")


def plain_ticks(ax: Axes, x: Sequence[float] | None = None) -> None:
    """Logarithmic axes read 1, 10, 100 and not powers; `x` puts the ticks of the x axis on these values."""
    number = FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1 else f"{v:g}")
    for axis, scale in ((ax.xaxis, ax.get_xscale()), (ax.yaxis, ax.get_yscale())):
        if scale == "log":
            axis.set_major_formatter(number)
            axis.set_minor_formatter(NullFormatter())
    low, high = sorted(ax.get_ylim())
    if ax.get_yscale() == "log" and high / low < 100:  # a decade or two: 10, 20, 50 are wanted too
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    if x is not None:
        ax.set_xticks(list(x), [f"{v:,g}" for v in x])
        ax.minorticks_off()


def label(ax: Axes, x: float, y: float, text: str, color: str = BLACK, **how: Any) -> None:
    """A word at a point, in the colour of what it names; `dx` and `dy` shift it in points."""
    dx, dy = how.pop("dx", 6), how.pop("dy", 0)
    how = {"fontsize": SMALL, "va": "center", "ha": "left", **how}
    ax.annotate(text, (x, y), (dx, dy), textcoords="offset points", color=color, **how)


def png(fig: Figure) -> bytes:
    """The figure as PNG, the same bytes for the same data. Without matplotlib's alpha channel, which is all opaque."""
    from PIL import Image

    drawn, small = io.BytesIO(), io.BytesIO()
    fig.savefig(drawn, format="png", metadata={"Software": None})
    Image.open(drawn).convert("RGB").save(small, format="png", dpi=(fig.dpi, fig.dpi), optimize=True)
    return small.getvalue()


def show(fig: Figure, alt: str) -> Any:
    """The figure as a notebook output; `alt` says in words what it shows."""
    from IPython.display import Image

    return Image(data=png(fig), format="png", alt=alt)
