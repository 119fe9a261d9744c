"""What tests of kernels share: guarded tensors, an oracle's tolerance, counted traffic."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
from minillm.kernels.traffic import Traffic, counted
from torch import Tensor

GUARD = 64  # elements on each side
DTYPES = (torch.float32, torch.float16)  # bf16 belongs to the compiler and the GPU: the interpreter is wrong in it
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}  # relative to the largest entry of the oracle's result


class Guarded:
    """A tensor inside a larger buffer filled with NaN (or a sentinel): `check` fails if anything around it changed."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32, gap: int = 0):
        """gap: elements between the rows of the last dimension, also guarded."""
        width = shape[-1] + gap
        rows = math.prod(shape[:-1])
        self.sentinel = math.nan if dtype.is_floating_point else 77
        self.buffer = torch.full((GUARD + rows * width + GUARD,), self.sentinel, dtype=dtype)
        strides = [1]
        for size in reversed((*shape[1:-1], width) if len(shape) > 1 else ()):
            strides.insert(0, strides[0] * size)
        self.tensor = self.buffer.as_strided(shape, strides, GUARD)
        self.owned = torch.zeros(len(self.buffer), dtype=torch.bool)
        self.owned.as_strided(shape, strides, GUARD).fill_(True)

    def fill(self, values: Tensor) -> Tensor:
        self.tensor.copy_(values)
        return self.tensor

    def check(self) -> None:
        around = self.buffer[~self.owned]
        kept = around.isnan() if math.isnan(self.sentinel) else around == self.sentinel
        assert bool(kept.all()), f"{int((~kept).sum())} elements outside the tensor were overwritten"


@contextlib.contextmanager
def guarded_outputs() -> Iterator[list[Guarded]]:
    """Launchers that allocate with `torch.empty(shape, dtype=..., device=...)` get guarded memory, here to `check`.

    A wrong kernel that writes past its output then writes into a guard, and not into this process's heap.
    """
    made: list[Guarded] = []

    def empty(shape: Sequence[int], dtype: torch.dtype = torch.float32, device: object = None) -> Tensor:
        made.append(Guarded(*shape, dtype=dtype))
        return made[-1].tensor

    with mock.patch.object(torch, "empty", empty):
        yield made


def error(got: Tensor, oracle: Tensor) -> float:
    """Largest difference, relative to the largest entry of the oracle. NaN and inf count as infinitely wrong."""
    difference = (got.double() - oracle.double()).abs()
    if not bool(difference.isfinite().all()):
        return math.inf
    return float(difference.max() / oracle.double().abs().max().clamp_min(1e-30)) if difference.numel() else 0.0


def close(got: Tensor, oracle: Tensor, dtype: torch.dtype | None = None) -> bool:
    return error(got, oracle) <= TOLERANCE[dtype or got.dtype]


def traffic_of(launch: Callable[[], object]) -> Traffic:
    with counted() as traffic:
        launch()
    return traffic
