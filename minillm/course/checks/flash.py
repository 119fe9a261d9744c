"""References of exercise 05, each with the switches that make the typical mistakes: whole rows in float64, no tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.course.candidate import CandidateError
from minillm.course.checks.tiny import randn
from minillm.course.tasks import Wrong

State = tuple[Tensor, Tensor, Tensor]
INF, NAN = math.inf, math.nan


# 05.2 fold


def fold(m: Tensor, l: Tensor, acc: Tensor, scores: Tensor, v: Tensor) -> State:
    return fold_with(m, l, acc, scores, v)


def fold_with(
    m: Tensor, l: Tensor, acc: Tensor, scores: Tensor, v: Tensor, *, rescale_l: bool = True, rescale_acc: bool = True,
    own: bool = False, guard: bool = True, upside_down: bool = False, shift: bool = True, divide: bool = False,
) -> State:  # fmt: skip
    """own: the tile's maximum alone; guard: rows that saw nothing; upside_down: exp(new - old); shift: subtract m."""
    m, l, acc, s, w = (x.double() for x in (m, l, acc, scores, v))
    new = s.amax(-1) if own else torch.maximum(m, s.amax(-1))
    top = torch.where(new == -INF, 0.0, new) if guard else new
    if not shift:
        top = torch.zeros_like(top)
    factor = torch.exp(top - m) if upside_down else torch.exp((m if shift else 0 * top) - top)
    if guard:
        factor = torch.where(m == -INF, 0.0, factor)
    p = torch.exp(s - top[:, None])
    l = (l * factor if rescale_l else l) + p.sum(-1)
    acc = (acc * factor[:, None] if rescale_acc else acc) + p @ w
    acc = acc / l[:, None] if divide else acc
    return new.float(), l.float(), acc.float()


def fresh(n: int, d: int) -> State:
    return torch.full((n,), -INF), torch.zeros(n), torch.zeros(n, d)


def fold_args(
    seed: int, n: int, keys: int, d: int = 4, *, seen: float | None = None, scale: float = 1.0,
    hide: Sequence[tuple[int, int]] = (), blind: Sequence[int] = (), never: Sequence[int] = (),
) -> Callable[[], Any]:  # fmt: skip
    """seen: the maximum so far (None: nothing was seen); hide: (row, from key); blind: rows that see no key of the
    tile; never: those of them that saw nothing before, either."""

    def args() -> Any:
        scores = randn(seed, n, keys, scale=scale)
        for row, first in hide:
            scores[row, first:] = -INF
        for row in (*blind, *never):
            scores[row] = -INF
        m, l, acc = fresh(n, d)
        if seen is not None:
            m = seen + randn(seed + 1, n, scale=0.3)
            l, acc = 1 + randn(seed + 2, n).abs(), randn(seed + 3, n, d)
        for row in never:
            m[row], l[row], acc[row] = -INF, 0.0, 0.0
        return m, l, acc, scores, randn(seed + 4, keys, d)

    return args


def folded(answer: Any, scores: Tensor, v: Tensor, tiles: Sequence[int]) -> Tensor:
    """A whole row in tiles of these sizes, and the output that the last state gives."""
    state, first = fresh(len(scores), v.shape[1]), 0
    for size in tiles:
        state = answer(*state, scores[:, first : first + size].clone(), v[first : first + size].clone())
        if not isinstance(state, tuple | list) or len(state) != 3:
            raise Wrong("expected three tensors (m, l, acc)", "return m, l, acc, in this order")
        first += size
    return state[2] / state[1][:, None]


def rising(n: int, keys: int, d: int) -> Callable[[], Any]:
    """Scores that grow from key to key: each tile holds a new maximum."""
    return lambda: (randn(31, n, keys) + torch.arange(keys) / 2, randn(32, keys, d), [3, 1, 4, keys - 8])


# 05.3 merge


def merge(a: State, b: State) -> State:
    return merge_with(a, b)


def merge_with(
    a: State, b: State, *, scaled: bool = True, only_l: bool = False, guard: bool = True, mean: bool = False,
    of_a: bool = False,
) -> State:  # fmt: skip
    (m, l, acc), (n, k, bcc) = (tuple(x.double() for x in s) for s in (a, b))
    top = m if of_a else torch.maximum(m, n)
    base = torch.where(top == -INF, 0.0, top) if guard else top
    x, y = torch.exp(m - base), torch.exp(n - base)
    if not scaled:
        x = y = torch.ones_like(x)
    u, w = (torch.ones_like(x), torch.ones_like(y)) if only_l else (x, y)
    half = 0.5 if mean else 1.0
    return top.float(), (half * (l * x + k * y)).float(), (half * (acc * u[:, None] + bcc * w[:, None])).float()


