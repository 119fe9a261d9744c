"""References and mistakes of exercise 14 for the two ways to cut a layer: q, k and v by heads, an MLP by features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.course.candidate import CandidateError
from minillm.course.ranks import COLLECTIVES
from minillm.course.tasks import Wrong


def shard_qkv(w: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, rank: int, size: int) -> Tensor:
    """The flags of `qkv_with` make the wrong ones."""
    return qkv_with(w, num_heads, num_kv_heads, head_dim, rank, size)


def qkv_with(
    w: Tensor, heads: int, kv: int, d: int, rank: int, size: int, *, queries: str = "block", keys: str = "block",
    order: str = "qkv", judged: bool = True, counted: bool = True,
) -> Tensor:  # fmt: skip
    if judged and ((counted and heads % size) or (kv % size and size % kv)):
        raise ValueError(f"{heads} heads and {kv} KV heads do not split over {size} ranks")
    if queries == "rows":  # of the whole matrix
        return w.chunk(size)[rank]
    if queries == "within":  # each head's rows are shared out
        return torch.cat([head.chunk(size)[rank] for head in w.split(d)])
    if queries == "thirds":
        return torch.cat([third.chunk(size)[rank] for third in w.chunk(3)])
    whole = dict(zip("qkv", w.split((heads * d, kv * d, kv * d)), strict=True))
    at = size - 1 - rank if queries == "reversed" else rank
    mine = range(at, heads, size) if queries == "strided" else range(at * (heads // size), (at + 1) * (heads // size))
    group = heads // kv
    if keys in ("rows", "overrun"):  # its rows shared out evenly, heads or not; or rank r has number r, if there is one
        width = kv * d // size if keys == "rows" else max(1, kv // size) * d
        q = whole["q"].unflatten(0, (-1, d))[list(mine)].flatten(0, 1)
        return torch.cat([q, *(whole[name][rank * width : (rank + 1) * width] for name in "kv")])
    seen = {
        "block": sorted({h // group for h in mine}),
        "modulo": [rank % kv] if size > kv else list(range(rank * kv // size, (rank + 1) * kv // size)),
        "strided": list(range(rank, kv, size)) if size <= kv else [rank * kv // size],
        "all": list(range(kv)),
        "first": list(range(max(1, kv // size))),
        "twice": [h // group for h in mine],
    }[keys]
    rows = {"q": list(mine), "k": seen, "v": seen}
    return torch.cat([whole[name].unflatten(0, (-1, d))[rows[name]].flatten(0, 1) for name in order])


def numbered(heads: int, kv: int, d: int, n: int = 3) -> Tensor:
    """A weight in which each row tells where it comes from: 100 x head + row of the head, in q, then k, then v."""
    rows = [1000 * i + 100 * h + r for i, count in enumerate((heads, kv, kv)) for h in range(count) for r in range(d)]
    return torch.tensor(rows, dtype=torch.float32)[:, None] + torch.arange(n) / 10


def shards(heads: int, kv: int, d: int, size: int) -> Callable[[], Sequence[Any]]:
    return lambda: (numbered(heads, kv, d), heads, kv, d, size)


def all_ranks(function: Any, w: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, size: int) -> Any:
    return {f"rank {r}": function(w.clone(), num_heads, num_kv_heads, head_dim, r, size) for r in range(size)}


def attention_of(function: Any, num_heads: int, num_kv_heads: int, head_dim: int, size: int) -> Any:
    """Each rank computes attention with its shard alone; the outputs of its heads stand one after the other."""
    rng = torch.Generator().manual_seed(num_heads + size)
    width = 16
    w = torch.randn((num_heads + 2 * num_kv_heads) * head_dim, width, generator=rng) / 4
    x = torch.randn(5, width, generator=rng)
    outputs = []
    for rank in range(size):
        part = function(w, num_heads, num_kv_heads, head_dim, rank, size)
        mine, kv = num_heads // size, max(1, num_kv_heads // size)
        if not isinstance(part, Tensor) or part.shape != ((mine + 2 * kv) * head_dim, width):
            raise Wrong(f"rank {rank}: expected a weight of {mine} query and {kv} KV heads, "
                        f"{[(mine + 2 * kv) * head_dim, width]}, got {getattr(part, 'shape', part)}")  # fmt: skip
        q, k, v = (t.unflatten(1, (-1, head_dim)).transpose(0, 1)
                   for t in (x @ part.T).split((mine * head_dim, kv * head_dim, kv * head_dim), 1))  # fmt: skip
        k, v = (t.repeat_interleave(mine // kv, 0) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        outputs.append(out.transpose(0, 1).flatten(1))
    return torch.cat(outputs, 1)


def refused(function: Any, layouts: Sequence[tuple[int, int, int]]) -> list[str]:
    """Which of (heads, KV heads, size) raise a ValueError."""
    said = []
    for heads, kv, size in layouts:
        try:
            got = [function(numbered(heads, kv, 4), heads, kv, 4, rank, size) for rank in range(size)]
        except CandidateError as error:
            if not str(error).startswith("it raised ValueError"):
                raise
            said.append(f"{heads} heads, {kv} KV heads, {size} ranks: refused")
        else:
            rows = [len(part) if isinstance(part, Tensor) else part for part in got]
            said.append(f"{heads} heads, {kv} KV heads, {size} ranks: rows {rows}")
    return said


# An MLP, whose first matrix is cut by rows and whose second by columns


def parallel_mlp(group: Any, x: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor | None) -> Tensor:
    return mlp_with(group, x, gate_up, down, bias)


def mlp_with(
    group: Any, x: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor | None, *, reduce: str = "out",
    adds: str = "after", halves: str = "gate first", between: str = "silu(gate) * up",
) -> Tensor:  # fmt: skip
    """The flags make the wrong ones."""
    half = len(gate_up) // 2
    gate, up = (gate_up[::2], gate_up[1::2]) if halves == "interleaved" else (gate_up[:half], gate_up[half:])
    if halves == "up first":
        gate, up = up, gate
    g, u = x @ gate.T, x @ up.T
    if reduce == "before":
        g, u = group.all_reduce(torch.cat((g, u), 1)).chunk(2, 1)
    h = {"silu(gate) * up": F.silu(g) * u, "gate * up": g * u, "silu(gate * up)": F.silu(g * u)}[between]
    if reduce == "both":
        h = group.all_reduce(h)
    if reduce == "gather all":
        h, down = torch.cat(group.all_gather(h), 1), torch.cat(group.all_gather(down.contiguous()), 1)
        return h @ down.T + (0 if bias is None else bias)
    out = h @ down.T
    if adds == "before" and bias is not None:
        out = out + bias
    if reduce in ("out", "both", "mean", "inputs", "before"):
        out = group.all_reduce(out)
    if reduce == "dropped":
        group.all_reduce(out)
    if reduce == "side by side":
        return torch.cat(group.all_gather(out), 1)
    if reduce == "gathered":
        out = group.all_gather(out)[0]
    if reduce == "to rank 0":
        parts = group.all_gather(out)
        out = sum(parts) if group.rank == 0 else out
    if reduce == "mean":
        out = out / group.size
    if reduce == "inputs":
        group.all_reduce(x)
    if bias is not None and (adds == "after" or (adds == "rank 0" and group.rank == 0)):
        out = out + bias
    return out


def mlp_args(seed: int, size: int, bias: bool, tokens: int = 4, dim: int = 6, features: int = 12) -> Any:
    def args() -> list[list[list[Any]]]:
        rng = torch.Generator().manual_seed(seed)
        x, b = torch.randn(tokens, dim, generator=rng), torch.randn(dim, generator=rng)
        gate, up = (torch.randn(features, dim, generator=rng) for _ in range(2))
        down = torch.randn(dim, features, generator=rng) / 3
        parts = zip(gate.chunk(size), up.chunk(size), down.chunk(size, 1), strict=True)
        return [[[x.clone(), torch.cat((g, u)), d.contiguous(), b.clone() if bias else None] for g, u, d in parts]]

    return args


def on_ranks(function: Any, arguments_by_rank: Any) -> Any:
    got = function.on_ranks(arguments_by_rank, COLLECTIVES)
    return {f"rank {rank}": out for rank, out in enumerate(got)}


def said(function: Any, arguments_by_rank: Any) -> Any:
    """The result with what was said for it: the right sum for a word too many is not what is asked for."""
    got = on_ranks(function, arguments_by_rank)
    words = [[f"{kind} of {n} numbers" for kind, _, n, _ in rank] for rank in function.said]
    return {"said by each rank": words, "results": got}
