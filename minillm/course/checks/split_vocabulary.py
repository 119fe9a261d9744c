"""References and mistakes of exercise 14 for the next token when each rank has the logits of a slice of the vocabulary.

The noise is `minillm.rng`'s, which the exercise gives: a function of seed, position and token id, and of no rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.course.ranks import COLLECTIVES
from minillm.rng import gumbel, keys

Draws = Sequence[tuple[int, int]]


def next_tokens(group: Any, logits: Tensor, temperatures: Sequence[float], draws: Draws) -> list[int]:
    return next_with(group, logits, temperatures, draws)


def next_with(
    group: Any, logits: Tensor, temperatures: Sequence[float], draws: Draws, *, ids: str = "global",
    noise: str = "global", ties: str = "first", says: str = "winners", heat: str = "logits", base: str = "rank",
    dtype: torch.dtype = torch.float64,
) -> Any:  # fmt: skip
    """The flags make the wrong ones."""
    width = logits.shape[1]
    start = (group.size - 1 - group.rank if base == "reversed" else group.rank) * width
    if says == "everything":
        logits, start = torch.cat(group.all_gather(logits), 1), 0
    every = torch.arange(logits.shape[1])
    drawn = {
        "global": lambda d: gumbel(keys([d]), every + start)[0],
        "local": lambda d: gumbel(keys([d]), every)[0],
        "by rank": lambda d: gumbel(keys([(d[0] + group.rank, d[1])]), every + start)[0],
        "first row": lambda d: gumbel(keys(draws[:1]), every + start)[0],
        "seed alone": lambda d: gumbel(keys([(d[0], 0)]), every + start)[0],
        "minus": lambda d: -gumbel(keys([d]), every + start)[0],
        "none": lambda d: torch.zeros(len(every)),
    }[noise]
    rows = []
    for row, t, draw in zip(logits, temperatures, draws, strict=True):
        given = row
        if heat == "by slice":
            row = (row / (t or 1)).log_softmax(-1) + (drawn(tuple(draw)) if t else 0)
        elif heat == "by zero":
            row = row / torch.tensor(t) + drawn(tuple(draw))
        elif heat == "all" and t:
            row = (row + drawn(tuple(draw))) / t
        elif heat == "multiplied" and t:
            row = row * t + drawn(tuple(draw))
        elif t:
            row = row / t + drawn(tuple(draw))
        elif heat == "noise at 0":
            row = row + drawn(tuple(draw))
        at = int(row.argmax()) if ties == "first" else len(row) - 1 - int(row.flip(0).argmax())
        rows.append([float((given if says == "raw" else row)[at]), at + (start if ids == "global" else 0)])
    mine = torch.tensor(rows, dtype=dtype)
    if says in ("nothing", "everything"):
        return [int(i) for i in mine[:, 1]]
    if says == "one for all":  # the rank that has the best of all rows is believed in each
        parts = group.all_gather(mine)
        best = max(range(group.size), key=lambda r: float(parts[r][:, 0].max()))
        return [int(i) for i in parts[best][:, 1]]
    parts = group.all_gather(mine)
    if says == "rank 0":
        return [int(i) for i in parts[0][:, 1]]
    if says == "to rank 0" and group.rank:
        return [int(i) for i in mine[:, 1]]
    if says == "largest id":
        return [int(max(p[b, 1] for p in parts)) for b in range(len(rows))]
    winners = []
    for b in range(len(rows)):
        order = range(group.size) if ties == "first" else range(group.size - 1, -1, -1)
        winners.append(int(parts[max(order, key=lambda r: float(parts[r][b, 0]))][b, 1]))
    return winners


def world(seed: int, size: int, rows: int, temperature: float | None, vocab: int = 48, tie: str = "") -> Any:
    """Arguments of each rank. temperature None: a different one for each row. tie: "within" a rank or "across"."""

    def args() -> list[Any]:
        rng = torch.Generator().manual_seed(seed)
        whole = 2 * torch.randn(rows, vocab, generator=rng)
        for b in range(rows if tie else 0):
            first = int(torch.randint(0, vocab // 2 - 1, (1,), generator=rng))
            whole[b, first] = whole[b, first + 1 if tie == "within" else first + vocab // 2] = 9.0
        heat = [temperature if temperature is not None else (0.0, 0.7, 1.5)[b % 3] for b in range(rows)]
        draws = [(seed + 17 * b, 5 + 3 * b) for b in range(rows)]
        return [[[part.contiguous(), list(heat), list(draws)] for part in whole.chunk(size, 1)]]

    return args


def drawn(function: Any, arguments_by_rank: Any) -> Any:
    got = function.on_ranks(arguments_by_rank, COLLECTIVES)
    return {f"rank {rank}": out for rank, out in enumerate(got)}


def any_size(function: Any, seed: int) -> Any:
    """The same logits on 1, 2, 3 and 6 ranks."""
    return {f"{n} ranks": drawn(function, *world(seed, n, 6, None)()) for n in (1, 2, 3, 6)}


def words(function: Any, arguments_by_rank: Any) -> Any:
    """At most four numbers a row and rank, for the right tokens."""
    got = drawn(function, arguments_by_rank)
    rows = len(arguments_by_rank[0][1])
    most = max(sum(n for _, _, n, _ in rank) for rank in function.said)
    return {"numbers that a rank says a row, four at most": max(4.0, most / rows), "tokens": got}
