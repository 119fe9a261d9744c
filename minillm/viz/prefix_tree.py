"""The prefix cache of lesson 11 as a picture: a radix tree over blocks, and an explorer that drives one.

`prefix_tree_figure(snapshot)` is pure: it draws what `RadixPrefixCache.snapshot()` gives. `prefix_tree_explorer` wraps
`Explorer`, a small engine of words in place of tokens, in buttons.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minillm.cache.prefix import Namespace, RadixPrefixCache
from minillm.viz import style

TENANTS = (style.BLUE, style.ORANGE, style.GREEN, style.PURPLE, style.SKY)
PUBLIC = style.GREY
WIDE, HIGH = 0.86, 0.62  # of a block, where columns and rows are 1 apart


class Placed(NamedTuple):
    """A block in the picture: column is its place in the prompt, row its branch."""

    id: int
    tokens: tuple[int, ...]
    column: int
    row: int
    owner: str | None  # None: public
    locked: bool
    opens: bool  # the first block of its run
    above: tuple[int, int] | None  # column and row of the block before it
    leaf: bool
    last_used: int


def place(snapshot: Mapping[str, Any]) -> list[Placed]:
    """Where each block of a snapshot stands. The first child goes on in its parent's row, others start rows below."""
    size = snapshot["block_size"]
    out: list[Placed] = []
    row = -1
    stack: list[tuple[Mapping[str, Any], int, tuple[int, int] | None, bool]]
    stack = [(root, 0, None, True) for root in reversed(snapshot["roots"])]
    while stack:
        node, column, above, new_row = stack.pop()
        row += new_row
        for i, id in enumerate(node["ids"]):
            last = i == len(node["ids"]) - 1
            tokens = tuple(node["tokens"][i * size : (i + 1) * size])
            owner = None if node["public"] else node["tenant"]
            out.append(Placed(id, tokens, column + i, row, owner, id in node["locked"], i == 0, above,
                              last and not node["children"], node["last_used"]))  # fmt: skip
            above = (column + i, row)
        below = [(child, above, k > 0) for k, child in enumerate(node["children"])]
        stack += [(child, column + len(node["ids"]), at, fresh) for child, at, fresh in reversed(below)]
    return out


def next_to_leave(blocks: Sequence[Placed]) -> Placed | None:
    """The least recently used leaf that no request holds (without floors)."""
    free = [b for b in blocks if b.leaf and not b.locked]
    return min(free, key=lambda b: b.last_used) if free else None


def prefix_tree_figure(
    snapshot: Mapping[str, Any], words: Callable[[Sequence[int]], str] | None = None, hit: Collection[int] = (),
    title: str = "",
) -> Figure:  # fmt: skip
    """The tree from left to right: a column for each place in a prompt, a colour for each tenant, grey for public.

    words(tokens) is what is written into a block. hit: ids drawn with a thick edge, what the last request found.
    """
    blocks = place(snapshot)
    columns = max([4, *(b.column + 1 for b in blocks)])
    rows = max([2, *(b.row + 1 for b in blocks)])
    fig, (ax,) = style.figure(min(10.0, 1.2 + 1.75 * columns), 1.3 + 0.72 * rows)
    owners = sorted({b.owner for b in blocks if b.owner is not None})
    colors: dict[str | None, str] = {name: TENANTS[i % len(TENANTS)] for i, name in enumerate(owners)}
    colors[None] = PUBLIC
    leaves = next_to_leave(blocks)
    for b in blocks:
        _edge(ax, b)
    for b in blocks:
        _block(ax, b, colors[b.owner], words, b.id in hit, leaves is not None and b.id == leaves.id)
    ax.set(xlim=(-0.1, columns), ylim=(-rows + 0.55, 0.45))
    ax.set_axis_off()
    held = sum(b.locked for b in blocks)
    counts = f"{len(blocks)} blocks of {snapshot['block_size']} tokens, {held} held by requests"
    ax.set_title(f"{title}\n{counts}" if title else counts, fontsize=style.SIZE, loc="left")
    handles = [
        Patch(facecolor=colors[name], alpha=0.3, label=f"of {name or 'everybody without a name'}") for name in owners
    ]
    if any(b.owner is None for b in blocks):
        handles.append(Patch(facecolor=PUBLIC, alpha=0.3, label="public"))
    handles += [
        Patch(facecolor="white", edgecolor=style.BLACK, linewidth=2.2, label="found by the last request"),
        Patch(facecolor="white", edgecolor=style.GREY, hatch="....", label="held"),
        Patch(facecolor="white", edgecolor=style.VERMILLION, linestyle="--", linewidth=1.8, label="leaves next"),
    ]  # fmt: skip
    fig.legend(
        handles=handles, ncols=min(len(handles), 5), loc="outside lower left", fontsize=style.SMALL, frameon=False
    )
    return fig


