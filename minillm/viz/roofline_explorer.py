"""The roofline explorer of lesson 00: sliders around `step_figure`, a pure function.

Move a slider and every operator of the step moves on the roof of the chosen device, with the predicted speed beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets
from matplotlib.figure import Figure

from minillm.config import ModelConfig
from minillm.models.presets import PRESETS, preset
from minillm.roofline.cost import kv_bytes_per_token, step, weight_bytes
from minillm.roofline.device import DATASHEET, Device
from minillm.roofline.predict import Prediction, predict
from minillm.viz import style
from minillm.viz.roofline import Series, attainable, roofline, si

SHOWN = ("qkv", "o_proj", "gate_up", "down", "lm_head", "attention")
SPAN = (0.3, 20_000.0)  # FLOPs/byte: a fixed axis, so that points move and not the scale


def step_figure(
    config: ModelConfig, device: Device, dtype: str, batch: int, context: int, new: int = 1
) -> tuple[Figure, Prediction]:
    """One step of `batch` sequences, `new` tokens each after `context` cached ones: its operators on the roof."""
    ops = step(config, [(new, context)] * batch, dtype)
    prediction = predict(ops, device, dtype, tokens=new * batch)
    peak, bandwidth = device.peak(dtype), device.roof_bandwidth
    found = {op.name: op for op in ops if op.name in SHOWN}
    series = []
    for name in SHOWN:
        intensity = found[name].flops / found[name].bytes
        series.append(Series(name, [(intensity, attainable(intensity, peak, bandwidth))]))
    rate = prediction.flops / prediction.expected
    series.append(Series("whole step", [(prediction.intensity, rate)], measured=True))
    title = f"{device.name}: {batch} × {new} new tokens after {context:,}"
    return roofline(device, dtype, series, title, span=SPAN), prediction


def step_summary(
    config: ModelConfig, device: Device, dtype: str, batch: int, context: int, new: int, p: Prediction
) -> str:
    """The same in words, as HTML: speed, limit, and whether it fits into the device's memory."""
    weights, kv = weight_bytes(config, dtype), batch * (context + new) * kv_bytes_per_token(config, dtype)
    fits = "fits" if weights + kv <= device.memory_bytes else "<b>does not fit</b>"
    need = f"weights {si(weights, 'B')} + KV {si(kv, 'B')} of {si(device.memory_bytes, 'B')}: {fits}"
    each = f"{p.tokens_per_s / batch:,.1f} a sequence"
    speed = f"{si(p.expected, 's')} a step, {p.tokens_per_s:,.1f} tokens/s in all, {each}"
    limit = f"{p.intensity:.3g} FLOPs/byte, ridge {p.ridge:.3g}: <b>{p.bound}</b>-bound"
    return f"<p>{speed}<br>{limit}<br>{need}</p>"


class RooflineExplorer(widgets.VBox):
    """Choose model, device, dtype, batch, context and new tokens; `image` and `text` follow."""

    def __init__(self, devices: Mapping[str, Device] | None = None):
        """devices: more of them by name, such as {"this machine": this_machine()}, before the datasheet ones."""
        self.devices = {**(devices or {}), **DATASHEET}
        wide = {"style": {"description_width": "90px"}, "layout": widgets.Layout(width="340px")}
        power = {"base": 2, "step": 1, "readout_format": "d", "continuous_update": False} | wide
        self.model = widgets.Dropdown(options=list(PRESETS), value="llama-3.1-8b", description="model", **wide)
        self.device = widgets.Dropdown(options=list(self.devices), value="h200", description="device", **wide)
        self.dtype = widgets.Dropdown(options=["bfloat16", "float32"], description="dtype", **wide)
        self.batch = widgets.FloatLogSlider(value=1, min=0, max=10, description="batch", **power)
        self.context = widgets.FloatLogSlider(value=1024, min=0, max=17, description="context", **power)
        self.new = widgets.FloatLogSlider(value=1, min=0, max=13, description="new tokens", **power)
        self.image = widgets.Image(format="png", layout=widgets.Layout(max_width="750px"))
        self.text = widgets.HTML()
        controls = (self.model, self.device, self.dtype, self.batch, self.context, self.new)
        left, right = widgets.VBox(controls[:3]), widgets.VBox(controls[3:])
        super().__init__([widgets.HBox([left, right]), self.text, self.image])
        for control in controls:
            control.observe(self._redraw, names="value")
        self._redraw()

    def _redraw(self, _change: Any = None) -> None:
        config, device = preset(self.model.value), self.devices[self.device.value]
        batch, context, new = (round(slider.value) for slider in (self.batch, self.context, self.new))
        what = (config, device, self.dtype.value, batch, context, new)
        figure, prediction = step_figure(*what)
        self.image.value = style.png(figure)
        self.text.value = step_summary(*what, prediction)
