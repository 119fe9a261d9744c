"""Pictures of lesson 03: what temperature and the filters do to a distribution, and draws against it.

Every function takes plain numbers and returns a matplotlib figure. `sampling_explorer` wraps one of them in sliders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from minillm.request import Request, SamplingParams
from minillm.sampler import distribution
from minillm.viz import style

LATIN = 0x024F  # last character of the Latin blocks: what every font of matplotlib can draw


def printable(text: str) -> str:
    """A token as a figure can show it: quoted, so that spaces are seen, and other scripts by their code points."""
    shown = "".join(c if ord(c) <= LATIN else f"\\u{{{ord(c):x}}}" for c in repr(text)[1:-1])
    return f"'{shown}'" if len(shown) <= 18 else f"'{shown[:17]}…'"


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """What the engine's sampler draws from: [V] logits -> [V] fp64, sums to 1. No token counts as seen."""
    return distribution(logits[None], [Request("0", [0], params, seed=0)])[0]


@dataclass(frozen=True)
class View:
    """A distribution before and after the filters, for its most likely tokens, and how much of it is left."""

    tokens: tuple[int, ...]  # the most likely first
    before: tuple[float, ...]  # the model's own probabilities
    after: tuple[float, ...]  # what is drawn from; 0.0 for tokens that were cut
    kept: int  # tokens that can still be drawn, in the whole vocabulary
    mass: float  # share of the model's own probability that they had
    perplexity: float  # exp(entropy) after: how many equally likely tokens it is worth


def view(logits: Tensor, params: SamplingParams, show: int = 15) -> View:
    """logits [V]. `show`: how many tokens to list."""
    before = logits.double().softmax(-1)
    after = probabilities(logits, params)
    alive = after > 0
    top = before.topk(min(show, len(before))).indices
    entropy = -(after[alive] * after[alive].log()).sum().item()
    return View(
        tuple(top.tolist()), tuple(before[top].tolist()), tuple(after[top].tolist()), int(alive.sum()),
        float(before[alive].sum()), math.exp(entropy),
    )  # fmt: skip


def view_figure(seen: View, name: Callable[[int], str], title: str = "") -> Figure:
    """Bars of the most likely tokens: outlined as the model gave them, filled as they are drawn, hatched when cut."""
    n = len(seen.tokens)
    fig, (ax,) = style.figure(7.5, 1.2 + 0.23 * n)
    rows = range(n)
    ax.barh(rows, seen.after, 0.72, color=style.BLUE)
    for row, (before, after) in enumerate(zip(seen.before, seen.after, strict=True)):
        cut = after == 0
        ax.barh(
            [row], [before], 0.72, fill=False, edgecolor=style.VERMILLION if cut else style.BLACK, linewidth=1.1,
            hatch="////" if cut else None,
        )  # fmt: skip
        word = f"{before:.3f} → " + ("cut" if cut else f"{after:.3f}")
        style.label(ax, max(before, after), row, word, style.VERMILLION if cut else style.BLACK)
    ax.set_yticks(list(rows), [printable(name(t)) for t in seen.tokens], fontfamily="monospace")
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set_xlim(0, 1.25 * max(*seen.before, *seen.after))
    left = f"{seen.kept:,} tokens can be drawn; they held {seen.mass:.1%}; worth {seen.perplexity:.1f} equal ones"
    style.name_axes(ax, "probability (outline: the model's; filled: what is drawn from)", "", title or left)
    return fig


def temperature_figure(curves: Mapping[float, Sequence[float]]) -> Figure:
    """Probability against rank, one line a temperature. Each sequence is sorted, the most likely first."""
    fig, (ax,) = style.figure(7.5, 3.8)
    for i, (temperature, p) in enumerate(curves.items()):
        color = style.PALETTE[i]
        ax.plot(range(1, len(p) + 1), p, color=color, linestyle=style.LINES[i], linewidth=1.8)
        style.label(ax, 1, p[0], f"T = {temperature:g}", color, dx=-6, ha="right")
    ax.set(xscale="log", yscale="log", ylim=(1e-9, 2))
    ax.set_xlim(0.35, None)
    style.plain_ticks(ax)
    style.name_axes(ax, "rank of the token", "probability")
    return fig


