"""What prefix hits save: pictures of lesson 11.

`savings` is Amdahl's law (1967) for a request: only what was found goes away. The figures take plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from minillm.errors import MinillmError
from minillm.viz import style


def savings(share: float, found: float) -> float:
    """How many times faster a request is, if `share` of its time is the prompt, and `found` of the prompt is found.

    1 / (1 - share * found): with all of the prompt found, never more than 1 / (1 - share).
    """
    for name, value in (("share", share), ("found", found)):
        if not 0 <= value <= 1:
            raise MinillmError(f"{name} is a share, from 0 to 1, got {value!r}")
    return 1 / (1 - share * found) if share * found < 1 else float("inf")


def hit_curve_figure(
    found: Sequence[float], first: tuple[Sequence[float], Sequence[float]],
    answer: tuple[Sequence[float], Sequence[float]], tokens: int,
) -> Figure:  # fmt: skip
    """Seconds against the share of the prompt that is found; first and answer are (predicted, measured).

    Left the time to the first token, right the time to the end of an answer of so many tokens, on the same scale.
    """
    fig, axes = style.figure(9.0, 3.9, columns=2)
    top = max(*first[0], *first[1], *answer[0], *answer[1])
    titles = ("time to first token", f"whole answer, {tokens} tokens")
    for ax, (predicted, measured), title in zip(axes, (first, answer), titles, strict=True):
        ax.plot([100 * f for f in found], predicted, label="predicted", **style.PREDICTED)
        ax.plot([100 * f for f in found], measured, label="measured", **style.MEASURED)
        style.name_axes(ax, "share of the prompt found (%)", "time (s)", title)
        ax.set(ylim=(0, 1.1 * top), xlim=(-4, 104))
        ax.legend(fontsize=style.SMALL, frameon=False, loc="lower left")
    return fig


def found_figure(found: Mapping[str, Mapping[str, float]], title: str = "") -> Figure:
    """Bars: share of prompt tokens that is found, for each workload and, below each other, each way to write it."""
    fig, (ax,) = style.figure(8.0, 1.0 + 0.3 * sum(len(s) + 1 for s in found.values()))
    y, ticks = 0.0, []
    for shares in found.values():
        start = y
        for i, (way, share) in enumerate(shares.items()):
            ax.barh(-y, 100 * share, height=0.8, color=style.PALETTE[i % len(style.PALETTE)])
            style.label(ax, 100 * share, -y, f"{share:.0%} {way}")
            y += 1
        ticks.append(-(start + y - 1) / 2)
        y += 0.8
    ax.set_yticks(ticks, list(found))
    ax.grid(False, axis="y")
    ax.set_xlim(0, 118)
    ax.set_xticks(range(0, 101, 20))
    style.name_axes(ax, "prompt tokens found (%)", "", title)
    return fig


def waits_figure(rows: Mapping[str, tuple[float, float, float]], title: str = "") -> Figure:
    """Where a request's time goes: (waiting, prompt, answer) in seconds, one bar each."""
    fig, (ax,) = style.figure(8.5, 1.1 + 0.55 * len(rows))
    kinds = (("waiting", style.GREY), ("computing the prompt", style.BLUE), ("writing the answer", style.ORANGE))
    for i, parts in enumerate(rows.values()):
        at = 0.0
        for (name, color), seconds in zip(kinds, parts, strict=True):
            ax.barh(-i, seconds, left=at, height=0.6, color=color, label=name if i == 0 else None)
            at += seconds
        style.label(ax, at, -i, f"{at:.2f} s")
    ax.set_yticks([-i for i in range(len(rows))], list(rows))
    ax.grid(False, axis="y")
    ax.set_xlim(0, 1.15 * max(map(sum, rows.values())))
    style.name_axes(ax, "seconds since arrival", "", title)
    fig.legend(loc="outside lower left", ncols=3, fontsize=style.SMALL, frameon=False)
    return fig
