"""The sharding explorer of lesson 14: choose a model, TP and PP, and see what each rank holds and what is said.

`shares` and `sharding_figure` are pure; `sharding_explorer` wraps them in menus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.models.presets import PRESETS, preset
from minillm.parallel.shard import Place, check, kv_heads, local_config, sizes_that_fit, stage_layers
from minillm.roofline.comm import LINKS, link
from minillm.roofline.cost import element_size, kv_bytes_per_token
from minillm.roofline.device import DATASHEET, Device
from minillm.roofline.parallel import predict_parallel, rank_parameters
from minillm.viz import style
from minillm.viz.units import si

BARS = {
    "query heads": style.BLUE,
    "KV heads": style.VERMILLION,
    "MLP features": style.GREEN,
    "vocabulary": style.PURPLE,
}
MOST_TP, STAGES = 16, (1, 2, 4, 8)
CONTEXT = 1024  # tokens before the one whose time is predicted


@dataclass(frozen=True)
class Share:
    """What one rank holds, [from, to) of the whole model's counting, and how much that is.

    vocabulary: of the embedding on the first stage, of the head on the last; empty between.
    copies: how many ranks of the stage hold the same KV heads. Bytes of the weights, and of a token's KV.
    """

    place: Place
    layers: range
    heads: range
    kv: range
    copies: int
    features: range
    vocabulary: range
    weight_bytes: int
    kv_bytes: int


@dataclass(frozen=True)
class Said:
    """What a token of one sequence costs in words: bytes of the tensors as they are given to each collective."""

    all_reduces: int
    all_reduce_bytes: int
    gather_bytes: int
    send_bytes: int


def shares(config: ModelConfig, tp: int = 1, pp: int = 1, dtype: str = "bfloat16") -> list[Share]:
    """Each rank's share, in the order of the ranks. Raises MinillmError with the sizes that do where these do not."""
    check(config, tp, pp)
    found = []
    for rank in range(tp * pp):
        place = Place.of_rank(rank, tp, pp)
        local = local_config(config, tp, pp, place.stage)
        part = lambda n, at=place.tp_rank: range(at * (n // tp), (at + 1) * (n // tp))
        found.append(Share(
            place, stage_layers(config.num_layers, pp, place.stage), part(config.num_heads), kv_heads(config, place),
            max(1, tp // config.num_kv_heads), part(config.intermediate_size),
            part(config.vocab_size) if place.first or place.last else range(0),
            rank_parameters(config, tp=tp, pp=pp, stage=place.stage) * element_size(dtype),
            kv_bytes_per_token(local, dtype),
        ))  # fmt: skip
    return found


def said(config: ModelConfig, tp: int = 1, pp: int = 1, dtype: str = "bfloat16") -> Said:
    """Two all-reduces a layer and one for the embedding, each of D; a gather of logits; D from stage to stage."""
    check(config, tp, pp)
    size = element_size(dtype)
    count = 2 * config.num_layers + 1 if tp > 1 else 0
    row = config.hidden_size * size
    back = config.vocab_size * size  # the last stage tells the first one the logits
    return Said(count, count * row, config.vocab_size * size if tp > 1 else 0, (pp - 1) * row + (back if pp > 1 else 0))


def sharding_figure(config: ModelConfig, tp: int = 1, pp: int = 1, dtype: str = "bfloat16") -> Figure:
    """A row for each stage, a box for each rank: its part of heads, features and vocabulary in the whole model's."""
    ranks = shares(config, tp, pp, dtype)
    width = max(6.0, min(13.0, 1.2 + 1.5 * tp))
    fig, (ax,) = style.figure(width, 0.9 + 1.15 * pp)
    sizes = {"query heads": config.num_heads, "KV heads": config.num_kv_heads, "MLP features": config.intermediate_size,
             "vocabulary": config.vocab_size}  # fmt: skip
    for share in ranks:
        _box(ax, share, sizes, small=tp > 8)
    for stage in range(pp):
        layers = ranks[stage * tp].layers
        ax.text(-0.06, stage + 0.45, f"layers\n{layers.start} to {layers.stop - 1}", ha="right", va="center",
                fontsize=style.SMALL)  # fmt: skip
    ax.set(xlim=(-0.5, tp), ylim=(pp, -0.12))
    ax.set_axis_off()
    ax.grid(False)
    handles = [Rectangle((0, 0), 1, 1, facecolor=color, label=name) for name, color in BARS.items()]
    if ranks[0].copies > 1:
        look: dict[str, Any] = {"facecolor": BARS["KV heads"], "edgecolor": "white", "hatch": "////", "lw": 0}
        handles.insert(2, Rectangle((0, 0), 1, 1, label=f"each held by {ranks[0].copies} ranks", **look))
    fig.legend(handles=handles, ncols=len(handles), loc="outside upper center", fontsize=style.SMALL, frameon=False)
    return fig


def _box(ax: Axes, share: Share, sizes: dict[str, int], small: bool) -> None:
    x, y = share.place.tp_rank + 0.04, float(share.place.stage)
    ax.add_patch(Rectangle((x, y), 0.92, 0.9, facecolor="white", edgecolor=style.GREY, linewidth=0.8))
    parts = {"query heads": share.heads, "KV heads": share.kv, "MLP features": share.features,
             "vocabulary": share.vocabulary}  # fmt: skip
    for i, (name, part) in enumerate(parts.items()):
        at, whole = y + 0.24 + 0.1 * i, sizes[name]
        ax.add_patch(Rectangle((x + 0.05, at), 0.82, 0.07, facecolor="#EEEEEE", edgecolor="none"))
        box = (x + 0.05 + 0.82 * part.start / whole, at), 0.82 * len(part) / whole, 0.07
        hatch = "////" if name == "KV heads" and share.copies > 1 else None
        ax.add_patch(Rectangle(*box, facecolor=BARS[name], edgecolor="white" if hatch else "none", lw=0, hatch=hatch))
    size = style.SMALL - (3 if small else 1)
    heads, kv = (_span(r) for r in (share.heads, share.kv))
    ax.text(x + 0.05, y + 0.06, f"rank {share.place.rank}", fontsize=size, va="center", weight="bold")
    ax.text(x + 0.05, y + 0.16, f"q {heads}, kv {kv}", fontsize=size, va="center")
    words = f"{si(share.weight_bytes, 'B')}\n{si(share.kv_bytes, 'B')} a token"
    ax.text(x + 0.05, y + 0.76, words, fontsize=size, va="center")


def _span(r: range) -> str:
    return f"{r.start}" if len(r) == 1 else f"{r.start}-{r.stop - 1}"


def sharding_words(
    config: ModelConfig, tp: int, pp: int, dtype: str, device: Device, tp_link: str, pp_link: str
) -> str:
    """The same in words, as HTML: bytes, what is said for a token, and the token's predicted time beside one rank's.

    A step of one rank is a CUDA graph, that of several is not; a datasheet names no price of a launch.
    """
    try:
        ranks, words = shares(config, tp, pp, dtype), said(config, tp, pp, dtype)
    except MinillmError as error:
        return f"<p><b>refused:</b> {error}</p>"
    most = max(share.weight_bytes for share in ranks)
    fits = "fits" if most < device.memory_bytes else "<b>does not fit</b>"
    rows = [(1, CONTEXT)]
    alone = predict_parallel(config, rows, device, dtype, captured=True)
    step = alone if tp * pp == 1 else predict_parallel(
        config, rows, device, dtype, tp=tp, pp=pp, tp_link=link(tp_link), pp_link=link(pp_link)
    )  # fmt: skip
    terms = ", ".join(f"{name.replace('_', '-')} {si(t, 's')}" for name, t in step.terms.items() if t)
    copies = ranks[0].copies
    held = f"; each KV head is held by {copies} ranks" if copies > 1 else ""
    said_here = (
        f"a token: {words.all_reduces} all-reduces of {si(words.all_reduce_bytes, 'B')} in all, "
        f"{si(words.gather_bytes, 'B')} of logits gathered, {si(words.send_bytes, 'B')} from stage to stage"
    )
    lines = [
        f"a rank holds {si(most, 'B')} of weights, which {fits} {si(device.memory_bytes, 'B')}{held}",
        said_here if tp * pp > 1 else "a token: nothing is said",
        f"predicted {si(step.expected, 's')} a token ({terms}); "
        f"{alone.expected / step.expected:.2f} times as fast as one rank with enough memory",
    ]
    if not device.call_overhead:
        lines.append("Launches are left out; this engine pays for each when it has ranks")
    return "<p>" + "<br>".join(lines) + "</p>"


def sharding_explorer(models: Sequence[str] = tuple(PRESETS)) -> Any:
    """A widget: menus for model, TP, PP, dtype, device and links around `sharding_figure` and `sharding_words`."""
    import ipywidgets as w

    wide = {"style": {"description_width": "70px"}, "layout": w.Layout(width="230px")}
    model = w.Dropdown(options=list(models), value=models[0], description="model", **wide)
    tp, pp = w.Dropdown(options=[1], description="TP", **wide), w.Dropdown(options=STAGES, description="PP", **wide)
    dtype = w.Dropdown(options=["bfloat16", "float32"], description="dtype", **wide)
    device = w.Dropdown(options=list(DATASHEET), value="h200", description="device", **wide)
    tp_link = w.Dropdown(options=list(LINKS), value="nvlink4", description="TP link", **wide)
    pp_link = w.Dropdown(options=list(LINKS), value="ib400", description="PP link", **wide)
    picture, text = w.Image(format="png", layout=w.Layout(max_width="1100px")), w.HTML()
    menus = (model, tp, pp, dtype, device, tp_link, pp_link)

    def sizes(_change: Any = None) -> None:
        fit = [n for n in sizes_that_fit(preset(model.value)) if n <= MOST_TP]
        tp.options, tp.value = fit, max(n for n in fit if n <= tp.value)

    def redraw(_change: Any = None) -> None:
        config = preset(model.value)
        if tp.value not in sizes_that_fit(config):
            return  # between two models: `sizes` comes next
        picture.value = style.png(sharding_figure(config, tp.value, pp.value, dtype.value))
        text.value = sharding_words(config, tp.value, pp.value, dtype.value, DATASHEET[device.value], tp_link.value,
                                    pp_link.value)  # fmt: skip

    model.observe(sizes, names="value")
    for menu in menus:
        menu.observe(redraw, names="value")
    sizes()
    redraw()
    return w.VBox([w.HBox(menus[:4]), w.HBox(menus[4:]), text, picture])
