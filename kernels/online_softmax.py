"""Online softmax: attention over keys that arrive in pieces, with a state of three numbers a row. Lesson 05 derives it.

softmax(s) v needs the largest score before the first exponential, so it seems to need all scores at once. It does not:
keep the largest score so far (m), the sum of exp(s - m) (l) and the sum of exp(s - m) v (acc). A larger score that
comes later multiplies both sums by exp(m_old - m_new). Milakov and Gimelshein, 2018; in attention Dao et al., 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Exp = Callable[[Tensor], Tensor]  # torch.exp; torch.exp2 where the scores were multiplied by log2(e)


class State(NamedTuple):
    """m [n]: largest score so far, -inf if nothing was seen; l [n]: sum of exp(s - m); acc [n, d]: that times v."""

    m: Tensor
    l: Tensor
    acc: Tensor


def empty(rows: int, d: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> State:
    """The state of rows that have seen no key: what `merge` leaves unchanged."""
    make = lambda *shape: torch.zeros(*shape, dtype=dtype, device=device)
    return State(make(rows) - torch.inf, make(rows), make(rows, d))


def fold(state: State, scores: Tensor, values: Tensor, exp: Exp = torch.exp) -> State:
    """One more tile of keys. scores [n, keys], -inf where a row may not look; values [keys, d] -> the new state.

    The weights are rounded to the dtype of the values before their product, as a GPU's matrix units need them.
    """
    m = torch.maximum(state.m, scores.max(-1).values) if scores.shape[-1] else state.m
    weights = exp(scores - _finite(m)[:, None])
    rescale = exp(state.m - _finite(m))
    product = weights.to(values.dtype).to(state.acc.dtype) @ values.to(state.acc.dtype)
    return State(m, state.l * rescale + weights.sum(-1), state.acc * rescale[:, None] + product)


def merge(a: State, b: State, exp: Exp = torch.exp) -> State:
    """The state of two sets of keys, from the states of each. Associative and commutative: any split gives the same."""
    m = torch.maximum(a.m, b.m)
    of_a, of_b = exp(a.m - _finite(m)), exp(b.m - _finite(m))
    return State(m, a.l * of_a + b.l * of_b, a.acc * of_a[:, None] + b.acc * of_b[:, None])


def finish(state: State) -> Tensor:
    """acc / l [n, d]: the attention output; 0 where a row saw nothing."""
    return torch.where(state.l[:, None] > 0, state.acc / state.l[:, None], 0.0)


def _finite(m: Tensor) -> Tensor:
    """m as a number to subtract: -inf - -inf would be NaN in a row that has seen nothing."""
    return torch.where(m == -torch.inf, 0.0, m)
