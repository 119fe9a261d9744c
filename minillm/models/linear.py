"""A matrix whose rows are outputs: `y = x W^T + b`. Lesson 07 explains why it is packed.

On a CPU, oneDNN's kernels for one or a few rows read a weight in an order of their own. Plain `F.linear` cannot use
them: in fp32 it takes another library's product, in bf16 it reorders at every call. `Linear` reorders once. The
private operators that do it are used only here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear:
    """x [N, in] -> [N, out]. After `pack()` the plain weight is gone: memory is held once."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.weight: Tensor | None = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self._packed: Tensor | None = None

    def pack(self) -> Linear:
        """Reorder the weight for oneDNN where that is possible; otherwise leave it as it is."""
        if self.weight is not None and can_pack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, 1)
            self.weight = None
        return self

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)  # type: ignore[arg-type]
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def can_pack(weight: Tensor) -> bool:
    """oneDNN packs fp32 always, bf16 where the CPU has instructions for it; never on another device."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available() or not weight.numel():
        return False
    if weight.dtype == torch.bfloat16:
        return has_bf16_instructions()
    return weight.dtype == torch.float32


def has_bf16_instructions() -> bool:
    """Whether this CPU multiplies bf16 itself. Without, bf16 is emulated and slower than fp32."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
