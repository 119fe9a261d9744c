"""Pictures of lesson 08: the grid of codes, errors of a matrix, quality against bytes, where fewer bytes pay.

Every function takes plain data and returns a matplotlib figure. The explorer is in quant_explorer.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from minillm.errors import MinillmError
from minillm.viz import style


def on_grid(weight: Tensor, bits: int, group: int = 0, *, zero: bool = False, whole: bool = False) -> Tensor:
    """weight [out, in] rounded to the nearest code and made whole again, fp32; any number of bits from 2 to 8.

    group: inputs that share a scale, 0 for the row, or, with `whole`, one scale for the matrix. zero: codes reach from
    the lowest to the highest weight, else evenly to both sides of 0.
    """
    n_in = weight.shape[1]
    if not 2 <= bits <= 8 or (group and n_in % group):
        raise MinillmError(f"bits must be from 2 to 8 and a group must divide {n_in} inputs, got {bits} and {group}")
    w = weight.float().reshape(1, 1, -1) if whole else weight.float().view(len(weight), -1, group or n_in)
    if zero:
        low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
        scale = ((high - low) / (2**bits - 1)).clamp_min(1e-30)
        return (((w - low) / scale).round() * scale + low).view(weight.shape)
    scale = (w.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)).clamp_min(1e-30)
    return ((w / scale).round() * scale).view(weight.shape)


def relative_error(made: Tensor, weight: Tensor) -> float:
    """Root of the mean square error over the root of the mean square."""
    return float((made.double() - weight.double()).norm() / weight.double().norm())


def grid_figure(panels: Mapping[str, tuple[Tensor, Tensor]], unit: float = 1.0) -> Figure:
    """Each panel: weights as ticks, what they became as points above, and the share of codes that is in use.

    panels: {title: (weights [n], the same made whole from codes [n])}.
    """
    fig, axes = style.figure(7.5, 1.25 * len(panels) + 0.5, rows=len(panels))
    span = max(float(x.abs().max()) for pair in panels.values() for x in pair) * 1.06 / unit
    for ax, (title, (weights, made)) in zip(axes, panels.items(), strict=True):
        w, m = weights.double() / unit, made.double() / unit
        levels = torch.unique(m)
        for level in levels.tolist():
            ax.axvline(level, color=style.SKY, linewidth=0.8, zorder=0)
        ax.plot(w.tolist(), [0.3] * len(w), "|", color=style.BLACK, markersize=11, markeredgewidth=0.9)
        ax.plot(m.tolist(), [0.75] * len(m), "o", color=style.VERMILLION, markersize=4.5, alpha=0.7)
        words = f"{title}: {len(levels)} codes in use, error {relative_error(made, weights):.1%}"
        ax.set_title(words, fontsize=style.SMALL, loc="left")
        ax.set(xlim=(-span, span), ylim=(0, 1))
        ax.set_yticks([0.3, 0.75], ["before", "after"], fontsize=style.SMALL)
        ax.grid(False)
    style.name_axes(axes[-1], "weight, in standard deviations of the plain row", "")
    return fig


def error_map_figure(weight: Tensor, made: Mapping[str, Tensor]) -> Figure:
    """The size of each weight's error, a panel a scheme, all on one colour scale: percent of the typical weight."""
    fig, axes = style.figure(2.35 * len(made) + 0.7, 2.9, columns=len(made))
    typical = float(weight.double().square().mean().sqrt())
    maps = {name: 100 * (m.float() - weight.float()).abs() / typical for name, m in made.items()}
    top = max(float(m.float().quantile(0.995)) for m in maps.values())
    for ax, (name, errors) in zip(axes, maps.items(), strict=True):
        image = ax.imshow(errors.numpy(), cmap="cividis", vmin=0, vmax=top, aspect="auto", interpolation="nearest")
        ax.set_title(f"{name}\nerror {relative_error(made[name], weight):.1%}", fontsize=style.SMALL, loc="left")
        ax.grid(False)
        ax.set_xlabel("input", fontsize=style.SMALL)
    axes[0].set_ylabel("output", fontsize=style.SMALL)
    bar = fig.colorbar(image, ax=axes, pad=0.01)
    bar.set_label("|error| (% of a typical weight)", fontsize=style.SMALL)
    bar.ax.tick_params(labelsize=style.SMALL)
    return fig


class Judged(NamedTuple):
    """One variant of a quality record: bytes, growth of the perplexity, and the gate it was sealed with."""

    name: str
    megabytes: float
    ratio: float
    gate: float


