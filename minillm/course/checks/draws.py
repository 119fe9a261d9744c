"""Distributions to check against: temperature, filters, penalties and the draw, in float64 and plain Python.

The flags of the `_with` functions make the wrong ones of exercise 03. Tooling of lesson 03.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# 03.2 temperature


def tempered(logits: Tensor, temperature: float) -> Tensor:
    x = logits.double()
    if temperature == 0:
        return torch.eye(len(x))[x.tolist().index(max(x.tolist()))]
    e = ((x - x.max()) / temperature).exp()
    return (e / e.sum()).float()


def naive_softmax(logits: Tensor, temperature: float) -> Tensor:
    e = (logits.float() / temperature).exp()
    return e / e.sum()


def in_input_dtype(logits: Tensor, temperature: float) -> Tensor:
    x = logits / temperature if temperature else logits
    return (x - x.max()).softmax(-1).float()


# 03.3 top-k, then top-p


def nucleus(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    return nucleus_with(logits, temperature, top_k, top_p)


def nucleus_with(
    logits: Tensor, temperature: float, top_k: int, top_p: float, *, boundary: bool = True, of_k: bool = True,
    lower: bool = True, renormalise: bool = True, late: bool = False, by_rank: bool = False,
) -> Tensor:  # fmt: skip
    x = logits.tolist()
    p = tempered(logits, 1.0 if late else temperature).double().tolist()
    order = sorted(range(len(x)), key=lambda i: (-x[i], i if lower else -i))
    order = order[:top_k] if top_k else order
    total = sum(p[i] for i in order) if of_k else 1.0
    kept: list[int] = []
    mass = 0.0
    for i in order:
        if top_p < 1.0 and (mass if boundary else mass + p[i]) >= top_p * total and (kept or boundary):
            break
        kept.append(i)
        mass += p[i]
    p = tempered(logits, temperature).double().tolist()
    out = torch.zeros(len(x), dtype=torch.float64)
    for rank, i in enumerate(kept):
        out[rank if by_rank else i] = p[i]
    return (out / out.sum() if renormalise else out).float()


def each_setting(function: Any, logits: Tensor, settings: Sequence[Any]) -> list[Any]:
    """Every setting in one case, so that a filter that does nothing earns nothing here."""
    return [function(logits.clone(), *setting) for setting in settings]


# 03.4 min-p


def min_p(logits: Tensor, temperature: float, min_p: float) -> Tensor:
    p = tempered(logits, temperature).double()
    return torch.where(p >= min_p * p.max(), logits, -math.inf)


def absolute_threshold(logits: Tensor, temperature: float, threshold: float) -> Tensor:
    return torch.where(tempered(logits, temperature) >= threshold, logits, -math.inf)


def strictly_above(logits: Tensor, temperature: float, threshold: float) -> Tensor:
    p = tempered(logits, temperature)
    return torch.where(p > threshold * p.max(), logits, -math.inf)


def of_the_logit(logits: Tensor, temperature: float, threshold: float) -> Tensor:
    return torch.where(logits >= threshold * logits.max(), logits, -math.inf)


# 03.5 penalties


def penalties(
    logits: Tensor, prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> Tensor:
    return penalties_with(logits, prompt, output, repetition, presence, frequency)


def penalties_with(
    logits: Tensor, prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float, *,
    see: Sequence[str] = ("prompt", "output"), count: Sequence[str] = ("output",), divide: bool = False,
    each: bool = False, first: bool = True, sign: int = -1,
) -> Tensor:  # fmt: skip
    texts = {"prompt": prompt, "output": output}
    seen, counted = ([t for name in names for t in texts[name]] for names in (see, count))

    def repeat(x: float, token: int) -> float:
        for _ in range(seen.count(token) if each else token in seen):
            x = x / repetition if x > 0 or divide else x * repetition
        return x

    def subtract(x: float, token: int) -> float:
        return x + sign * (presence * (token in counted) + frequency * counted.count(token))

    steps = (repeat, subtract) if first else (subtract, repeat)
    values = []
    for token, value in enumerate(logits.double().tolist()):
        for step in steps:
            value = step(value, token)
        values.append(value)
    return torch.tensor(values, dtype=torch.float32)


# 03.6 a draw that depends on (seed, position) alone


def uniform(seed: int, position: int) -> float:
    return random.Random(f"{seed}/{position}").random()


def draw(probabilities: Tensor, seeds: list[int], positions: list[int], uniform: Any) -> list[int]:
    return draw_with(probabilities, seeds, positions, uniform)


def draw_with(
    probabilities: Tensor, seeds: list[int], positions: list[int], uniform: Any, *,
    key: Callable[[int, int, int], tuple[int, int]] = lambda seed, position, row: (seed, position),
    zeros: bool = False, overrun: bool = False,
) -> list[int]:  # fmt: skip
    tokens = []
    for row, (weights, seed, position) in enumerate(zip(probabilities.tolist(), seeds, positions, strict=True)):
        u, total, token = uniform(*key(seed, position, row)), 0.0, None
        for i, weight in enumerate(weights):
            total += weight
            if token is None and (total >= u if zeros else total > u):
                token = i
        last = len(weights) - 1 if overrun else max(i for i, w in enumerate(weights) if w > 0)
        tokens.append(last if token is None else token)
    return tokens


def batches(function: Any, probabilities: Tensor, seeds: list[int], positions: list[int]) -> dict[str, list[int]]:
    """The same rows in three batches: as they are, reversed, and one at a time. The tokens must not differ."""
    whole = function(probabilities.clone(), list(seeds), list(positions), uniform)
    flipped = function(probabilities.flip(0), seeds[::-1], positions[::-1], uniform)[::-1]
    rows = zip(probabilities.split(1), seeds, positions, strict=True)
    alone = [function(row.clone(), [seed], [position], uniform)[0] for row, seed, position in rows]
    return {"as they are": whole, "reversed": flipped, "one at a time": alone}


def one_row(function: Any, probabilities: Tensor, seed: int, steps: int) -> list[int]:
    return [function(probabilities[None].clone(), [seed], [t], uniform)[0] for t in range(steps)]


def at(function: Any, rows: Sequence[Sequence[float]], us: Sequence[float]) -> list[int]:
    """Chosen values in place of random ones, all rows of one length."""
    return function(torch.tensor(rows), [0] * len(us), list(range(len(us))), lambda seed, position: us[position])