def _edge(ax: Axes, b: Placed) -> None:
    """From the block before: a thick band inside a run, a thin line with a corner where the tree forks."""
    if b.above is None:
        return
    x, y = b.above[0] + WIDE, -b.above[1]
    if not b.opens:
        ax.plot([x, b.column], [y, -b.row], color=style.GREY, linewidth=6, solid_capstyle="butt", alpha=0.5, zorder=0)
    else:
        bend = x + (1 - WIDE) / 2
        ax.plot([x, bend, bend, b.column], [y, y, -b.row, -b.row], color=style.BLACK, linewidth=1.2, zorder=0)


def _block(
    ax: Axes, b: Placed, color: str, words: Callable[[Sequence[int]], str] | None, hit: bool, leaves: bool
) -> None:
    corner = (b.column, -b.row - HIGH / 2)
    ax.add_patch(Rectangle(corner, WIDE, HIGH, facecolor="white", linewidth=0))
    ax.add_patch(Rectangle(corner, WIDE, HIGH, facecolor=color, alpha=0.3, linewidth=0))
    if b.locked:
        ax.add_patch(Rectangle(corner, WIDE, HIGH, fill=False, edgecolor=color, hatch="....", linewidth=0, alpha=0.6))
    edge, width, line = (style.BLACK, 2.2, "-") if hit else (color, 1.2, "-")
    if leaves:
        edge, width, line = style.VERMILLION, 1.8, "--"
    ax.add_patch(Rectangle(corner, WIDE, HIGH, fill=False, edgecolor=edge, linewidth=width, linestyle=line))
    ax.text(b.column + 0.03, -b.row + HIGH / 2 - 0.03, str(b.id), fontsize=style.SMALL - 1, va="top", color=style.BLACK)
    if words is not None:
        ax.text(
            b.column + WIDE / 2, -b.row - 0.06, _two_lines(words(b.tokens)), fontsize=style.SMALL - 1, ha="center",
            va="center", linespacing=1.15,
        )  # fmt: skip


def _two_lines(text: str) -> str:
    """Broken at the space nearest to the middle."""
    spaces = [i for i, c in enumerate(text) if c == " "]
    if len(text) < 12 or not spaces:
        return text
    at = min(spaces, key=lambda i: abs(2 * i - len(text)))
    return text[:at] + "\n" + text[at + 1 :]


SYSTEM = "you are a helpful librarian of the town"
PROMPTS = (
    f"{SYSTEM} when do you open on sundays then",
    f"{SYSTEM} when do you open on holidays please",
    f"{SYSTEM} where is the children's room in here",
    "translate this into french for me good evening",
    "a helpful librarian of the town you are",
)


