"""The operators between two matrix products on a CPU: the same arithmetic in fewer calls. Lesson 09 reads it.

A decode step of a small model is a few thousand operator calls, of a few microseconds each whatever they compute. At
one stream the number of calls counts; at many rows, how often memory is gone through.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class CpuOps:
    """`TorchOps` with fewer calls. Differs from it by rounding only: sums of squares in another order, one rounding
    less in a rotation."""

    def __init__(self) -> None:
        self._eps: dict[float, Tensor] = {}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """A vector norm squares and adds in one pass. The product is rounded to x's dtype as it is written."""
        h = x.float()
        norm = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
        if eps not in self._eps:
            self._eps[eps] = torch.tensor(eps)
        scale = torch.addcmul(self._eps[eps], norm, norm, value=1 / x.shape[-1]).rsqrt_()  # of mean square + eps
        return torch.mul(h, scale, out=torch.empty_like(x)).mul_(weight)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """In place where it can be: a fresh [N, I] of many rows costs a page fault for each 4 KiB."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def angles(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The rotation's minus sign goes into the sines once a step, not into the heads in every layer."""
        first, second = sin.chunk(2, dim=-1)
        return cos, torch.cat((-first, second), dim=-1)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(a, b) -> (a, b) cos + (b, a) (-sin, sin): the halves swap places, and product and sum are one call."""
        return x.roll(x.shape[-1] // 2, -1).mul_(sin).addcmul_(x, cos)
