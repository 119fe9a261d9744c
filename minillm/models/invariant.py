"""Batch invariance: a token's logits depend, bit for bit, on its own sequence alone. Lesson 09 shows why it costs.

A library picks its kernel by the shape of a product, and kernels add in different orders. So the same row has other
last bits alone, among 7 rows and among 300, and a near tie turns into another token. It is the order that moves, not
chance: no atomics are involved (He et al., 2025, "Defeating Nondeterminism in LLM Inference"). Here the order is fixed.

Between the products, by construction: only additions, multiplications, divisions, square roots, maxima and copies
are used, an element at a time. IEEE 754 rounds each of them correctly, so vector code, its scalar tail, any split
over threads and any shape give the same bits, on any device. `total` and `exp` are what a library would choose an
order or an approximation for, and are spelled out.

Products with weights, measured: a product of a fixed number of rows is one kernel, whose order of additions does not
look at the data. So equal bits on enough random rows mean an equal order. `agreeing_sizes` finds, for each weight, the
numbers of rows whose results agree wherever a row stands and whatever stands beside it; `InvariantLinear` uses no
others. Where none agree, every row is a product of its own, which is invariant by construction.

Attention: `attention/invariant.py`. One model in one process with one number of threads is meant; another machine may
have other bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.errors import MinillmError
from minillm.models.linear import Linear
from minillm.models.transformer import Transformer, apply_rope
from minillm.quant import FEW_ROWS, LINEARS, QuantLinear
from minillm.request import Request, TokenLogprob

SIZES = (4, 16, 32)  # rows of a product; above 32 oneDNN takes another bf16 kernel, and nothing is won
LOG2_E = 1.4426950408889634
LN2_HIGH = 0.693359375  # 355/512: its product with a whole number of up to 15 bits is exact in fp32
LN2_LOW = 0.6931471805599453 - LN2_HIGH
INVERSE_FACTORIALS = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)


def exp(x: Tensor) -> Tensor:
    """e^x, fp32 [...] -> fp32 [...], from exactly rounded operations alone. Relative error below 2e-7.

    x = n ln 2 + r with |r| <= (ln 2)/2; e^r by its Taylor series to r^7 / 7!, 2^n by writing the exponent's bits. Below
    -87 it is 0, above 88 it stays e^88; NaN stays NaN.
    """
    bounded = x.clamp(-87.0, 88.0)
    n = (bounded * LOG2_E).round_()
    r = bounded.sub_(n * LN2_HIGH).sub_(n * LN2_LOW)
    y = torch.full_like(r, INVERSE_FACTORIALS[0])
    for coefficient in INVERSE_FACTORIALS[1:]:
        y.mul_(r).add_(coefficient)
    power = (n.to(torch.int32).add_(127) << 23).view(torch.float32)
    return y.mul_(power).masked_fill_(x < -87.0, 0.0)


def total(x: Tensor) -> Tensor:
    """Sum over the last dimension by halves, [..., n] -> [..., 1]: the order is written here, no kernel picks it."""
    while (n := x.shape[-1]) > 1:
        half = n // 2
        pairs = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat((pairs, x[..., 2 * half :]), dim=-1) if n % 2 else pairs
    return x


class InvariantOps:
    """`TorchOps` from exactly rounded operations. A row's result does not depend on the others by construction."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        h = x.float()
        mean = total(h * h) * (1.0 / x.shape[-1])
        return (h * (mean + eps).sqrt_().reciprocal_()).to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        added = x + residual
        return self.rms_norm(added, weight, eps), added

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        h = gate.float()
        return (h / (exp(-h) + 1.0)).to(gate.dtype) * up

    def angles(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return cos, sin

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return apply_rope(x, cos, sin)  # products and sums alone


class InvariantLinear:
    """x [N, in] -> [N, out]: rows in tiles of the sizes that `agreeing_sizes` found, the last one filled with zeros."""

    def __init__(self, inner: Linear, sizes: Sequence[int]):
        """inner: a plain, packed or quantised linear. sizes: numbers of rows whose results agree, ascending."""
        self.inner, self.sizes = inner, tuple(sizes)
        self.out_features, self.in_features, self.bias = inner.out_features, inner.in_features, inner.bias

    @property
    def weight(self) -> Tensor | None:
        return self.inner.weight

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, self.out_features)
        parts, largest = [], self.sizes[-1]
        for rows in x.split(largest):
            size = next(s for s in self.sizes if s >= len(rows))
            tile = x.new_zeros(size, self.in_features)  # a new tensor: its address is as well aligned as any other's
            tile[: len(rows)] = rows
            parts.append(self.inner(tile)[: len(rows)])
        return torch.cat(parts)


