"""The radix-tree picture and its explorer: what they say and where blocks stand, not their looks."""

from __future__ import annotations

import random

import pytest
from matplotlib.patches import Rectangle

from minillm.cache.prefix import Namespace, RadixPrefixCache
from minillm.errors import MinillmError
from minillm.viz import prefix_tree as viz
from minillm.viz import prefix_tree_curves as curves
from minillm.viz import style

ANN, BOB = Namespace("engine", "ann", "", 2), Namespace("engine", "bob", "", 2)


def tree() -> RadixPrefixCache:
    cache = RadixPrefixCache(2)
    cache.insert([1, 1, 2, 2, 3, 3], ANN, [1, 2, 3])
    cache.insert([1, 1, 2, 2, 4, 4], ANN, [1, 2, 4])
    cache.insert([1, 1, 5, 5], BOB, [1, 5])
    cache.insert([6, 6, 7, 7], Namespace("engine", "bob"), [6, 7])
    return cache


def words(fig):
    return [t.get_text() for ax in fig.axes for t in (*ax.texts, ax._left_title)]


def test_a_block_stands_in_the_column_of_its_place_and_no_two_at_one_spot():
    blocks = {b.id: b for b in viz.place(tree().snapshot())}
    assert {i: b.column for i, b in blocks.items()} == {1: 0, 2: 1, 3: 2, 4: 2, 5: 1, 6: 0, 7: 1}
    assert len({(b.column, b.row) for b in blocks.values()}) == 7
    assert blocks[1].owner is None
    assert (blocks[2].owner, blocks[5].owner) == ("ann", "bob")
    assert {b.id for b in blocks.values() if b.leaf} == {3, 4, 5, 7}
    assert {b.id: b.above for b in blocks.values()}[4] == (1, blocks[2].row)
    assert not blocks[7].opens, "a run of two blocks"
    assert blocks[2].opens, "the reader changes behind a public block"


@pytest.mark.parametrize("seed", range(8))
def test_every_block_of_a_random_tree_is_placed_once_under_its_parent(seed):
    rng, cache, next_id = random.Random(seed), RadixPrefixCache(1), 1
    for _ in range(12):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 6))]
        ids, _ = cache.match(tokens, ANN)
        fresh = list(range(next_id, next_id + len(tokens) - len(ids)))
        next_id += len(fresh)
        cache.insert(tokens, ANN, ids + fresh)
    blocks = viz.place(cache.snapshot())
    assert sorted(b.id for b in blocks) == list(range(1, next_id))
    at = {(b.column, b.row): b for b in blocks}
    assert len(at) == len(blocks)
    for b in blocks:
        assert (b.above is None) == (b.column == 0)
        if b.above is not None:
            assert b.above in at
            assert b.above[0] == b.column - 1
            assert b.above[1] <= b.row


def test_next_to_leave_is_what_the_cache_evicts():
    cache = tree()
    cache.match([1, 1, 2, 2, 3, 3], ANN)
    cache.lock([5])
    for _ in range(3):
        expected = viz.next_to_leave(viz.place(cache.snapshot()))
        assert cache.evict(1) == [expected.id]
    cache.lock([1, 2, 3, 6, 7])
    assert viz.next_to_leave(viz.place(cache.snapshot())) is None
    assert cache.evict(1) == []


def test_the_figure_names_each_block_its_words_and_its_owner():
    cache = tree()
    cache.lock([7])
    names = {1: "once upon", 2: "a time there", 3: "was", 4: "were", 5: "ago", 6: "six", 7: "seven"}
    fig = viz.prefix_tree_figure(cache.snapshot(), lambda tokens: names[tokens[0]], hit=[1, 2], title="a title")
    said = words(fig)
    for i in range(1, 8):
        assert str(i) in said
    assert "a time\nthere" in said, "a long text is broken in the middle"
    assert any(s == "a title\n7 blocks of 2 tokens, 1 held by requests" for s in said)
    legend = [t.get_text() for t in fig.legends[0].get_texts()]
    assert legend[:3] == ["of ann", "of bob", "public"]
    edges = [
        p for p in fig.axes[0].patches if isinstance(p, Rectangle) and not p.get_fill() and p.get_linewidth() == 2.2
    ]
    assert sorted(p.get_x() for p in edges) == [0, 1], "what was found has a thick edge"


