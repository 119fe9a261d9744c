"""Lesson 15's protocol and strips: what they show is what they were given."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import FancyBboxPatch

from minillm.errors import MinillmError
from minillm.viz import split_protocol as viz
from minillm.viz import style

STATES = ["submitted", "reserved", "loaded"]


def test_the_protocol_has_a_box_a_state_an_arrow_a_message_and_the_ways_out():
    exits = {"submitted": ["no room"], "reserved": ["gap", "lease over"]}
    fig = viz.protocol_figure(
        ["queued", "acked"], STATES, [(0.5, "down", "ticket"), (1.0, "up", "ack")], exits, ["reserved"]
    )
    (ax,) = fig.axes
    words = [t.get_text() for t in ax.texts if t.get_text()]
    assert {"queued", "acked", *STATES, "ticket", "ack", "no room", "gap\nlease over"} < set(words)
    boxes = [p for p in ax.patches if isinstance(p, FancyBboxPatch)]
    assert len(boxes) == 2 + 3 + 1, "the states, and the recompute"
    assert [to_hex(b.get_facecolor()) for b in boxes].count(to_hex(viz.HELD)) == 1
    down, up = (
        t for t in ax.texts if not t.get_text() and t.arrow_patch.get_edgecolor()[:3] == (0.0, 0x72 / 255, 0xB2 / 255)
    )
    assert down.xy[1] < down.xyann[1]
    assert up.xy[1] > up.xyann[1]
    assert len(style.png(fig)) > 1000


def test_a_way_out_of_no_state_is_refused():
    with pytest.raises(MinillmError, match="D's states, submitted"):
        viz.protocol_figure(["queued"], STATES, [], {"lost": ["gap"]})


def row(m, b, colocated, split):
    return {"prompt_tokens": m, "bandwidth": b, "colocated": colocated, "split": split}


def test_a_strip_is_grey_for_both_and_coloured_for_one():
    rows = [row(256, 1e9, 40.0, 20.0), row(256, 5e10, 40.0, 60.0), row(1024, 1e9, 0.0, 8.0)]
    fig = viz.strip_figure(rows)
    (ax,) = fig.axes
    bars = [(b.get_x(), b.get_x() + b.get_width(), to_hex(b.get_facecolor()).upper()) for b in ax.patches]
    both, one = bars[::2], bars[1::2]
    assert [end for _, end, _ in both] == pytest.approx([20.0, 40.0, 4.0])  # half of the least rate that is served
    assert [(a, b) for a, b, _ in one] == [pytest.approx(x) for x in ((20.0, 40.0), (40.0, 60.0), (4.0, 8.0))]
    assert [colour for *_, colour in one] == [style.ORANGE, style.BLUE, style.BLUE]
    assert ax.get_yticklabels()[0].get_text() == "256 tokens, 1 GB/s"
    with pytest.raises(MinillmError, match="strips need rows"):
        viz.strip_figure([row(256, 1e9, 0.0, 0.0)])