@torch.inference_mode()
def agreeing_sizes(linear: Any, dtype: torch.dtype, device: str | torch.device = "cpu") -> tuple[int, ...]:
    """Which of `SIZES`, ascending, give a row the same bits; (1,), which needs no test, where none can be used.

    The largest one passes on its own: a row's result is the same in another place of the tile, and with other rows or
    zeros beside it. A smaller one must give the same bits as the largest. dtype and device are those of x.
    """
    sizes = [s for s in SIZES if s <= FEW_ROWS] if isinstance(linear, QuantLinear) else list(SIZES)  # more: dequantises
    generator = torch.Generator().manual_seed(0)
    outputs = 2**14 if dtype.itemsize > 2 else 2**20  # rounding to 16 bits hides nearly all differences of order
    count = SIZES[-1] * max(2, -(-outputs // (SIZES[-1] * linear.out_features)))
    x = torch.randn(count, linear.in_features, generator=generator).to(device, dtype)
    shuffled = torch.randperm(count, generator=generator).to(device)

    def in_tiles(rows: Tensor, size: int) -> Tensor:
        return torch.cat([linear(tile.clone()) for tile in rows.split(size)])

    def agrees(size: int, want: Tensor) -> bool:
        """want: the results of x. Compared: shuffled rows, and a few rows with zeros beside them."""
        alone = x.new_zeros(4 * size, linear.in_features)
        alone[size - 1 :: size] = x[:4]
        return torch.equal(in_tiles(x[shuffled], size), want[shuffled]) and torch.equal(
            in_tiles(alone, size)[size - 1 :: size], want[:4]
        )

    while sizes and not agrees(sizes[-1], want := in_tiles(x, sizes[-1])):
        sizes.pop()
    return (*(s for s in sizes[:-1] if agrees(s, want)), sizes[-1]) if sizes else (1,)


def make_invariant(model: Transformer) -> Transformer:
    """Switch a model, in place, to batch-invariant operators and linears. Use it with `PagedInvariant`.

    Call it last: after packing or quantising, and after `torch.set_num_threads`. Every kind of linear, by shape, dtype
    and layout, is tried once, on random rows. A second call changes nothing.
    """
    known: dict[tuple, tuple[int, ...]] = {}

    def wrapped(linear: Any) -> InvariantLinear:
        if isinstance(linear, InvariantLinear):
            return linear
        address = None if linear.weight is None else linear.weight.data_ptr() % 64
        kind = (type(linear), linear.out_features, linear.in_features, linear.bias is None, address)
        if kind not in known:
            known[kind] = agreeing_sizes(linear, model.dtype, model.device)
        return InvariantLinear(linear, known[kind])

    for layer in model.layers:
        for name in LINEARS:
            setattr(layer, name, wrapped(getattr(layer, name)))
    model.lm_head = wrapped(model.lm_head)  # type: ignore[assignment]
    model.ops = InvariantOps()
    return model


class RowByRow:
    """A sampler that is given one row at a time, so that its softmax, logarithms and sums always have one shape."""

    def __init__(self, sampler: Any):
        self.sampler = sampler

    def sample(
        self, logits: Tensor, requests: Sequence[Request]
    ) -> tuple[list[int], list[dict[int, TokenLogprob] | None]]:
        """As `Sampler.sample`: logits [B, V], a row a request."""
        tokens: list[int] = []
        logprobs: list[dict[int, TokenLogprob] | None] = []
        for row, request in zip(logits, requests, strict=True):
            result = self.sampler.sample(row[None].clone(), [request])
            try:
                (token,), (entry,) = result
            except (TypeError, ValueError):
                raise MinillmError(
                    "the sampler must return (token ids, logprobs), two lists with one entry each for one request; "
                    f"got {result!r:.120}"
                ) from None
            tokens.append(token)
            logprobs.append(entry)
        return tokens, logprobs
