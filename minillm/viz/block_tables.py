"""The block-table picture of lesson 06: sequences, their block tables, and the pool they point into.

`block_table_figure` is pure; `block_table_explorer` wraps it, and the small `Pool` that it drives, in buttons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minillm.cache.blocks import BlockAllocator
from minillm.viz import style

COLORS = (style.BLUE, style.ORANGE, style.GREEN, style.PURPLE, style.SKY, style.VERMILLION)
FREE = "#F2F2F2"


class Table(NamedTuple):
    """A sequence in a paged cache: how many tokens it has, and its blocks in order."""

    tokens: int
    blocks: Sequence[int]


class PoolUse(NamedTuple):
    """What the slots of a pool are doing. tail: in a held block, behind the sequence's last token."""

    tokens: int
    tail: int
    free: int


def pool_use(tables: Mapping[str, Table], num_blocks: int, block_size: int) -> PoolUse:
    """Slots of `num_blocks` blocks, of which no two tables share one."""
    tokens = sum(t.tokens for t in tables.values())
    held = sum(len(t.blocks) for t in tables.values()) * block_size
    return PoolUse(tokens, held - tokens, num_blocks * block_size - held)


def block_table_figure(
    tables: Mapping[str, Table], num_blocks: int, block_size: int, find: tuple[str, int] | None = None
) -> Figure:
    """Sequences and their block tables on the left, the pool on the right; blocks 1 to num_blocks.

    Filled: slots with a token. Hatched: the tail of a last block, held and empty. Grey: free blocks. find = (name,
    position) outlines one token's entry in the table and its slot in the pool.
    """
    columns = 8
    rows = -(-num_blocks // columns)
    height = 1.7 + 0.62 * max(rows, len(tables))
    fig, (left, right) = style.figure(9.5, height, columns=2)
    if (grid := left.get_gridspec()) is not None:
        grid.set_width_ratios([1.0, 1.25])
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(tables)}
    owner = {block: (name, i) for name, t in tables.items() for i, block in enumerate(t.blocks)}
    words = _tables(left, tables, colors, block_size, find)
    for block in range(1, num_blocks + 1):
        x, y = (block - 1) % columns, -((block - 1) // columns)
        right.add_patch(Rectangle((x, y), 0.9, 0.8, facecolor=FREE, edgecolor=style.GREY, linewidth=0.8))
        if block in owner:
            name, i = owner[block]
            share = min(1.0, max(0.0, (tables[name].tokens - i * block_size) / block_size))
            right.add_patch(Rectangle((x, y), 0.9 * share, 0.8, facecolor=colors[name], alpha=0.75, linewidth=0))
            right.add_patch(
                Rectangle(
                    (x + 0.9 * share, y), 0.9 * (1 - share), 0.8, facecolor="white", edgecolor=colors[name],
                    hatch="////", linewidth=0,
                )
            )  # fmt: skip
            right.add_patch(Rectangle((x, y), 0.9, 0.8, fill=False, edgecolor=colors[name], linewidth=1.4))
        right.text(x + 0.05, y + 0.74, str(block), fontsize=style.SMALL - 1, va="top")
    if find is not None:
        name, position = find
        block, offset = tables[name].blocks[position // block_size], position % block_size
        x, y = (block - 1) % columns, -((block - 1) // columns)
        width = 0.9 / block_size
        right.add_patch(
            Rectangle((x + offset * width, y), width, 0.8, facecolor=style.BLACK, edgecolor=style.BLACK, linewidth=1.2)
        )
        right.add_patch(Rectangle((x, y), 0.9, 0.8, fill=False, edgecolor=style.BLACK, linewidth=2.4))
    right.set(xlim=(-0.1, columns), ylim=(-rows + 0.85, 1.0))
    use = pool_use(tables, num_blocks, block_size)
    right.set_title(
        f"pool: {use.tokens} slots with tokens, {use.tail} in tails, {use.free} free", fontsize=style.SIZE, loc="left"
    )
    for ax in (left, right):
        ax.set_axis_off()
    handles = [
        Patch(facecolor=style.GREY, alpha=0.75, label="token"),
        Patch(facecolor="white", edgecolor=style.GREY, hatch="////", label="tail"),
        Patch(facecolor=FREE, edgecolor=style.GREY, label="free block"),
    ]
    fig.legend(handles=handles, ncols=3, loc="outside lower right", fontsize=style.SMALL, frameon=False)
    left.set_title(f"block tables, {block_size} tokens a block{words}", fontsize=style.SIZE, loc="left")
    return fig


def _tables(
    ax: Axes, tables: Mapping[str, Table], colors: Mapping[str, str], block_size: int, find: tuple[str, int] | None
) -> str:
    """Draw a row of numbered boxes for each sequence. Returns what to say about the token that is looked for."""
    longest = max([5, *(len(t.blocks) for t in tables.values())])
    scale = 5.2 / longest  # a long table gets narrower boxes
    for i, (name, t) in enumerate(tables.items()):
        ax.text(0.0, -i + 0.4, f"{name}: {t.tokens}", fontsize=style.SMALL, color=style.BLACK, va="center")
        for j, block in enumerate(t.blocks):
            x = 1.7 + j * scale
            found = find is not None and find[0] == name and find[1] // block_size == j
            ax.add_patch(
                Rectangle(
                    (x, -i + 0.1), 0.92 * scale, 0.6, facecolor="white",
                    edgecolor=style.BLACK if found else colors[name], linewidth=2.4 if found else 1.4,
                )
            )  # fmt: skip
            ax.text(x + 0.46 * scale, -i + 0.4, str(block), fontsize=style.SMALL, ha="center", va="center")
    ax.set(xlim=(0, 7.1), ylim=(-max(len(tables), 1) + 0.85, 1.0))
    if find is None:
        return ""
    name, position = find
    block, offset = tables[name].blocks[position // block_size], position % block_size
    return (
        f"\n{name}, position {position}: entry {position // block_size} is block {block}, offset {offset}, "
        f"slot {block * block_size + offset}"
    )


class Pool:
    """What the explorer drives: a small pool that sequences join, grow in and leave. Deterministic."""

    def __init__(self, num_blocks: int = 24, block_size: int = 16):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.allocator = BlockAllocator(num_blocks)
        self.tables: dict[str, Table] = {}
        self.made = 0
        self.said = "an empty pool"

    def add(self, tokens: int) -> None:
        """A prompt of so many tokens arrives; it is refused in words when its blocks are not free."""
        need = -(-tokens // self.block_size)
        if need > self.allocator.num_free:
            self.said = f"{need} block{'s' * (need > 1)} wanted, {self.allocator.num_free} free: it waits"
            return
        name = chr(ord("A") + self.made % 26)
        if name in self.tables:
            self.said = f"{name} is still here: let it finish first"
            return
        self.made += 1
        self.tables[name] = Table(tokens, self.allocator.allocate(need))
        self.said = f"{name} takes {need} block{'s' * (need > 1)}: {', '.join(map(str, self.tables[name].blocks))}"

    def step(self, times: int = 1) -> None:
        """Every sequence gets a token, oldest first; one that needs a block when none is free stays as it is."""
        took, stuck = [], []
        for _ in range(times):
            for name, (tokens, blocks) in list(self.tables.items()):
                if tokens == len(blocks) * self.block_size:
                    if not self.allocator.num_free:
                        stuck.append(name)
                        continue
                    blocks = [*blocks, *self.allocator.allocate(1)]
                    took.append(f"{name} takes block {blocks[-1]}")
                self.tables[name] = Table(tokens + 1, blocks)
        said = took + [f"{name} is stuck: no free block" for name in dict.fromkeys(stuck)]
        self.said = "; ".join(said) or "everybody writes into a block that it has"

    def finish(self) -> None:
        """The oldest sequence ends and gives its blocks back."""
        if not self.tables:
            self.said = "nobody is here"
            return
        name = next(iter(self.tables))
        blocks = self.tables.pop(name).blocks
        self.allocator.free(blocks)
        self.said = f"{name} gives back {', '.join(map(str, blocks))}; {self.allocator.num_free} blocks are free"

    def figure(self) -> Figure:
        return block_table_figure(self.tables, self.num_blocks, self.block_size)


def block_table_explorer(num_blocks: int = 24) -> Any:
    """A widget: let prompts arrive, grow and leave, and watch tables and pool. Wraps `Pool` and its figure."""
    import ipywidgets as w

    state = {"pool": Pool(num_blocks, 16)}
    size = w.ToggleButtons(options=[16, 32, 64], description="block size")
    tokens = w.IntSlider(value=40, min=1, max=200, description="prompt")
    buttons = [
        w.Button(description=text) for text in ("prompt arrives", "1 token each", "8 tokens each", "oldest ends")
    ]
    picture = w.Image(format="png")
    words = w.HTML()

    def redraw() -> None:
        picture.value = style.png(state["pool"].figure())
        words.value = state["pool"].said

    def restart(_: Any) -> None:
        state["pool"] = Pool(num_blocks, size.value)
        redraw()

    actions = (lambda p: p.add(tokens.value), lambda p: p.step(), lambda p: p.step(8), lambda p: p.finish())
    for button, action in zip(buttons, actions, strict=True):

        def act(_: Any, action: Any = action) -> None:
            action(state["pool"])
            redraw()

        button.on_click(act)
    size.observe(restart, names="value")
    redraw()
    return w.VBox([size, tokens, w.HBox(buttons), words, picture])