def quality_figure(judged: Sequence[Judged], plain_megabytes: float) -> Figure:
    """Growth of the perplexity in percent against bytes; filled: within its gate; a cross: beyond it."""
    fig, (ax,) = style.figure(7.5, 4.0)
    floor = 0.03
    for gate in sorted({j.gate for j in judged}):
        ax.axhline(100 * (gate - 1), color=style.GREY, linewidth=1.2, linestyle=":")
        style.label(ax, plain_megabytes, 100 * (gate - 1), f"gate {gate:.2f}", style.GREY, dx=0, dy=7, ha="right")
    for i, j in enumerate(judged):
        passed = j.ratio <= j.gate
        color = style.BLUE if passed else style.VERMILLION
        y = max(100 * (j.ratio - 1), floor)
        ax.plot([j.megabytes], [y], style.MARKERS[i % 5] if passed else "X", color=color, markersize=9)
        words = j.name if passed else f"{j.name}: fails"
        style.label(ax, j.megabytes, y, words, color, dx=9)
    ax.plot([plain_megabytes], [floor], "s", color=style.BLACK, markersize=7)
    style.label(ax, plain_megabytes, floor, "bf16, by definition 0", style.BLACK, dx=-9, ha="right")
    ax.set_yscale("log")
    ax.set_xlim(0, plain_megabytes * 1.08)
    ax.set_ylim(floor * 0.7, 100)
    style.plain_ticks(ax)
    ax.set_xscale("linear")
    style.name_axes(ax, "weights that a decode step reads (MB)", "growth of perplexity (%)")
    return fig


def rows_figure(
    rows: Sequence[float], times: Mapping[str, Sequence[float]], marks: Mapping[str, float] | None = None
) -> Figure:
    """Seconds of one product against rows, a line a scheme, both axes logarithmic; marks: {words: rows}."""
    fig, (ax,) = style.figure(7.5, 3.9)
    for i, (name, line) in enumerate(times.items()):
        ax.plot(
            rows, [1e6 * t for t in line], color=style.PALETTE[i], linestyle=style.LINES[i], linewidth=2, label=name
        )
    low, high = min(min(t) for t in times.values()) * 1e6, max(max(t) for t in times.values()) * 1e6
    for i, (words, x) in enumerate((marks or {}).items()):
        ax.axvline(x, color=style.GREY, linewidth=1, linestyle=":")
        left = i % 2 == 0
        y, dx, side = (high * 0.9, -5, "right") if left else (low, 5, "left")
        style.label(ax, x, y, words, style.GREY, dx=dx, ha=side)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    style.plain_ticks(ax, [r for r in rows if r == int(r) and int(r).bit_length() % 2])
    ax.legend(fontsize=style.SMALL, loc="upper left", frameon=False, bbox_to_anchor=(0, 0.92))
    style.name_axes(ax, "rows multiplied together (tokens)", "time of the product (µs)")
    return fig


def speed_figure(
    rows: Sequence[int], predicted: Mapping[str, Sequence[float]], measured: Mapping[str, Sequence[float]]
) -> Figure:
    """Milliseconds of a step against rows: lines from the bytes, points measured, a colour and a marker a scheme."""
    fig, (ax,) = style.figure(7.5, 3.9)
    for i, (name, line) in enumerate(predicted.items()):
        color = style.PALETTE[i]
        ax.plot(rows, [1e3 * t for t in line], color=color, linestyle=style.LINES[i], linewidth=1.8)
        points = [1e3 * t for t in measured[name]]
        ax.plot(rows, points, style.MARKERS[i], color=color, markersize=7, label=name)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    style.plain_ticks(ax, rows)
    ax.legend(fontsize=style.SMALL, loc="upper left", frameon=False)
    style.name_axes(ax, "sequences decoded together", "decode step (ms)", "lines: predicted; points: measured here")
    return fig


def kv_error_figure(errors: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """Relative error of a head's keys or values, a point a head, against its layer. errors: {name: [layer][head]}."""
    fig, (ax,) = style.figure(7.5, 3.7)
    for i, (name, layers) in enumerate(errors.items()):
        x = [layer + 0.15 * (i - (len(errors) - 1) / 2) for layer, heads in enumerate(layers) for _ in heads]
        y = [100 * e for heads in layers for e in heads]
        ax.plot(x, y, style.MARKERS[i], color=style.PALETTE[i], markersize=4.5, alpha=0.8, label=name)
    ax.set_yscale("log")
    ax.set_ylim(bottom=100 * min(min(heads) for layers in errors.values() for heads in layers) * 0.8)
    style.plain_ticks(ax)
    ax.legend(fontsize=style.SMALL, loc="upper right", ncols=len(errors), frameon=False, bbox_to_anchor=(1, 1.13))
    style.name_axes(ax, "layer", "error of a head (%)")
    return fig


def bytes_a_weight(bits: int, group: int, n_in: int, zero: bool = False) -> float:
    """Bytes of a code with its share of a bf16 scale (and zero), as a row or a group holds one."""
    return bits / 8 + (4 if zero else 2) / (group or n_in)
