"""References of exercise 08: codes of weights, packed groups, a product with codes. With switches for typical errors.

Plain loops or plain formulas, apart from solutions/, the engine and the kernels. The cache and the gate: judged.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minillm.course.candidate import Candidate
from minillm.course.checks.tiny import randn
from minillm.course.tasks import Wrong

# 08.2 int8, a scale an output


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    return int8_with(weight)


def int8_with(
    weight: Tensor, *, over: str = "row", signed: bool = False, steps: int = 127, how: str = "nearest"
) -> tuple[Tensor, Tensor]:
    """over: what shares a scale, "row", "column" or "all"; signed: max without abs; how: "nearest", "cut", "floor"."""
    w = weight.double()
    size = w if signed else w.abs()
    amax = {"row": size.amax(1), "column": size.amax(0), "all": size.amax().expand(len(w))}[over]
    scale = torch.where(amax == 0, 1.0, amax / steps)
    grid = w / (scale[None, :] if over == "column" else scale[:, None])
    codes = {"nearest": grid.round(), "cut": grid.trunc(), "floor": grid.floor()}[how]
    return codes.clamp(-128, 127).to(torch.int8), scale.float()


def nan_where_zero(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of zeros are divided by a scale of 0."""
    codes, scale = int8_with(weight)
    return codes, scale.where(weight.abs().amax(1) > 0, torch.tensor(0.0))


def rows_of_sizes(seed: int, *sizes: float, n: int = 8) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.stack([randn(seed + i, n) * s for i, s in enumerate(sizes)]),)


def with_outlier(seed: int, rows: int, n: int, value: float) -> Callable[[], tuple[Tensor]]:
    def args() -> tuple[Tensor]:
        w = randn(seed, rows, n, scale=0.02)
        w[1, 3] = value
        return (w,)

    return args


def half_a_step(answer: Candidate, weight: Tensor) -> bool:
    """What the codes stand for is never more than half a step off, and every row uses the whole range."""
    codes, scale = answer(weight)
    off = (codes.double() * scale.double()[:, None] - weight.double()).abs()
    if not bool((off <= 0.5001 * scale.double()[:, None]).all()):
        raise Wrong(f"a weight is {float((off / scale.double()[:, None]).max()):.2f} steps off", "round to the nearest")
    if not bool((codes.int().abs().amax(1) == 127).all()):
        raise Wrong("in some row the largest code is not 127", "the largest magnitude of each row becomes 127")
    return True


# 08.3 int4 in groups


def quantize_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    return int4_with(weight, group)


