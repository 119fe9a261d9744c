"""The split planner of lesson 15: model, devices, line, prompt, output, load and promise in; together or apart out.

`split_figure` is pure, `planned` only asks `minillm.cluster.split_planner`; `split_explorer` wraps both in controls.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from matplotlib.figure import Figure

from minillm.cluster.migration import BUDGETS, Engine, Wire, crossover
from minillm.cluster.split_planner import SplitPlan, plan_split
from minillm.cluster.step_times import Workload
from minillm.errors import MinillmError
from minillm.models.presets import preset
from minillm.roofline.device import device
from minillm.trace.latency import SLO
from minillm.viz import style

LINES = {  # datasheets, bytes/s and seconds
    "NVLink, 450 GB/s": (450e9, 2e-6), "400 Gb/s InfiniBand": (50e9, 5e-6), "100 Gb/s Ethernet": (12.5e9, 3e-5),
    "25 Gb/s Ethernet": (3.125e9, 3e-5), "10 Gb/s Ethernet": (1.25e9, 5e-5),
}  # fmt: skip
CHUNKS = {
    "64 tokens or more": BUDGETS,
    "256 tokens or more": tuple(b for b in BUDGETS if b >= 256),
    "whole prompts": None,
}


def planned(
    model: str = "llama-3.1-8b", device_name: str = "h100", engines: int = 8, bandwidth: float = 50e9,
    latency_s: float = 5e-6, prompt: int = 1024, output: int = 256, rate: float | None = None, ttft_s: float = 1.0,
    itl_s: float = 0.02, budgets: Sequence[int] | None = None,
) -> tuple[SplitPlan, float]:  # fmt: skip
    """The plan, and the bandwidth in bytes/s above which moving a prompt's KV is quicker than computing it again.

    rate: requests/s that come; None asks how many could. itl_s bounds every gap between two tokens, and so their mean.
    budgets: tokens a step to choose from. Raises MinillmError for a model that does not fit, and for what is no number.
    """
    more: dict[str, Any] = {} if budgets is None else {"budgets": tuple(budgets)}
    engine = Engine(preset(model), device(device_name), max_num_seqs=128, **more)
    wire = Wire(bandwidth, latency_s)
    plan = plan_split(
        engine, engines, Workload(prompt, output, rate), SLO(ttft_s=ttft_s, tpot_s=itl_s, itl_s=itl_s), wire
    )
    return plan, crossover(engine, prompt, wire)


def split_figure(plan: SplitPlan, break_even: float | None = None) -> Figure:
    """Goodput of the co-located engines and of every split, what each is full by, and the verdict in words."""
    pools = [plan.colocated, *sorted(plan.splits, key=lambda p: p.prefill)]
    best = max(pools, key=lambda p: p.goodput)
    chosen = plan.best if plan.pays else plan.colocated
    fig, (ax,) = style.figure(8.5, 1.7 + 0.32 * len(pools))
    for i, pool in enumerate(pools):
        color = style.ORANGE if not pool.prefill else style.BLUE
        ax.barh(-i, pool.goodput, 0.7, color=color, alpha=1.0 if pool is chosen else 0.45)
        words = f"{pool.goodput:,.3g}/s, full by {pool.bottleneck}" if pool.goodput else f"none: {pool.bottleneck}"
        style.label(ax, pool.goodput, -i, words, dx=4)
    ax.set_yticks([-i for i in range(len(pools))], [p.name for p in pools], fontsize=style.SMALL)
    ax.set_xlim(0, 1.55 * (best.goodput or 1.0))
    if plan.workload.rate is not None:
        ax.axvline(plan.workload.rate, color=style.GREY, linestyle=":", linewidth=1.2)
        style.label(ax, plan.workload.rate, 0.62, "what comes", style.GREY, dx=3)
    ax.grid(False, axis="y")
    ax.set_ylim(0.4 - len(pools), 0.9)
    verdict = ("split" if plan.pays else "stay together") if plan.clear else "too close to call: measure both"
    style.name_axes(ax, "goodput (requests/s within the promise)", "", f"{verdict}: {_gain(plan)}")
    fig.supxlabel("\n".join(textwrap.wrap(_below(plan, break_even), 118)), fontsize=style.SMALL, x=0.02, ha="left")
    return fig


def _gain(plan: SplitPlan) -> str:
    if plan.best is None:
        return "one engine cannot be split"
    if math.isinf(plan.gain):
        return "only a split serves anything"
    return f"the best split serves {plan.gain:.2f} times as much of what comes"


def _below(plan: SplitPlan, break_even: float | None) -> str:
    words = [f"{reason.code}: {reason.words}." for reason in plan.reasons]
    if break_even is not None and math.isfinite(break_even):
        words.append(
            f"Moving the KV of one prompt is quicker than computing it again above {break_even / 1e9:.3g} GB/s; "
            f"the line has {plan.wire.bandwidth / 1e9:.3g}."
        )
    return " ".join(words)


def split_explorer(models: Sequence[str], devices: Sequence[str], most_engines: int = 8) -> Any:
    """A widget: controls around `planned` and `split_figure`. They wait for a button: a plan takes seconds."""
    import ipywidgets as w

    wide, label = w.Layout(width="330px"), {"description_width": "105px"}
    how: dict[str, Any] = {"layout": wide, "style": label}
    asked = {
        "model": w.Dropdown(options=list(models), description="model", **how),
        "device_name": w.Dropdown(options=list(devices), description="device", **how),
        "engines": w.IntSlider(4, 1, most_engines, description="engines", **how),
        "line": w.Dropdown(options=list(LINES), value="400 Gb/s InfiniBand", description="line", **how),
        "chunks": w.Dropdown(options=list(CHUNKS), description="chunks", **how),
        "prompt": w.SelectionSlider(options=[128, 256, 512, 1024, 2048, 4096], value=1024, description="prompt", **how),
        "output": w.SelectionSlider(options=[32, 64, 128, 256, 512, 1024], value=256, description="output", **how),
        "rate": w.FloatText(0.0, description="rate (0: any)", **how),
        "ttft_s": w.FloatText(1.0, description="TTFT at most, s", **how),
        "itl_ms": w.FloatText(15.0, description="ITL at most, ms", **how),
    }
    picture = w.Image(format="png", layout=w.Layout(max_width="850px"))
    words, button = w.HTML(), w.Button(description="plan", button_style="primary")

    @lru_cache(maxsize=64)
    def drawn(*values: Any) -> bytes:
        given = dict(zip(asked, values, strict=True))
        bandwidth, latency_s = LINES[given.pop("line")]
        given["rate"] = given["rate"] or None
        given["itl_s"] = given.pop("itl_ms") / 1e3
        given["budgets"] = CHUNKS[given.pop("chunks")] or (given["prompt"],)
        return style.png(split_figure(*planned(bandwidth=bandwidth, latency_s=latency_s, **given)))

    def redraw(_click: Any = None) -> None:
        words.value = "planning ..."
        try:
            picture.value, words.value = drawn(*(control.value for control in asked.values())), ""
        except MinillmError as error:
            words.value = f"<b>{error}</b>"

    button.on_click(redraw)
    redraw()
    controls = list(asked.values())
    return w.VBox([w.HBox([w.VBox(controls[:5]), w.VBox([*controls[5:], button])]), words, picture])
