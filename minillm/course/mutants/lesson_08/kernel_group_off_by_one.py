"""Each group gets the scale of its right neighbour, clamped at the end."""

import torch
import triton
import triton.language as tl
from minillm.kernels import jit
from torch import Tensor

TASK = "08.5"
POINTS = 1
HINT = "group off by one"


@jit
def _int4_matvec(X, PACKED, SCALE, ZERO, OUT, n_out, n_in, GROUP: tl.constexpr):
    n = tl.program_id(0) * 16 + tl.arange(0, 16)
    pair = tl.arange(0, GROUP // 2)
    mine = n < n_out
    groups = n_in // GROUP
    total = tl.zeros([16], tl.float32)
    for g in range(groups):
        byte = g * (GROUP // 2) + pair
        packed = tl.load(PACKED + n[:, None] * (n_in // 2) + byte[None, :], mask=mine[:, None], other=0)
        even, odd = tl.load(X + 2 * byte), tl.load(X + 2 * byte + 1)
        low, high = (packed & 15).to(tl.float32), (packed >> 4).to(tl.float32)
        scale = tl.load(SCALE + n * groups + tl.minimum(g + 1, groups - 1), mask=mine, other=0.0)
        zero = tl.load(ZERO + n * groups + tl.minimum(g + 1, groups - 1), mask=mine, other=0.0)
        total += scale * tl.sum(low * even[None, :] + high * odd[None, :], axis=1) + zero * tl.sum(even + odd)
    tl.store(OUT + n, total, mask=mine)


def int4_matvec(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    out = torch.empty(len(packed), dtype=torch.float32)
    grid = (triton.cdiv(len(packed), 16),)
    _int4_matvec[grid](x, packed, scale, zero, out, len(packed), len(x), GROUP=len(x) // scale.shape[1])
    return out