def kept_figure(temperatures: Sequence[float], curves: Mapping[str, Sequence[int]], vocabulary: int) -> Figure:
    """How many tokens a filter leaves, against temperature, one line a filter."""
    fig, (ax,) = style.figure(7.5, 3.8)
    for i, (name, counts) in enumerate(curves.items()):
        color = style.PALETTE[i]
        ax.plot(
            temperatures, counts, color=color, linestyle=style.LINES[i], linewidth=1.8, marker=style.MARKERS[i],
            markersize=5,
        )  # fmt: skip
        style.label(ax, temperatures[-1], counts[-1], name, color)
    ax.axhline(vocabulary, color=style.GREY, linewidth=1.0, linestyle=":")
    style.label(ax, temperatures[0], vocabulary, "the whole vocabulary", style.GREY, dx=0, dy=7)
    ax.set_yscale("log")
    ax.set_ylim(0.7, 3 * vocabulary)
    style.plain_ticks(ax)
    style.name_axes(ax, "temperature", "tokens that can be drawn")
    return fig


def draws_figure(tokens: Sequence[str], expected: Sequence[float], counts: Mapping[str, Sequence[int]]) -> Figure:
    """Draws against exact probabilities. Bars: expected, with two standard deviations; marks: counted, one row each."""
    fig, (ax,) = style.figure(7.5, 3.6)
    total = sum(next(iter(counts.values())))
    mean = [total * p for p in expected]
    spread = [2 * math.sqrt(total * p * (1 - p)) for p in expected]
    rows = range(len(tokens))
    ax.bar(rows, mean, 0.75, color=style.SKY, alpha=0.6, yerr=spread, ecolor=style.BLACK, capsize=3, label="expected")
    for i, (name, seen) in enumerate(counts.items()):
        offset = 0.16 * (2 * i - len(counts) + 1)
        ax.plot(
            [r + offset for r in rows], seen, style.MARKERS[i], color=style.PALETTE[(i + 1) % len(style.PALETTE)],
            markersize=6, label=name,
        )  # fmt: skip
    ax.set_xticks(list(rows), [printable(t) for t in tokens], rotation=40, ha="right", fontfamily="monospace")
    ax.grid(False, axis="x")
    ax.legend(fontsize=style.SMALL, frameon=False)
    style.name_axes(ax, "", f"times drawn, of {total:,}")
    return fig


def sampling_explorer(name: Callable[[int], str], prompts: Mapping[str, Tensor]) -> Any:
    """A widget: pick a prompt (its next-token logits [V] are given), temperature, top-k, top-p and min-p."""
    import ipywidgets as w

    wide = {"style": {"description_width": "100px"}, "layout": w.Layout(width="520px"), "continuous_update": False}
    prompt = w.Dropdown(options=list(prompts), description="prompt", layout=w.Layout(width="520px"),
                        style=wide["style"])  # fmt: skip
    temperature = w.FloatSlider(value=1.0, min=0.0, max=3.0, step=0.05, description="temperature", **wide)
    top_k = w.IntSlider(value=0, min=0, max=100, description="top_k (0: all)", **wide)
    top_p = w.FloatSlider(value=1.0, min=0.01, max=1.0, step=0.01, description="top_p", **wide)
    min_p = w.FloatSlider(value=0.0, min=0.0, max=1.0, step=0.01, description="min_p", **wide)
    picture = w.Image(format="png")

    def redraw(_: Any = None) -> None:
        params = SamplingParams(temperature=temperature.value, top_k=top_k.value, top_p=top_p.value, min_p=min_p.value)
        picture.value = style.png(view_figure(view(prompts[prompt.value], params), name))

    controls = [prompt, temperature, top_k, top_p, min_p]
    for control in controls:
        control.observe(redraw, names="value")
    redraw()
    return w.VBox([*controls, picture])
