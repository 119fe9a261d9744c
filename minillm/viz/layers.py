"""Where two forward passes part: the error of every layer at every position. Lesson 01 finds its bugs with it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from minillm.errors import MinillmError
from minillm.viz import style


def error_map(errors: Mapping[str, np.ndarray], tolerance: float, title: str = "") -> Figure:
    """One map a name, of [layers, positions] relative errors: max |ours - reference| / max |reference| over channels.

    White is below `tolerance`; darker is worse, on one logarithmic scale for all maps.
    """
    arrays = {name: np.asarray(e, dtype=float) for name, e in errors.items()}
    for name, e in arrays.items():
        if e.ndim != 2:
            raise MinillmError(f"the errors of {name!r} have shape {e.shape}, expected (layers, positions)")
    worst = max(10 * tolerance, max(float(e.max()) for e in arrays.values()))
    fig, axes = style.figure(width=7.5, height=3.6, columns=len(arrays))
    for ax, (name, e) in zip(axes, arrays.items()):
        shown = np.ma.masked_less(e, tolerance)  # masked cells stay white
        picture = ax.imshow(shown, origin="lower", aspect="auto", cmap="viridis_r", norm=LogNorm(tolerance, worst))
        ax.grid(False)
        ax.set_xticks(range(e.shape[1]))
        style.name_axes(ax, "position (token)", "", name)
    axes[0].set_ylabel("after layer", fontsize=style.SIZE)
    bar = fig.colorbar(picture, ax=axes, pad=0.02)
    bar.set_label("relative error of the hidden states", fontsize=style.SMALL)
    if title:
        fig.suptitle(title, fontsize=style.SIZE + 1)
    return fig