class Explorer:
    """What the widget drives: a cache over a pool of a few blocks; words are tokens. Deterministic."""

    def __init__(self, num_blocks: int = 10, block_size: int = 4, prompts: Sequence[str] = PROMPTS):
        self.prompts, self.num_blocks = list(prompts), num_blocks
        self.vocab: dict[str, int] = {}
        self.cache = RadixPrefixCache(block_size)
        self.free = list(range(1, num_blocks + 1))
        self.running: list[tuple[str, list[int]]] = []  # tenant, block table
        self.hit: list[int] = []
        self.said = "an empty cache"

    def tokens(self, text: str) -> list[int]:
        return [self.vocab.setdefault(word, len(self.vocab) + 1) for word in text.split()]

    def words(self, tokens: Sequence[int]) -> str:
        names = {number: word for word, number in self.vocab.items()}
        return " ".join(names[t] for t in tokens)

    def ask(self, text: str, tenant: str = "ann") -> None:
        """A request: match, cap, lock, evict for what is missing, compute, insert. It holds its blocks to its end."""
        size, tokens, who = self.cache.block_size, self.tokens(text), Namespace("engine", tenant)
        found, _ = self.cache.match(tokens, who)
        self.hit = found[: (len(tokens) - 1) // size]
        self.cache.lock(self.hit)
        need = -(-len(tokens) // size) - len(self.hit)
        gone = self.cache.evict(max(0, need - len(self.free)))
        self.free += gone
        if need > len(self.free):
            self.cache.unlock(self.hit)
            self.hit = []
            self.said = f"{need} blocks are missing and {len(self.free)} are free; all others are held: it waits"
            return
        new, self.free = self.free[:need], self.free[need:]
        self.cache.lock(new)
        table, whole = [*self.hit, *new], len(tokens) // size
        kept = self.cache.insert(tokens[: whole * size], who, table[:whole])
        self.running.append((tenant, table))
        self.said = (
            f"{tenant} asks {len(tokens)} words: {len(self.hit) * size} found, "
            f"{len(tokens) - len(self.hit) * size} to compute; "
            + (f"evicted {_list(gone)}; " if gone else "")
            + (f"into the cache: {_list(kept)}" if kept else "nothing new for the cache")
        )

    def finish(self) -> None:
        """The oldest request ends. Its cached blocks stay, hittable; blocks that the cache did not take are free."""
        self.hit = []
        if not self.running:
            self.said = "nobody is here"
            return
        tenant, table = self.running.pop(0)
        self.cache.unlock(table)
        held = {i for _, other in self.running for i in other}
        back = [i for i in table if i not in self.cache and i not in held]
        self.free += back
        self.said = f"{tenant}'s request ends; " + (f"free again: {_list(back)}" if back else "its blocks stay cached")

    def evict(self) -> None:
        self.hit = []
        gone = self.cache.evict(1)
        self.free += gone
        self.said = f"block {gone[0]} leaves: the oldest leaf" if gone else "no block may leave: all are held"

    def figure(self) -> Figure:
        title = f"{self.said}\n{len(self.free)} of {self.num_blocks} blocks free"
        return prefix_tree_figure(self.cache.snapshot(), self.words, self.hit, title)


def _list(ids: Sequence[int]) -> str:
    return ("block " if len(ids) == 1 else "blocks ") + ", ".join(map(str, ids))


def prefix_tree_explorer(num_blocks: int = 10) -> Any:
    """A widget: ask, end, evict, and watch the tree. Wraps `Explorer` and its figure."""
    import ipywidgets as w

    state = {"cache": Explorer(num_blocks)}
    prompt = w.Dropdown(options=[(p, p) for p in PROMPTS], description="prompt", layout={"width": "620px"})
    tenant = w.ToggleButtons(options=["ann", "bob"], description="tenant")
    actions: list[tuple[str, Callable[[Explorer], None]]] = [
        ("ask", lambda e: e.ask(prompt.value, tenant.value)), ("oldest request ends", lambda e: e.finish()),
        ("evict one block", lambda e: e.evict()),
    ]  # fmt: skip
    again = w.Button(description="empty cache")
    picture = w.Image(format="png")

    def redraw() -> None:
        picture.value = style.png(state["cache"].figure())

    def restart(_: Any) -> None:
        state["cache"] = Explorer(num_blocks)
        redraw()

    def buttons() -> Iterator[Any]:
        for text, action in actions:
            button = w.Button(description=text)

            def act(_: Any, action: Callable[[Explorer], None] = action) -> None:
                action(state["cache"])
                redraw()

            button.on_click(act)
            yield button

    again.on_click(restart)
    redraw()
    return w.VBox([prompt, tenant, w.HBox([*buttons(), again]), picture])