def test_an_empty_tree_is_a_picture_too():
    assert style.png(viz.prefix_tree_figure(RadixPrefixCache(4).snapshot()))


def test_the_explorer_tells_a_hit_from_a_miss():
    e = viz.Explorer()
    e.ask(viz.PROMPTS[0])
    assert "15 words: 0 found, 15 to compute; into the cache: blocks 1, 2, 3" in e.said
    e.ask(viz.PROMPTS[1])
    assert "12 found, 3 to compute; nothing new" in e.said, "the words of the third block are common, too"
    e.ask(viz.PROMPTS[0], "bob")
    assert "0 found" in e.said, "another tenant"
    e.ask(viz.PROMPTS[4])
    assert e.said.endswith("it waits"), "10 blocks are held by three requests"
    e.finish()
    assert e.said == "ann's request ends; free again: block 4"


def test_a_prompt_of_whole_blocks_leaves_one_to_compute():
    e = viz.Explorer(prompts=["a b c d e f g h"])
    for _ in range(2):
        e.ask(e.prompts[0])
    assert "4 found, 4 to compute; nothing new for the cache" in e.said


@pytest.mark.parametrize("seed", range(5))
def test_the_explorer_loses_no_block(seed):
    rng, e = random.Random(seed), viz.Explorer(8)
    for _ in range(60):
        rng.choice([lambda: e.ask(rng.choice(viz.PROMPTS), rng.choice(["ann", "bob"])), e.finish, e.evict])()
        held = {i for _, table in e.running for i in table}
        cached = {b.id for b in viz.place(e.cache.snapshot())}
        assert sorted([*e.free, *(held | cached)]) == list(range(1, 9))
        e.cache.check()


def test_the_widget_wraps_the_explorer():
    box = viz.prefix_tree_explorer()
    ask, ends, evict, again = box.children[2].children
    picture = box.children[3]
    empty = picture.value
    ask.click()
    asked = picture.value
    assert asked != empty
    ends.click()
    evict.click()
    assert picture.value != asked
    again.click()
    assert picture.value == empty


# The curves


def test_savings_are_amdahls():
    assert curves.savings(0.5, 0.0) == 1
    assert curves.savings(0.5, 1.0) == 2
    assert curves.savings(0.4, 0.9) == pytest.approx(1 / 0.64)
    assert curves.savings(1.0, 1.0) == float("inf")
    with pytest.raises(MinillmError, match="found is a share"):
        curves.savings(0.5, 90)


def test_hit_curves_share_one_scale():
    fig = curves.hit_curve_figure([0.0, 0.5, 1.0], ([1.0, 0.5, 0.1], [1.1, 0.6, 0.1]), ([3, 2.5, 2.1], [3, 2, 2]), 32)
    left, right = fig.axes
    assert left.get_ylim() == right.get_ylim()
    assert [list(line.get_ydata()) for line in left.get_lines()] == [[1.0, 0.5, 0.1], [1.1, 0.6, 0.1]]
    assert list(right.get_lines()[0].get_xdata()) == [0, 50, 100]


def test_found_bars_are_labelled_with_their_shares():
    fig = curves.found_figure({"chat": {"as it is": 0.5, "shuffled": 0.25}, "documents": {"as it is": 0.125}})
    assert [t.get_text() for t in fig.axes[0].texts] == ["50% as it is", "25% shuffled", "12% as it is"]
    assert [p.get_width() for p in fig.axes[0].patches] == [50, 25, 12.5]


def test_waits_add_up():
    fig = curves.waits_figure({"alone": (0.0, 0.1, 1.0), "behind others": (2.0, 0.1, 1.0)})
    assert [t.get_text() for t in fig.axes[0].texts] == ["1.10 s", "3.10 s"]
    assert [p.get_x() for p in fig.axes[0].patches][3:] == pytest.approx([0, 2.0, 2.1])