def int4_with(
    weight: Tensor, group: int, *, steps: int = 15, symmetric: bool = False, over_rows: bool = False,
    mean: bool = False, cut: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """symmetric: from -amax to amax; over_rows: a group is of outputs; mean: the zero is the mean of the group."""
    n_out, n_in = weight.shape
    codes = torch.zeros(n_out, n_in, dtype=torch.uint8)
    scale, zero = torch.zeros(n_out, n_in // group), torch.zeros(n_out, n_in // group)
    for o in range(n_out):
        for g in range(n_in // group):
            w = weight[o, g * group : (g + 1) * group].double()
            low, high = float(w.min()), float(w.max())
            if symmetric:
                high = max(abs(low), abs(high))
                low = -high
            if over_rows:
                low = float(weight[:, g * group : (g + 1) * group].min())
                high = float(weight[:, g * group : (g + 1) * group].max())
            s = (high - low) / steps or 1.0
            low = float(w.mean()) if mean else low
            grid = (w - low) / s
            codes[o, g * group : (g + 1) * group] = (grid.trunc() if cut else grid.round()).clamp(0, 15).to(torch.uint8)
            scale[o, g], zero[o, g] = s, low
    return codes, scale, zero


def int4_args(seed: int, n_out: int, n_in: int, group: int, shift: float = 0.0) -> Callable[[], tuple[Any, ...]]:
    return lambda: (randn(seed, n_out, n_in, scale=0.05) + shift, group)


def groups_of_sizes(seed: int, group: int, *sizes: float) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.cat([randn(seed + i, 2, group) * s for i, s in enumerate(sizes)], 1), group)


def constant_group() -> tuple[Any, ...]:
    w = randn(70, 2, 8)
    w[1, 4:8] = 0.3
    w[0, :4] = 0.0
    return w, 4


# 08.4 two codes a byte


class Int4Format:
    """The right one; subclasses set the switches."""

    swap, halves, zeroed, shift, parameters = False, False, False, 0, 4

    def __init__(self, group: int):
        self.group = group

    def pack(self, codes: Tensor) -> Tensor:
        n_out, n_in = codes.shape
        packed = torch.zeros(n_out, n_in // 2, dtype=torch.uint8)
        for j in range(n_in // 2):
            a, b = (j, j + n_in // 2) if self.halves else (2 * j, 2 * j + 1)
            a, b = (b, a) if self.swap else (a, b)
            packed[:, j] = codes[:, a] + 16 * codes[:, b]
        return packed

    def dequantize(self, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        n_out, n_in = len(packed), 2 * packed.shape[1]
        weight = torch.zeros(n_out, n_in)
        for i in range(n_in):
            low = i < n_in // 2 if self.halves else i % 2 == 0
            byte = packed[:, i % (n_in // 2) if self.halves else i // 2].int()
            code = byte % 16 if low != self.swap else byte // 16
            g = min(i // self.group + self.shift, scale.shape[1] - 1)
            weight[:, i] = code * scale[:, g] + (0.0 if self.zeroed else zero[:, g])
        return weight

    def nbytes(self, n_out: int, n_in: int) -> int:
        return n_out * n_in // 2 + self.parameters * n_out * (n_in // self.group)


class Swapped(Int4Format):
    swap = True


class Halves(Int4Format):
    halves = True


class ZeroDropped(Int4Format):
    zeroed = True


class NextGroup(Int4Format):
    shift = 1


class ScalesFree(Int4Format):
    parameters = 0


class ZerosFree(Int4Format):
    parameters = 2


def codes_args(seed: int, n_out: int, n_in: int, group: int) -> Callable[[], tuple[Any, ...]]:
    def args() -> tuple[Any, ...]:
        return torch.randint(0, 16, (n_out, n_in), generator=_seeded(seed), dtype=torch.uint8), group

    return args


def bytes_args(seed: int, n_out: int, n_in: int, group: int) -> Callable[[], tuple[Any, ...]]:
    def args() -> tuple[Any, ...]:
        packed = torch.randint(0, 256, (n_out, n_in // 2), generator=_seeded(seed), dtype=torch.uint8)
        shape = (n_out, n_in // group)
        return packed, randn(seed + 1, *shape).abs() + 0.1, randn(seed + 2, *shape, scale=3.0), group

    return args


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def packed_by(answer: Candidate, codes: Tensor, group: int) -> Tensor:
    return answer(group).pack(codes)


def made_whole(answer: Candidate, packed: Tensor, scale: Tensor, zero: Tensor, group: int) -> Tensor:
    return answer(group).dequantize(packed, scale, zero)


def sizes(answer: Candidate, shapes: list[tuple[int, int, int]]) -> list[int]:
    return [answer(group).nbytes(n_out, n_in) for n_out, n_in, group in shapes]


# 08.5 a product with packed weights


def int4_matvec(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return matvec_with(x, packed, scale, zero)


def matvec_with(
    x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor, *, swap: bool = False, zeroed: bool = False,
    scaled: bool = True, shift: int = 0, first: bool = False, halves: bool = False, once: bool = False,
    missing: int = 0,
) -> Tensor:  # fmt: skip
    """first: the first group's scale and zero for all; halves: inputs of a group's low codes come first; once: the zero
    is added once a group, not times the inputs; missing: groups left out at the end."""
    low, high = (packed & 15).double(), (packed >> 4).double()
    n_out, groups = scale.shape
    group = len(x) // groups
    y = torch.zeros(n_out, dtype=torch.float64)
    for g in range(groups - missing):
        a, b = (c[:, g * group // 2 : (g + 1) * group // 2] for c in ((high, low) if swap else (low, high)))
        codes = torch.cat((a, b), 1) if halves else torch.stack((a, b), -1).flatten(1)
        part = x[g * group : (g + 1) * group].double()
        at = 0 if first else min(g + shift, groups - 1)
        s = scale[:, at].double() if scaled else 1.0
        z = 0.0 if zeroed else zero[:, at].double()
        y += s * (codes @ part) + z * (1.0 if once else part.sum())
    return y.float()


def matvec_args(seed: int, n_out: int, n_in: int, group: int = 32) -> Callable[[], tuple[Any, ...]]:
    def args() -> tuple[Any, ...]:
        packed = torch.randint(0, 256, (n_out, n_in // 2), generator=_seeded(seed), dtype=torch.uint8)
        shape = (n_out, n_in // group)
        return randn(seed + 1, n_in), packed, randn(seed + 2, *shape).abs() + 0.1, randn(seed + 3, *shape)

    return args


def matvec_bytes(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor) -> tuple[int, int]:
    """16 outputs a program: each loads x once; codes, scales and zeros are loaded once in all."""
    programs = -(-len(packed) // 16)
    return programs * len(x) * 4 + packed.numel() + (scale.numel() + zero.numel()) * 4, len(packed) * 4


def codes_loaded_twice(args: Callable[[], Any]) -> tuple[float, float]:
    x, packed, scale, zero = args()
    loaded, _ = matvec_bytes(x, packed, scale, zero)
    return (loaded + packed.numel()) / loaded, 1.0
