"""Figures and the block-table explorer of lesson 06: the numbers in them, not their looks."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.patches import Rectangle
from minillm.kernels.splits import split_range

from minillm.errors import MinillmError
from minillm.viz import block_tables, paged, style

TABLES = {
    "A": block_tables.Table(37, [3, 9, 4]),
    "B": block_tables.Table(70, [17, 12, 2, 21, 7]),
    "C": block_tables.Table(16, [15]),
}


def boxes(ax, color=None):
    found = [p for p in ax.patches if isinstance(p, Rectangle)]
    return [p for p in found if color is None or style_of(p) == color]


def style_of(patch):
    from matplotlib.colors import to_hex

    return to_hex(patch.get_facecolor()).upper()


def words(fig):
    return [t.get_text() for ax in fig.axes for t in (*ax.texts, ax.title, ax._left_title)]


def lines(ax):
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.get_lines()]


def test_pool_use_counts_every_slot_once():
    use = block_tables.pool_use(TABLES, 24, 16)
    assert use == block_tables.PoolUse(tokens=123, tail=9 * 16 - 123, free=15 * 16)
    assert sum(use) == 24 * 16


def test_block_table_figure_fills_as_much_as_there_are_tokens():
    fig = block_tables.block_table_figure(TABLES, 24, 16)
    left, right = fig.axes
    for i, (name, table) in enumerate(TABLES.items()):
        filled = boxes(right, block_tables.COLORS[i].upper())
        assert sum(p.get_width() for p in filled) == pytest.approx(0.9 * table.tokens / 16), name
    free = [p for p in boxes(right, block_tables.FREE.upper()) if p.get_width() == 0.9]
    assert len(free) == 24  # one under each block, seen where nothing covers it
    numbers = [t.get_text() for t in left.texts]
    for table in TABLES.values():
        assert all(str(block) in numbers for block in table.blocks)
    assert any("123 slots with tokens, 21 in tails, 240 free" in w for w in words(fig))


@pytest.mark.parametrize(("name", "position", "slot"), [("B", 53, 21 * 16 + 5), ("A", 0, 48), ("C", 15, 255)])
def test_a_token_is_found_in_its_slot(name, position, slot):
    fig = block_tables.block_table_figure(TABLES, 24, 16, find=(name, position))
    assert any(w.endswith(f"slot {slot}") for w in words(fig))
    (mark,) = boxes(fig.axes[1], "#000000")
    block, offset = divmod(slot, 16)
    x, y = (block - 1) % 8, -((block - 1) // 8)
    assert mark.get_xy() == (pytest.approx(x + 0.9 * offset / 16), y)


def test_share_written_looks_only_at_steps_with_somebody_waiting():
    log = [paged.Usage(10, 50, True), paged.Usage(30, 50, True), paged.Usage(0, 100, False)]
    assert paged.share_written(log) == pytest.approx(0.4)
    assert paged.share_written(log, of=100) == pytest.approx(0.2)
    with pytest.raises(MinillmError, match="nobody ever waited"):
        paged.share_written(log[2:])


def test_memory_figure_says_the_share_and_the_steps():
    log = [paged.Usage(100, 200, True)] * 1000
    fig = paged.memory_over_time_figure({"rows": log, "pages": log[:300]}, 400)
    assert any("25 % holds tokens, done at 1,000" in w for w in words(fig))
    assert any("done at 300" in w for w in words(fig))
    assert len(style.png(fig)) < 75_000  # a notebook holds it


def test_useful_share_figure_has_prediction_measurement_and_target():
    fig = paged.useful_share_figure([16, 32], [0.98, 0.95], [0.97, 0.94], {"rows": 0.3})
    drawn = lines(fig.axes[0])
    assert ([16, 32], pytest.approx([98, 95])) == drawn[0]
    assert ([16, 32], pytest.approx([97, 94])) == drawn[1]
    assert [y for _, y in drawn[2:]] == [pytest.approx([95, 95]), pytest.approx([30, 30])]


def test_steps_figure_in_milliseconds():
    fig = paged.steps_figure([64, 128], {"paged": [0.1, 0.2]}, {"paged": [0.11, 0.21]})
    assert [y for _, y in lines(fig.axes[0])] == [pytest.approx([100, 200]), pytest.approx([110, 210])]


@pytest.mark.parametrize(("parts", "busy"), [(1, 8), (8, 64), (16, 128), (17, 132), (33, 132)])
def test_multiprocessors_that_have_work(parts, busy):
    fig = paged.multiprocessors_figure(8, [parts], 132)
    idle = boxes(fig.axes[0], block_tables.FREE.upper())
    assert 132 - len(idle) == busy
    assert any(f"{8 * parts} programs,\n{busy} of 132 busy" in w for w in words(fig))


@settings(max_examples=20, deadline=None)
@given(context=st.integers(1, 3000), splits=st.integers(1, 12))
def test_split_figure_covers_each_token_once(context, splits):
    fig = paged.split_figure({"s": context}, splits, 64)
    drawn = sorted((p.get_x(), p.get_x() + p.get_width()) for p in boxes(fig.axes[0]))
    assert drawn[0][0] == 0
    assert drawn[-1][1] == context
    assert all(a[1] == b[0] for a, b in pairwise(drawn))
    empty = sum(a == b for a, b in (split_range(context, s, splits, 64) for s in range(splits)))
    assert any(w.startswith(f"merge {splits - empty}") for w in words(fig))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), block_size=st.sampled_from([16, 32, 64]))
def test_the_explorer_loses_no_block(seed, block_size):
    rng, pool = random.Random(seed), block_tables.Pool(12, block_size)
    for _ in range(40):
        rng.choice([lambda: pool.add(rng.randint(1, 200)), pool.step, lambda: pool.step(8), pool.finish])()
        pool.allocator.check()
        held = [b for t in pool.tables.values() for b in t.blocks]
        assert len(set(held)) == len(held) == 12 - pool.allocator.num_free
        assert all((len(t.blocks) - 1) * block_size < t.tokens <= len(t.blocks) * block_size for t in
                   pool.tables.values())  # fmt: skip
        assert pool.said
    while pool.tables:
        pool.finish()
    assert pool.allocator.num_free == 12


def test_explorer_says_who_waits_and_who_is_stuck():
    pool = block_tables.Pool(3, 16)
    pool.finish()
    assert pool.said == "nobody is here"
    pool.add(48)
    assert "A takes 3 blocks: 1, 2, 3" in pool.said
    pool.add(1)
    assert pool.said == "1 block wanted, 0 free: it waits"
    pool.step()
    assert pool.said == "A is stuck: no free block"
    pool.finish()
    assert "3 blocks are free" in pool.said


def test_the_widget_draws_what_its_buttons_do():
    box = block_tables.block_table_explorer(8)
    size, tokens, buttons, said, picture = box.children
    first = bytes(picture.value)
    assert first.startswith(b"\x89PNG")
    tokens.value = 20
    buttons.children[0].click()
    assert said.value == "A takes 2 blocks: 1, 2"
    assert bytes(picture.value) != first
    for button in buttons.children[1:3]:
        button.click()
    buttons.children[3].click()
    assert "A gives back" in said.value
    size.value = 32
    assert said.value == "an empty pool"
    assert bytes(picture.value) != first  # the title names the block size
