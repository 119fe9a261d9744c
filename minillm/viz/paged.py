"""Pictures of lesson 06: block tables over a pool, memory over time, the price of a block size, split-KV.

Every function takes plain numbers and returns a matplotlib figure. `block_table_explorer` wraps one of them in buttons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minillm.cache.blocks import BlockAllocator
from minillm.errors import MinillmError
from minillm.kernels.splits import split_range
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


class Usage(NamedTuple):
    """Memory at one moment of a simulation, in tokens: written, held by somebody, and whether anyone waits."""

    written: int
    held: int
    waiting: bool


def share_written(log: Sequence[Usage], of: int | None = None) -> float:
    """Mean share of memory that holds tokens while requests wait: of `of` tokens, or of what is held."""
    busy = [u for u in log if u.waiting]
    if not busy:
        raise MinillmError("nobody ever waited: memory that nobody wants is not wasted; send more requests")
    return sum(u.written for u in busy) / (sum(u.held for u in busy) if of is None else of * len(busy))


def memory_over_time_figure(panels: Mapping[str, Sequence[Usage]], size: int) -> Figure:
    """Each panel: how the `size` tokens of a memory are used, step by step, stacked; written below, free on top."""
    fig, axes = style.figure(9.5, 2.9, columns=len(panels))
    longest = max(len(log) for log in panels.values())
    for ax, (name, log) in zip(axes, panels.items(), strict=True):
        every = -(-longest // 240)  # means of a few steps: more points than pixels help nobody
        x = range(0, len(log), every)
        written, held = (
            [100 * sum(values[i : i + every]) / len(values[i : i + every]) / size for i in x]
            for values in ([u.written for u in log], [u.held for u in log])
        )
        ax.fill_between(x, 0, 100, color=FREE, linewidth=0)
        ax.fill_between(x, written, held, facecolor="white", edgecolor=style.ORANGE, hatch="////", linewidth=0.3)
        ax.fill_between(x, 0, written, color=style.BLUE, alpha=0.85, linewidth=0)
        ax.set(xlim=(0, longest), ylim=(0, 100))
        words = f"{name}\n{100 * share_written(log, size):.0f} % holds tokens, done at {len(log):,}"
        style.name_axes(ax, "step", "", "")
        ax.set_title(words, fontsize=style.SMALL, loc="left")
        ax.xaxis.set_major_locator(_few())
    axes[0].set_ylabel("share of memory (%)", fontsize=style.SIZE)
    handles = [
        Patch(facecolor=style.BLUE, alpha=0.85, label="holds a token"),
        Patch(facecolor="white", edgecolor=style.ORANGE, hatch="////", label="held, nothing in it"),
        Patch(facecolor=FREE, edgecolor=style.GREY, label="free (holes)"),
    ]
    fig.legend(handles=handles, ncols=3, loc="outside lower center", fontsize=style.SMALL, frameon=False)
    return fig


def _few() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4)


def useful_share_figure(
    block_sizes: Sequence[int],
    predicted: Sequence[float],
    measured: Sequence[float],
    others: Mapping[str, float],
    target: float = 0.95,
) -> Figure:
    """Share of held memory with tokens in it against block size; `others`: a line each for what has no blocks."""
    fig, (ax,) = style.figure(7.5, 3.9)
    ax.plot(
        block_sizes, [100 * p for p in predicted], label="predicted: mean length and half a block", **style.PREDICTED
    )
    ax.plot(block_sizes, [100 * m for m in measured], label="measured in the simulation", **style.MEASURED)
    ax.axhline(100 * target, color=style.GREEN, linewidth=1.4)
    style.label(ax, block_sizes[-1], 100 * target, f"{100 * target:.0f} %", style.GREEN, dx=4, dy=7, ha="right")
    for name, share in others.items():
        ax.axhline(100 * share, color=style.GREY, linewidth=1.2, linestyle=":")
        style.label(ax, block_sizes[0], 100 * share, name, style.GREY, dx=0, dy=7)
    ax.set_xscale("log", base=2)
    ax.set_ylim(0, 105)
    style.plain_ticks(ax, block_sizes)
    ax.legend(fontsize=style.SMALL, loc="lower right", frameon=False, bbox_to_anchor=(1.0, 0.36))
    style.name_axes(ax, "tokens a block", "held memory that holds tokens (%)")
    return fig


def steps_figure(
    contexts: Sequence[int], predicted: Mapping[str, Sequence[float]], measured: Mapping[str, Sequence[float]]
) -> Figure:
    """Seconds of a decode step against context, a colour each for every kind of cache: line predicted, point seen."""
    fig, (ax,) = style.figure(7.5, 3.8)
    for i, (name, line) in enumerate(predicted.items()):
        color, mark = style.PALETTE[i], style.MARKERS[i]
        ax.plot(contexts, [1e3 * s for s in line], color=color, linestyle=style.LINES[i], linewidth=1.8)
        ax.plot(contexts, [1e3 * s for s in measured[name]], mark, color=color, markersize=6.5)
        style.label(ax, contexts[-1], 1e3 * line[-1], name, color, dx=8)
    ax.set_xscale("log", base=2)
    ax.set_xlim(contexts[0] * 0.9, contexts[-1] * 1.7)
    ax.set_ylim(bottom=0)
    style.plain_ticks(ax, contexts)
    style.name_axes(
        ax, "context of each sequence (tokens)", "decode step (ms)", "lines: predicted; points: measured here"
    )
    return fig


def multiprocessors_figure(heads: int, splits: Sequence[int], multiprocessors: int) -> Figure:
    """Which multiprocessors have work when one sequence of `heads` KV heads is cut into so many parts.

    Programs are dealt out in order, one each, and start again at the first when there are more than multiprocessors.
    """
    fig, axes = style.figure(2.6 * len(splits) + 0.6, 3.1, columns=len(splits))
    columns = 12
    rows = -(-multiprocessors // columns)
    for ax, parts in zip(axes, splits, strict=True):
        count = [0] * multiprocessors
        first: dict[int, int] = {}
        for program in range(heads * parts):
            count[program % multiprocessors] += 1
            first.setdefault(program % multiprocessors, program // parts)
        for i in range(multiprocessors):
            color = COLORS[first[i] % len(COLORS)] if i in first else FREE
            x, y = i % columns, -(i // columns)
            ax.add_patch(Rectangle((x, y), 0.86, 0.86, facecolor=color, edgecolor=style.GREY, linewidth=0.5))
            if count[i] > 1:
                ax.text(x + 0.43, y + 0.4, str(count[i]), fontsize=style.SMALL - 3, ha="center", va="center")
        busy = len(first)
        ax.set(xlim=(-0.2, columns), ylim=(-rows + 0.8, 1.0), aspect="equal")
        ax.set_axis_off()
        part = "1 part" if parts == 1 else f"{parts} parts"
        ax.set_title(
            f"{part}: {heads * parts} programs,\n{busy} of {multiprocessors} busy", fontsize=style.SMALL, loc="left"
        )
    return fig


def split_figure(contexts: Mapping[str, int], splits: int, tile: int) -> Figure:
    """How the kernel cuts sequences of different length into the same number of parts, in whole tiles; then the merge.

    A part without tokens is drawn as an empty box: its program ends at once.
    """
    fig, (ax,) = style.figure(8.5, 1.0 + 0.75 * len(contexts))
    longest = max(contexts.values())
    box = 0.16 * longest
    for row, (name, context) in enumerate(contexts.items()):
        y = -row
        empty = 0
        for part in range(splits):
            first, end = split_range(context, part, splits, tile)
            if first == end:
                empty += 1
                continue
            color = COLORS[part % len(COLORS)]
            ax.add_patch(
                Rectangle((first, y), end - first, 0.55, facecolor=color, alpha=0.75, edgecolor="white", linewidth=1.5)
            )
            words = f"o, lse {part}" if end - first > 0.11 * longest else str(part)
            if end - first < 0.025 * longest:
                continue  # too narrow for a word
            ax.text((first + end) / 2, y + 0.27, words, fontsize=style.SMALL - 1, ha="center", va="center")
        words = f"merge {splits - empty}" + (f", skip {empty}" if empty else "")
        ax.annotate(
            words, (1.02 * longest + box * 0.12, y + 0.27), (1.02 * longest + box * 0.3, y + 0.27),
            fontsize=style.SMALL, va="center",
        )  # fmt: skip
        ax.text(-0.01 * longest, y + 0.27, f"{name}\n{context:,} tokens", fontsize=style.SMALL, ha="right", va="center")
    ax.set(xlim=(-0.2 * longest, 1.3 * longest), ylim=(-len(contexts) + 0.7, 0.8))
    ax.set_yticks([])
    ax.set_xticks(range(0, longest + 1, _round(longest / 5)))
    ax.grid(False)
    ax.spines["left"].set_visible(False)
    style.name_axes(ax, "token of the sequence", "")
    return fig


def _round(x: float) -> int:
    power: int = 10 ** (len(str(int(x))) - 1)
    return max(1, int(x) // power * power)


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
