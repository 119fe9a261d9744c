"""The quantisation error explorer of lesson 08: bits, group and one outlier, and what becomes of a row of weights."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure
from torch import Tensor

from minillm.viz import style
from minillm.viz.quant import bytes_a_weight, on_grid, relative_error

GROUPS = {"a row": 0, "64": 64, "32": 32, "16": 16}


def outlier_figure(row: Tensor, bits: int, group: int, outlier: float, zero: bool) -> tuple[Figure, str]:
    """A row [n] whose tenth weight is `outlier` standard deviations (0: left as it is): errors by input, and words."""
    w, typical = row.float().clone(), float(row.float().std())
    if outlier:
        w[9] = outlier * typical
    made = on_grid(w[None], bits, group, zero=zero)[0]
    others = [i for i in range(len(w)) if i != 9]
    fig, (ax, below) = style.figure(7.5, 4.0, rows=2)
    ax.plot((w / typical).tolist(), ".", color=style.BLACK, markersize=4, label="weight")
    ax.plot((made / typical).tolist(), "_", color=style.VERMILLION, markersize=6, label="made whole from its code")
    ax.legend(fontsize=style.SMALL, loc="upper right", ncols=2, frameon=False, bbox_to_anchor=(1, 1.25))
    below.plot((100 * (made - w).abs() / typical).tolist(), color=style.BLUE, linewidth=1)
    for edge in range(0, len(w) + 1, group or len(w)):
        below.axvline(edge - 0.5, color=style.GREY, linewidth=0.6, linestyle=":")
    below.set_ylim(0, 105)
    style.name_axes(ax, "", "standard deviations")
    style.name_axes(below, "input of the row; dotted: where a group ends", "|error| (% of σ)")
    size = bytes_a_weight(bits, group, len(w), zero)
    words = (
        f"{size:.3f} bytes a weight, bf16 has 2; error of all other weights "
        f"{relative_error(made[others], w[others]):.1%} of their size"
    )
    return fig, words


def quantisation_explorer(row: Tensor) -> widgets.VBox:
    """Sliders around `outlier_figure` for a row of a weight matrix; its length must be a multiple of 64."""
    wide: dict[str, Any] = {"style": {"description_width": "80px"}, "layout": widgets.Layout(width="330px")}
    bits = widgets.IntSlider(value=4, min=2, max=8, description="bits", continuous_update=False, **wide)
    group = widgets.Dropdown(options=GROUPS, value=0, description="group", **wide)
    outlier = widgets.FloatSlider(
        value=0, min=0, max=40, step=1, description="outlier (σ)", continuous_update=False, **wide
    )
    zero = widgets.Checkbox(value=False, description="with a zero", **wide)
    words = widgets.HTML()
    picture = widgets.Image(format="png", layout=widgets.Layout(max_width="750px"))

    def redraw(_change: Any = None) -> None:
        fig, text = outlier_figure(row, bits.value, group.value, outlier.value, zero.value)
        words.value, picture.value = text, style.png(fig)

    for control in (bits, group, outlier, zero):
        control.observe(redraw, names="value")
    redraw()
    controls = widgets.HBox([widgets.VBox([bits, group]), widgets.VBox([outlier, zero])])
    return widgets.VBox([controls, words, picture])