def merge_args(
    seed: int, n: int, first: float = 0.0, second: float = 0.0, *, empty: Sequence[tuple[int, int]] = ()
) -> Callable[[], Any]:
    """Two states; `first` and `second` are added to their maxima; empty: (state, row) that saw nothing."""

    def args() -> Any:
        states = []
        for i, shift in enumerate((first, second)):
            m, l, acc = (
                randn(seed + 10 * i, n) + shift,
                1 + randn(seed + 10 * i + 1, n).abs(),
                randn(seed + 10 * i + 2, n, 3),
            )
            for which, row in empty:
                if which == i:
                    m[row], l[row], acc[row] = -INF, 0.0, 0.0
            states.append((m, l, acc))
        return tuple(states)

    return args


# 05.4 attention in tiles


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over the last len(q) of len(k) tokens, a query at a time."""
    return attention_with(q, k, v)


def attention_with(
    q: Tensor, k: Tensor, v: Tensor, *, ahead: int = 0, causal: bool = True, dealt: bool = False,
    scale: float | None = None, block: int = 0, local: bool = False, unrescaled: int = 0,
) -> Tensor:  # fmt: skip
    """ahead: the mask off by that many; dealt: h % K; local: rows and keys compared inside their tile of `block`;
    unrescaled: tiles of so many keys, sums keep an old maximum."""
    n, H, d = q.shape
    T, K = k.shape[:2]
    out = torch.zeros(n, H, d, dtype=torch.float64)
    for h in range(H):
        g = h % K if dealt else h // (H // K)
        for i in range(n):
            last = T - n + i
            s = k[:, g].double() @ q[i, h].double() * (d**-0.5 if scale is None else scale)
            seen = torch.arange(T) <= last + ahead if causal else torch.ones(T, dtype=torch.bool)
            if local:  # the tiles that are computed, masked by places inside a tile
                within = torch.arange(T) < min((i // block + 1) * block, T)
                seen = within & (torch.arange(T) % block <= i % block)
            s = s.masked_fill(~seen, -INF)
            if unrescaled:
                m, l, acc = (x[0].double() for x in fresh(1, d))
                for a in range(0, last + 1, unrescaled):
                    new = torch.maximum(m, s[a : a + unrescaled].max())
                    p = torch.exp(s[a : a + unrescaled] - new)
                    l, acc, m = l * torch.exp(m - new) + p.sum(), acc + p @ v[a : a + unrescaled, g].double(), new
                out[i, h] = acc / l
            else:
                out[i, h] = s.softmax(-1) @ v[:, g].double()
    return out.to(q.dtype)


class Memory:
    """Keys and values that are handed out a tile at a time; each load is noted."""

    def __init__(self, k: Tensor, v: Tensor):
        self.k, self.v = k, v
        self.loads: list[tuple[int, int]] = []
        self.problem = ""

    def __call__(self, start: Any, stop: Any) -> tuple[Tensor, Tensor]:
        start, stop = int(start), int(stop)
        if not 0 <= start < stop <= len(self.k):
            self.problem = f"load({start}, {stop}) leaves the {len(self.k)} keys that exist"
            raise ValueError(self.problem)
        self.loads.append((start, stop))
        if len(self.loads) > 200:
            raise RuntimeError("more than 200 loads; when does the loop end?")
        return self.k[start:stop].clone(), self.v[start:stop].clone()


def tiled(answer: Any, q: Tensor, k: Tensor, v: Tensor, block_m: int, block_n: int) -> Any:
    """The output alone; no load may be wider than a tile."""
    return run_tiled(answer, q, k, v, block_m, block_n)[0]


def loads_of(answer: Any, q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[tuple[int, int]]) -> Any:
    """How many loads each tiling needs."""
    return {f"loads with tiles of {m} x {n}": run_tiled(answer, q, k, v, m, n)[1] for m, n in sizes}


def run_tiled(answer: Any, q: Tensor, k: Tensor, v: Tensor, block_m: int, block_n: int) -> tuple[Any, int]:
    memory = Memory(k, v)
    try:
        out = answer(q, memory, block_m, block_n)
    except CandidateError:
        if memory.problem:
            raise Wrong(memory.problem, "the last tile may be narrower: stop at the number of tokens") from None
        raise
    wide = max((b - a for a, b in memory.loads), default=0)
    if wide > block_n:
        raise Wrong(f"a load of {wide} keys; a tile has {block_n}", "load(start, start + block_n), tile by tile")
    if not memory.loads:
        raise Wrong("no key was loaded")
    return out, len(memory.loads)


def flash(q: Tensor, load: Any, block_m: int, block_n: int) -> Tensor:
    return flash_with(q, load, block_m, block_n)


def flash_with(
    q: Tensor, load: Any, block_m: int, block_n: int, *, skip: bool = True, times: int = 1, **slip: Any
) -> Tensor:
    """Loads as a tiled kernel would, then attends row by row. skip: not above the diagonal; times: each load."""
    S, parts = len(q), {}
    for first in range(0, S, block_m):
        stop = min(first + block_m, S) if skip else S
        for start in range(0, stop, block_n):
            for _ in range(times):
                parts[start] = load(start, min(start + block_n, S))
    k, v = (torch.cat([parts[start][i] for start in sorted(parts)]) for i in range(2))
    return attention_with(q, k, v, **slip)


def flash_args(
    seed: int, S: int, H: int, K: int, block_m: int, block_n: int, d: int = 8, grow: float = 0.0
) -> Callable[[], Any]:
    """grow: how much the score of a key grows from one key to the next."""

    def args() -> Any:
        q, k, v = qkv(seed, S, H, K, d, grow)()
        return q, k, v, block_m, block_n

    return args


def qkv(seed: int, S: int, H: int, K: int, d: int, grow: float = 0.0) -> Callable[[], Any]:
    def args() -> Any:
        q, k, v = randn(seed, S, H, d), randn(seed + 1, S, K, d), randn(seed + 2, S, K, d)
        if grow:
            q[..., 0], k[..., 0] = d**0.5, grow * torch.arange(S)[:, None]
        return q, k, v

    return args


# 05.5 in Triton

BLOCK = 16


def flash_triton(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v)


def kernel_bytes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """Each program: its queries once, and the keys and values up to its last query once."""
    S, H, d = q.shape
    stops = [min(first + BLOCK, S) for first in range(0, S, BLOCK)]
    return 4 * H * d * (S + 2 * sum(stops)), 4 * H * d * S


# 05.6 a chunk with history


def attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, history: int
) -> Tensor:  # fmt: skip
    return attend_chunk_with(q, k, v, k_pool, v_pool, table, history)


def attend_chunk_with(
    q: Tensor, k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, history: int, *,
    forget: bool = False, whole_pages: bool = False, in_order: bool = False, causal: bool = True,
    shifted: bool = True, dealt: bool = False, last_page: bool = True,
) -> Tensor:  # fmt: skip
    """forget: no history; whole_pages: the last page to its end; in_order: pages 0, 1, ...; shifted: the mask knows the
    history; last_page: a page that is not full counts."""
    page = k_pool.shape[1]
    length = 0 if forget else -(-history // page) * page if whole_pages else history
    length = length if last_page else history // page * page
    position = torch.arange(length)
    block = position // page if in_order else table.long()[position // page]
    keys, values = (
        torch.cat((pool[block, position % page], x)) for pool, x in ((k_pool, k), (v_pool, v))
    )  # fmt: skip
    if not shifted:  # new token i sees the first i + 1 keys of all
        n = len(q)
        return torch.cat([attention(q[i : i + 1], keys[: i + 1], values[: i + 1]) for i in range(n)])
    return attention_with(q, keys, values, causal=causal, dealt=dealt)


def chunk_args(
    seed: int, n: int, history: int, H: int, K: int, rest: float = 1.0, page: int = 4, d: int = 8
) -> Callable[[], Any]:
    """Pages in shuffled order; slots of nobody hold numbers times `rest`, and the table's unused entries point away."""

    def args() -> Any:
        used = -(-history // page)
        order = torch.randperm(used + 3, generator=torch.Generator().manual_seed(seed))
        order = order if used < 1 or order[0] else order.flip(0)
        past = randn(seed + 1, 2, history, K, d)
        pool = randn(seed + 2, 2, used + 3, page, K, d) * rest
        for t in range(history):
            pool[:, order[t // page], t % page] = past[:, t]
        table = torch.full((used + 2,), 10**6, dtype=torch.int32)
        table[:used] = order[:used]
        k, v = randn(seed + 4, n, K, d), randn(seed + 5, n, K, d)
        return randn(seed + 3, n, H, d), k, v, pool[0], pool[1], table, history

    return args


def chunked_args(seed: int, S: int, sizes: Sequence[Sequence[int]]) -> Callable[[], Any]:
    return lambda: (*qkv(seed, S, 2, 1, 8)(), sizes)


def in_chunks(answer: Any, q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The prompt cut in each of these ways; keys and values of a chunk are written into pages after it."""
    page, found = 4, []
    for chunks in sizes:
        pool = torch.full((2, -(-len(q) // page) + 1, page, *k.shape[1:]), NAN)
        table = torch.arange(pool.shape[1], dtype=torch.int32).flip(0)
        done, out = 0, []
        for n in chunks:
            new = slice(done, done + n)
            held = table[: -(-done // page)]
            out.append(
                answer(q[new].clone(), k[new].clone(), v[new].clone(), pool[0].clone(), pool[1].clone(), held, done)
            )
            for t in range(done, done + n):
                pool[:, table[t // page].long(), t % page] = torch.stack((k[t], v[t]))
            done += n
        found.append(torch.cat(out))
    return found
