"""Figures and the sharding explorer of lesson 14: the numbers in them, not their looks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

from minillm.errors import MinillmError
from minillm.models.presets import preset
from minillm.parallel.pipeline import even, timetable
from minillm.roofline.comm import LINKS
from minillm.roofline.cost import kv_bytes_per_token
from minillm.roofline.device import device
from minillm.roofline.parallel import predict_parallel
from minillm.viz import parallel, sharding_explorer, style
from minillm.viz.sharding_explorer import said, sharding_figure, sharding_words, shares
from minillm.viz.units import si

LINK = LINKS["eth25"]
SAMPLES = [(4096 * 2**i, 3, LINK.all_reduce(4096 * 2**i, 3)) for i in range(6)]


def texts(fig) -> str:
    found = [t.get_text() for ax in fig.axes for t in ax.texts]
    legends = [leg for leg in (*fig.legends, *(ax.get_legend() for ax in fig.axes)) if leg]
    return " ".join(found + [t.get_text() for leg in legends for t in leg.get_texts()])


def line(fig, name: str):
    return next(l for ax in fig.axes for l in ax.lines if l.get_label() == name)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_layer_is_cut_by_outputs_then_by_inputs_and_added_once_in_each_half(ranks):
    fig = parallel.layer_figure(ranks)
    assert texts(fig).count("all-reduce") == 2
    assert texts(fig).count("nothing is said") == 2
    boxes = [p for p in fig.axes[0].patches if isinstance(p, Rectangle)]
    of = lambda color: [(p.get_width(), p.get_height()) for p in boxes if p.get_facecolor() == to_rgba(color)]
    for rank in range(ranks):  # in each half: outputs, features, inputs, and a part of the sum that is as large as it
        assert of(style.PALETTE[rank]) == [(3 / ranks, 2), (3 / ranks, 0.6), (2, 3 / ranks), (2, 0.6)] * 2
    assert of(parallel.WHOLE) == [(2, 0.6)] * 4
    with pytest.raises(MinillmError, match="2 to 4 ranks, got 1"):
        parallel.layer_figure(1)


def test_an_all_reduce_is_drawn_with_its_two_parts():
    fig = parallel.all_reduce_figure(SAMPLES, LINK, [n for n, *_ in SAMPLES[1::2]])
    assert list(line(fig, "measured, in the fit").get_xdata()) == [n for n, *_ in SAMPLES[::2]]
    assert list(line(fig, "measured, not seen by it").get_xdata()) == [n for n, *_ in SAMPLES[1::2]]
    total, a, moved = (line(fig, n).get_ydata() for n in ("a + 2 (N - 1) / N x bytes / B", "latency a",
                                                           "bytes / bandwidth"))  # fmt: skip
    assert total == pytest.approx([x + y for x, y in zip(a, moved)])
    assert a[0] == pytest.approx(1e6 * LINK.latency(3))
    with pytest.raises(MinillmError, match="one number of ranks"):
        parallel.all_reduce_figure([*SAMPLES, (4096, 2, 1e-3)], LINK)


def test_ranks_beside_the_ideal():
    fig = parallel.ranks_figure({"nvlink": {1: 0.070, 2: 0.037, 4: 0.02}, "eth": {1: 0.07, 2: 0.09}})
    assert list(line(fig, "N times as fast").get_ydata()) == pytest.approx([70, 17.5])
    assert list(line(fig, "eth").get_ydata()) == pytest.approx([70, 90])
    assert list(fig.axes[0].get_yticks()) == pytest.approx([20, 50])
    with pytest.raises(MinillmError, match="every line"):
        parallel.ranks_figure({"nvlink": {}})


def test_a_timetable_has_a_box_for_each_micro_batch():
    slots = timetable(even(3, 4, 0.5))
    rows = [[(t.start, t.end) for t in slots if t.stage == s] for s in range(3)]
    fig = parallel.stages_figure({"three": rows})
    ends = sorted(p.get_x() + p.get_width() for p in fig.axes[0].patches if p.get_width() == 0.5)
    assert len(ends) == 12
    assert ends[-1] == 3.0
    with pytest.raises(MinillmError, match="at least one stage"):
        parallel.stages_figure({})


def test_bubbles_and_terms():
    fig = parallel.bubble_figure({(4, 1): 0.75, (4, 8): 3 / 11, (2, 8): 1 / 9})
    dashed = [l for l in fig.axes[0].lines if l.get_linestyle() == "--" and len(l.get_xdata()) > 1]
    assert dashed[1].get_ydata()[7] == pytest.approx(100 * 3 / 11)
    with pytest.raises(MinillmError, match="at least one run"):
        parallel.bubble_figure({})
    fig = parallel.terms_figure(
        {"tp 2": {"compute": 0.03, "all_reduce": 0.01}, "pp 2": {"compute": 0.03, "idle": 0.03}}
    )
    assert "40.0 ms, 25% talking" in texts(fig)
    assert "60.0 ms, 0% talking" in texts(fig)
    assert "all-gather" not in texts(fig)
    with pytest.raises(MinillmError, match="terms"):
        parallel.terms_figure({"x": {"naps": 1.0}})


# The explorer


def test_shares_cover_the_model():
    config = preset("llama-3.1-8b")
    ranks = shares(config, 4, 2)
    assert [s.place.rank for s in ranks] == list(range(8))
    for stage in (ranks[:4], ranks[4:]):
        assert [h for s in stage for h in s.heads] == list(range(config.num_heads))
        assert [h for s in stage for h in s.kv] == list(range(config.num_kv_heads))
        assert [f for s in stage for f in s.features] == list(range(config.intermediate_size))
    assert [s.layers for s in ranks[::4]] == [range(16), range(16, 32)]
    assert sum(s.kv_bytes for s in ranks) == kv_bytes_per_token(config, "bfloat16")
    one = shares(config)[0].weight_bytes
    assert one < sum(s.weight_bytes for s in ranks) < 1.01 * one, "only the norms are held more than once"


def test_more_ranks_than_kv_heads_hold_them_twice():
    ranks = shares(preset("llama-3.1-8b"), 16)  # 8 KV heads
    assert [s.kv.start for s in ranks] == [r // 2 for r in range(16)]
    assert {len(s.kv) for s in ranks} == {1}
    assert ranks[0].copies == 2
    with pytest.raises(MinillmError, match="sizes that do: 1, 3"):
        shares(preset("smollm2-135m"), 2)


def test_what_is_said_is_what_is_predicted():
    config = preset("llama-3.1-70b")
    words = said(config, 2)
    step = predict_parallel(config, [(1, 100)], device("h200"), tp=2, tp_link=LINKS["nvlink4"])
    assert words.all_reduces == step.all_reduces == 161
    assert words.all_reduce_bytes == 161 * 8192 * 2
    assert said(config) == sharding_explorer.Said(0, 0, 0, 0)
    assert said(config, 1, 2).send_bytes == 2 * (8192 + config.vocab_size)


def test_the_picture_and_the_words():
    config = preset("smollm2-135m")
    fig = sharding_figure(config, 3, 2, "float32")
    assert "layers\n0 to 14" in texts(fig)
    assert "q 3-5, kv 1" in texts(fig)
    hatched = lambda f: sum(bool(p.get_hatch()) for p in f.axes[0].patches)
    assert hatched(fig) == 0
    assert hatched(sharding_figure(preset("llama-3.1-8b"), 16)) == 16
    words = sharding_words(config, 3, 1, "float32", device("h200"), "nvlink4", "ib400")
    assert "61 all-reduces" in words
    assert "nothing is said" in sharding_words(config, 1, 1, "float32", device("h200"), "nvlink4", "ib400")
    assert "each held by 2 ranks" in texts(sharding_figure(preset("llama-3.1-8b"), 16))
    assert "fits 141 GB" in words
    assert "does not fit" in sharding_words(preset("llama-3.1-70b"), 1, 1, "bfloat16", device("h100"), "pcie5", "ib400")
    assert "refused" in sharding_words(config, 2, 1, "float32", device("h200"), "nvlink4", "ib400")
    assert "held by 2 ranks" in sharding_words(preset("llama-3.1-8b"), 16, 1, "bfloat16", device("h200"), "nvlink4",
                                               "ib400")  # fmt: skip


def test_the_words_say_that_launches_are_left_out_and_count_those_they_know():
    """An engine with ranks has no graphs: a price of a launch is paid for each operator."""
    config, launches = preset("llama-3.1-8b"), replace(device("h200"), call_overhead=1e-3)
    step = predict_parallel(config, [(1, sharding_explorer.CONTEXT)], launches, tp=2, tp_link=LINKS["nvlink4"])
    words = sharding_words(config, 2, 1, "bfloat16", launches, "nvlink4", "ib400")
    assert "Launches are left out" in sharding_words(config, 2, 1, "bfloat16", device("h200"), "nvlink4", "ib400")
    assert f"predicted {si(step.expected, 's')}" in words
    assert step.expected > 0.1
    assert "Launches are left out" not in words


def test_the_explorer_follows_its_menus():
    box = sharding_explorer.sharding_explorer()
    menus = {menu.description: menu for row in box.children[:2] for menu in row.children}
    text, picture = box.children[2], box.children[3]
    assert list(menus["TP"].options) == [1, 3]
    menus["model"].value = "llama-3.1-70b"
    assert 16 in menus["TP"].options
    before = bytes(picture.value)
    menus["TP"].value = 8
    assert "161 all-reduces" in text.value
    assert bytes(picture.value) != before
    assert style.png(sharding_figure(preset("llama-3.1-70b"), 8)) == bytes(picture.value)
    slow = text.value
    menus["TP link"].value = "eth25"
    assert text.value != slow
    menus["model"].value = "smollm2-135m"
    assert menus["TP"].value == 3, "the largest that fits and is not larger than before"
