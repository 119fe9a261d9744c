"""Pictures of lesson 02: time with and without a KV cache, its bytes, and decode moving on the roofline.

Every function takes plain numbers and returns a matplotlib figure. `kv_calculator` wraps one of them in sliders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.roofline.cost import kv_bytes_per_token, weight_bytes
from minillm.roofline.device import Device
from minillm.roofline.predict import predict_step
from minillm.viz import style

KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


def as_mha(config: ModelConfig) -> ModelConfig:
    """The same model with one KV head for each query head: plain multi-head attention."""
    return replace(config, num_kv_heads=config.num_heads)


def crossover(x: Sequence[float], rising: Sequence[float], flat: Sequence[float], ratio: float = 2.0) -> float | None:
    """Where `rising / flat` first reaches `ratio`, between two points straight in log-log; None if it never does.

    x must rise. A ratio reached at the first point gives that point.
    """
    r = [a / b for a, b in zip(rising, flat, strict=True)]
    for i, value in enumerate(r):
        if value >= ratio:
            if i == 0:
                return float(x[0])
            share = math.log(ratio / r[i - 1]) / math.log(value / r[i - 1])
            return math.exp((1 - share) * math.log(x[i - 1]) + share * math.log(x[i]))
    return None


def growth_figure(
    contexts: Sequence[int],
    naive: Sequence[float],
    cached: Sequence[float],
    measured_naive: Mapping[int, float] | None = None,
    measured_cached: Mapping[int, float] | None = None,
) -> Figure:
    """Seconds per token against context, predicted as lines and measured as points; marks where the cache halves it."""
    fig, (ax,) = style.figure(7.5, 4.0)
    ms = lambda values: [1e3 * v for v in values]
    ax.plot(contexts, ms(naive), color=style.VERMILLION, linestyle="--", linewidth=1.8)
    ax.plot(contexts, ms(cached), color=style.BLUE, linestyle="-", linewidth=1.8)
    for points, color, marker in (
        (measured_naive, style.VERMILLION, "s"),
        (measured_cached, style.BLUE, "o"),
    ):
        if points:
            ax.plot(list(points), ms(points.values()), marker, color=color, markersize=6.5)
    style.label(ax, contexts[-1], 1e3 * naive[-1], "no cache", style.VERMILLION, dx=-8, dy=8, ha="right")
    style.label(ax, contexts[-1], 1e3 * cached[-1], "KV cache", style.BLUE, dx=-8, dy=-12, ha="right")
    at = crossover(contexts, naive, cached)
    if at is not None:
        ax.axvline(at, color=style.GREY, linewidth=1.0, linestyle=":")
        words = f"predicted: twice as fast from {at:.0f} tokens"
        style.label(ax, at, 0.03, words, style.GREY, va="bottom", xycoords=ax.get_xaxis_transform())
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.margins(y=0.15)
    style.plain_ticks(ax, contexts)
    style.name_axes(ax, "context (tokens)", "time per new token (ms)", "lines: predicted before; points: measured here")
    return fig


def kv_versus_weights_figure(models: Mapping[str, ModelConfig], dtype: str = "bfloat16") -> Figure:
    """KV bytes over weight bytes against tokens held (batch x context), for each model with GQA and as MHA."""
    fig, (ax,) = style.figure(7.5, 4.2)
    low, high = 1e2, 1e7
    for i, (name, config) in enumerate(models.items()):
        weights, color = weight_bytes(config, dtype), style.PALETTE[i]
        for c, line, width in ((config, "-", 1.9), (as_mha(config), ":", 1.4)):
            rate = kv_bytes_per_token(c, dtype) / weights
            ax.plot([low, high], [low * rate, high * rate], color=color, linestyle=line, linewidth=width)
        even = weights / kv_bytes_per_token(config, dtype)
        ax.plot([even], [1.0], style.MARKERS[i], color=color, markersize=7)
        style.label(ax, high, high / even, name, color)
    ax.axhline(1.0, color=style.BLACK, linewidth=1.0)
    style.label(ax, low, 1.0, "KV = weights", style.BLACK, dx=4, dy=7)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(low, high)
    ax.set_ylim(1e-3, 2e3)
    style.plain_ticks(ax)
    title = f"{dtype}; solid: as published (GQA), dotted: one KV head a query head (MHA)"
    style.name_axes(ax, "tokens held = batch x context", "KV bytes / weight bytes", title)
    return fig


@dataclass(frozen=True)
class Trail:
    """Steps that differ in one size, in order. A point: (FLOPs per byte, FLOP/s predicted, FLOP/s measured or None)."""

    name: str
    points: tuple[tuple[float, float, float | None], ...]


def trail(
    name: str,
    config: ModelConfig,
    device: Device,
    dtype: str,
    steps: Sequence[Sequence[tuple[int, int]]],
    measured: Sequence[float] | None = None,
) -> Trail:
    """Place steps, each a list of rows (new tokens, context), on a device's roofline. measured: seconds of each."""
    points = []
    for i, rows in enumerate(steps):
        p = predict_step(config, rows, device, dtype)
        points.append((p.intensity, p.flops / p.expected, p.flops / measured[i] if measured else None))
    return Trail(name, tuple(points))


