"""References and mistakes of exercise 14 for an all-reduce in a ring, and what it may send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def ring_all_reduce(group: Any, x: Tensor) -> Tensor:
    return ring_with(group, x)


def ring_with(
    group: Any, x: Tensor, *, scatter: int = 0, gather: int = 1, adds: bool = True, steps: int = 0,
    gathers: bool = True, even: bool = False, mean: bool = False, again: bool = False, fresh: bool = False,
    lost: bool = False,
) -> Tensor:  # fmt: skip
    """scatter, gather: which chunk, counted from the rank's own, leaves first. The other flags make wrong ones, too:
    again adds in the second round as well, fresh sends the rank's own chunks in the first, not what it has added;
    lost adds, and keeps the sum nowhere.
    """
    n, me = group.size, group.rank
    flat = x.flatten().clone()
    width = len(flat) // n if even else -(-len(flat) // n)
    chunks = [flat[min(len(flat), i * width) : min(len(flat), (i + 1) * width)] for i in range(n)]
    if n == 1:
        return flat.view(x.shape)
    own = [chunk.clone() for chunk in chunks]

    def step(out: int, back: int, add: bool, first: bool = False) -> None:
        group.send((own if fresh and first else chunks)[out % n], (me + 1) % n)
        got = group.recv(torch.empty_like(chunks[back % n]), (me - 1) % n)
        if not (lost and add):
            chunks[back % n].copy_(got + chunks[back % n] if add else got)

    for s in range(n - 1 - steps):
        step(me - s + scatter, me - s - 1 + scatter, adds, first=True)
    for s in range(n - 1 - steps if gathers else 0):
        step(me - s + gather + scatter, me - s - 1 + gather + scatter, again)
    return flat.view(x.shape) / (n if mean else 1)


def goes_round(group: Any, x: Tensor) -> Tensor:
    """The whole tensor travels once round the ring, and everybody adds: right, and N / 2 times the words."""
    total, passing = x.clone(), x
    for _ in range(group.size - 1):
        group.send(passing, (group.rank + 1) % group.size)
        passing = group.recv(torch.empty_like(x), (group.rank - 1) % group.size)
        total = total + passing
    return total


def star(group: Any, x: Tensor) -> Tensor:
    """All send to rank 0, which adds and answers."""
    if group.rank:
        group.send(x, 0)
        return group.recv(torch.empty_like(x), 0)
    total = x.clone()
    for other in range(1, group.size):
        total = total + group.recv(torch.empty_like(x), other)
    for other in range(1, group.size):
        group.send(total, other)
    return total


def everybody(group: Any, x: Tensor) -> Tensor:
    """Each sends all of it to each, and adds its own first: as many bytes as round the ring, and other last bits."""
    others = [other for other in range(group.size) if other != group.rank]
    for other in others:
        group.send(x, other)
    total = x.clone()
    for other in others:
        total = total + group.recv(torch.empty_like(x), other)
    return total


def direct(group: Any, x: Tensor) -> Tensor:
    """Each chunk straight to the rank that sums it, each sum straight to everybody: a ring's bytes without a ring."""
    n, me = group.size, group.rank
    others = [other for other in range(n) if other != me]
    chunks = list(x.flatten().clone().tensor_split(n))
    for other in others:
        group.send(chunks[other], other)
    for other in others:
        chunks[me] = chunks[me] + group.recv(torch.empty_like(chunks[me]), other)
    for other in others:
        group.send(chunks[me], other)
    for other in others:
        chunks[other] = group.recv(torch.empty_like(chunks[other]), other)
    return torch.cat(chunks).view(x.shape)


def tensors(size: int, *shape: int) -> Callable[[], Sequence[Any]]:
    """Whole numbers, so that every order of adding gives the same sum."""

    def args() -> list[Any]:
        rng = torch.Generator().manual_seed(100 * size + len(shape))
        return [[torch.randint(-50, 50, shape, generator=rng).float() for _ in range(size)]]

    return args


def summed(function: Any, x_by_rank: list[Tensor]) -> Any:
    got = function.on_ranks([[x] for x in x_by_rank], ["send", "recv"])
    return {f"rank {rank}": out for rank, out in enumerate(got)}


def traffic(function: Any, x_by_rank: list[Tensor]) -> Any:
    """What each rank sends, and to how many others."""
    got = summed(function, x_by_rank)
    sent = [[(peer, n) for kind, peer, n, _ in rank if kind == "send"] for rank in function.said]
    return {
        "numbers sent by each rank": [sum(n for _, n in rank) for rank in sent],
        "to how many others": [len({peer for peer, _ in rank}) for rank in sent],
        "results": got,
    }


def same_bits(function: Any, size: int, numbers: int) -> Any:
    """Floats of very different size: the order of adding shows in the last bits."""
    rng = torch.Generator().manual_seed(size)
    x = [torch.randn(numbers, generator=rng) * 10.0 ** torch.randint(-3, 5, (numbers,), generator=rng)
         for _ in range(size)]  # fmt: skip
    got = list(summed(function, x).values())
    right = torch.stack(x).double().sum(0)
    error = [(t.double() - right).abs().max().item() for t in got if isinstance(t, Tensor) and t.shape == right.shape]
    return {
        "how far each rank's sum is off": [0.0 if e < 0.05 else float(f"{e:.3g}") for e in error],
        "different results": len({tuple(t.tolist()) for t in got if isinstance(t, Tensor)}),
    }
