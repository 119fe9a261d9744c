"""A matrix whose rows are outputs: `y = x W^T + b`. Lesson 07 explains why it is packed.

oneDNN reorders a weight into the layout its kernels read; on a CPU, plain `F.linear` does that at every
call. `Linear` does it once. The two torch operators it needs are private, so they are used only here.
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
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32