def trails_figure(device: Device, dtype: str, trails: Sequence[Trail], title: str = "") -> Figure:
    """The roofline of a device with trails of steps. Hollow: predicted. Filled: measured. Marks grow along a trail."""
    fig, (ax,) = style.figure(7.5, 4.6)
    peak, bandwidth = device.peak(dtype), device.roof_bandwidth
    ridge = peak / bandwidth
    unit, scale = ("TFLOP/s", 1e12) if peak >= 1e13 else ("GFLOP/s", 1e9)
    xs = [x for t in trails for x, _, _ in t.points] + [ridge]
    left, right = min(xs) / 2, max(xs) * 3
    roof_x, roof_y = [left, ridge, right], [left * bandwidth / scale, peak / scale, peak / scale]
    ax.axvspan(ridge, right, color=style.YELLOW, alpha=0.13, linewidth=0)
    ax.plot(roof_x, roof_y, color=style.BLACK, linewidth=1.6)
    for i, t in enumerate(trails):
        color, mark = style.PALETTE[i], style.MARKERS[i]
        grow = [4.5 + 5.0 * j / max(1, len(t.points) - 1) for j in range(len(t.points))]
        ax.plot(
            [p[0] for p in t.points], [p[1] / scale for p in t.points], color=color, linestyle=style.LINES[i],
            linewidth=1.4, marker=mark, markersize=0, label=t.name,
        )  # fmt: skip
        for (x, predicted, seen), size in zip(t.points, grow, strict=True):
            ax.plot([x], [predicted / scale], mark, color=color, markersize=size, markerfacecolor="white")
            if seen is not None:
                ax.plot([x], [seen / scale], mark, color=color, markersize=size)
    ax.set(xscale="log", yscale="log", xlim=(left, right), ylim=(None, 10 * peak / scale))
    style.label(ax, ridge, peak / scale, f"ridge: {ridge:.3g} FLOP/byte", style.GREY, dx=0, dy=9)
    foot = ax.get_ylim()[0]
    style.label(ax, ridge, foot, "memory bound", style.GREY, dx=-6, dy=9, ha="right")
    style.label(ax, ridge, foot, "compute bound", style.GREY, dx=6, dy=9)
    handles = [
        Line2D([], [], color=style.PALETTE[i], marker=style.MARKERS[i], linestyle=style.LINES[i], markersize=6,
               markerfacecolor="white", label=t.name)
        for i, t in enumerate(trails)
    ]  # fmt: skip
    ax.legend(handles=handles, fontsize=style.SMALL, loc="upper left", frameon=False)
    style.plain_ticks(ax)
    style.name_axes(ax, "arithmetic intensity (FLOP/byte)", f"speed ({unit})", title or f"{device.name}, {dtype}")
    return fig


def batch_figure(batches: Sequence[int], predicted: Sequence[float], measured: Sequence[float]) -> Figure:
    """Decode steps of several sequences: seconds a step on the left, tokens per second of all of them on the right."""
    fig, (left, right) = style.figure(8.0, 3.6, columns=2)
    for ax, value in ((left, lambda s, b: 1e3 * s), (right, lambda s, b: b / s)):
        values = [[value(s, b) for s, b in zip(times, batches, strict=True)] for times in (predicted, measured)]
        ax.plot(batches, values[0], **style.PREDICTED)
        ax.plot(batches, values[1], **style.MEASURED)
        ax.set_xscale("log", base=2)
        style.plain_ticks(ax, batches)
        ax.set_ylim(0, 1.2 * max(map(max, values)))
    alone = [1e3 * predicted[0] * b for b in batches]
    left.plot(batches, alone, color=style.GREY, linestyle=":", linewidth=1.2)
    style.label(left, batches[1], alone[1], "one after\nthe other", style.GREY, dx=-8, dy=18, ha="right")
    right.plot([], [], label="predicted", **style.PREDICTED)
    right.plot([], [], label="measured", **style.MEASURED)
    right.legend(fontsize=style.SMALL, loc="upper left", frameon=False)
    style.name_axes(left, "sequences decoded together", "time per step (ms)")
    style.name_axes(right, "sequences decoded together", "tokens per second, all sequences")
    return fig


@dataclass(frozen=True)
class MemoryPlan:
    """What a model with so many sequences of so many tokens needs on a device. Bytes, and seconds a decode step.

    The seconds are lower bounds: the bytes at the device's fastest measured or printed bandwidth.
    """

    weights: int
    kv_per_token: int
    kv: int
    memory: int
    weights_seconds: float
    kv_seconds: float

    @property
    def fits(self) -> bool:
        return self.weights + self.kv <= self.memory

    @property
    def tokens_that_fit(self) -> int:
        """Tokens of KV that fit beside the weights."""
        return max(0, self.memory - self.weights) // self.kv_per_token

    @property
    def even_tokens(self) -> float:
        """Tokens whose KV weighs as much as the weights."""
        return self.weights / self.kv_per_token


def memory_plan(
    config: ModelConfig, device: Device, batch: int, context: int, dtype: str = "bfloat16", kv_dtype: str | None = None
) -> MemoryPlan:
    """Bytes and least seconds of a decode step. kv_dtype: as `dtype` unless given; "float8" is known here too."""
    kv_dtype = kv_dtype or dtype
    if kv_dtype not in KV_BYTES:
        raise MinillmError(f"kv_dtype {kv_dtype!r} is not known; use one of {', '.join(KV_BYTES)}")
    if batch < 1 or context < 1:
        raise MinillmError(f"batch and context must be at least 1, got {batch} and {context}")
    weights = weight_bytes(config, dtype)
    per_token = 2 * config.num_layers * config.kv_size * KV_BYTES[kv_dtype]
    kv = batch * context * per_token
    bandwidth = device.roof_bandwidth
    return MemoryPlan(weights, per_token, kv, device.memory_bytes, weights / bandwidth, kv / bandwidth)


def size(n: float) -> str:
    """Bytes in the largest decimal unit that leaves a number of at least 1."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= scale:
            return f"{n / scale:.1f} {unit}"
    return f"{n:.0f} B"


def memory_figure(plan: MemoryPlan, device_name: str = "device") -> Figure:
    """Two bars: weights and KV against the device's memory, and the least time a decode step needs to read them."""
    fig, (top, bottom) = style.figure(7.5, 2.9, rows=2)
    total, memory = (plan.weights + plan.kv) / 1e9, plan.memory / 1e9
    words = (f"{size(plan.weights)} weights", f"{size(plan.kv)} KV")
    _stack(top, plan.weights / 1e9, plan.kv / 1e9, words, 1.15 * max(memory, total))
    top.axvline(memory, color=style.BLACK, linewidth=1.8)
    verdict = "fits" if plan.fits else "does not fit"
    title = f"{verdict}: {size(plan.weights + plan.kv)} of {size(plan.memory)} (black line: {device_name})"
    style.name_axes(top, "memory (GB)", "", title)
    ms = (1e3 * plan.weights_seconds, 1e3 * plan.kv_seconds)
    _stack(bottom, *ms, (f"{ms[0]:.2f} ms weights", f"{ms[1]:.2f} ms KV"), 1.15 * sum(ms))
    style.name_axes(bottom, "least time per decode step (ms)", "")
    return fig


def _stack(ax: Axes, first: float, second: float, words: tuple[str, str], width: float) -> None:
    ax.barh([0], [first], 0.4, color=style.BLUE)
    ax.barh([0], [second], 0.4, left=[first], color=style.ORANGE, hatch="//", edgecolor="white")
    ax.set_yticks([])
    ax.set_xlim(0, width)
    ax.set_ylim(-0.4, 0.75)
    ax.grid(False)
    ax.text(0.0, 0.3, f" {words[0]}", color=style.BLUE, fontsize=style.SMALL, va="bottom")
    # The KV label starts at its bar, unless the weights' label needs that room; it ends inside the axes.
    at = min(max(first, 0.2 * width), 0.82 * width)
    ax.text(at, 0.3, f" {words[1]}", color="#8A5F00", fontsize=style.SMALL, va="bottom")


def kv_calculator(models: Mapping[str, ModelConfig], devices: Mapping[str, Device]) -> Any:
    """A widget: pick model, device, dtypes, batch and context; it draws `memory_figure` and lists the numbers."""
    import ipywidgets as w

    wide = {"style": {"description_width": "110px"}, "layout": w.Layout(width="520px")}
    model = w.Dropdown(options=list(models), description="model", **wide)
    device = w.Dropdown(options=list(devices), description="device", **wide)
    dtype = w.ToggleButtons(options=["bfloat16", "float32"], description="weights", style=wide["style"])
    kv_dtype = w.ToggleButtons(options=["bfloat16", "float8", "float32"], description="KV", style=wide["style"])
    heads = w.ToggleButtons(options=["as published", "MHA"], description="KV heads", style=wide["style"])
    batch = w.SelectionSlider(options=[2**i for i in range(11)], value=8, description="sequences", **wide)
    context = w.SelectionSlider(options=[2**i for i in range(7, 18)], value=4096, description="tokens each", **wide)
    picture = w.Image(format="png")
    words = w.HTML()

    def redraw(_: Any = None) -> None:
        config = models[model.value] if heads.value == "as published" else as_mha(models[model.value])
        chosen = devices[device.value]
        plan = memory_plan(config, chosen, batch.value, context.value, dtype.value, kv_dtype.value)
        picture.value = style.png(memory_figure(plan, chosen.name))
        words.value = (
            f"one token of KV: <b>{size(plan.kv_per_token)}</b>; "
            f"beside the weights fit <b>{plan.tokens_that_fit:,}</b> tokens, "
            f"which is {plan.tokens_that_fit // context.value:,} sequences of {context.value:,}; "
            f"KV weighs as much as the weights at <b>{plan.even_tokens:,.0f}</b> tokens"
        )

    controls = [model, device, dtype, kv_dtype, heads, batch, context]
    for control in controls:
        control.observe(redraw, names="value")
    redraw()
    return w.VBox([*controls, picture, words])
