"""Keys and values in eight bits: one scale a token and head, written beside them. Lesson 08 builds it.

A pool of int8 or fp8 (e4m3) holds `stored`, and value = stored * scale. The scale is amax / 127 or amax / 448, the
largest entry over the largest number of the format, so nothing is cut off and no calibration is needed. One token's
scale never depends on another's: a page may be filled one token at a time, shared and continued. Int8 has equal steps
of amax / 127; e4m3 has three bits of mantissa, so its steps shrink with the value.
"""

from __future__ import annotations

import torch
import triton.language as tl
from minillm.kernels.triton_private import jit
from torch import Tensor

from minillm.errors import MinillmError

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
FLOOR = tl.constexpr(1e-20)  # the least amax that is divided by: a head of zeros keeps a scale and stays zeros


def quantize_kv(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(stored, scale) of finite values x [..., d]: stored [..., d] in dtype (int8 or float8_e4m3fn), scale [...] fp32.

    Raises MinillmError for another dtype.
    """
    largest = _largest(dtype)
    x = x.float()
    amax = x.abs().amax(-1).clamp_min(FLOOR.value)
    stored = x * (largest / amax).unsqueeze(-1)
    if dtype == torch.int8:
        stored = torch.floor(stored + 0.5)
    return stored.to(dtype), amax / largest


def dequantize_kv(stored: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """stored [..., d] * scale [...], multiplied in fp32, in dtype (fp64 for an oracle)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (stored.to(wide) * scale.to(wide).unsqueeze(-1)).to(dtype)


def expect_pool_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raise MinillmError for a dtype that is no quantised one, or that this GPU cannot convert to."""
    _largest(dtype)
    if dtype == torch.float8_e4m3fn and device.type == "cuda" and not torch.version.hip:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            raise MinillmError(
                f"fp8 pools need a GPU of compute capability 8.9 or newer, this one has {capability[0]}."
                f"{capability[1]}; use int8"
            )


def _largest(dtype: torch.dtype) -> float:
    if dtype not in LARGEST:
        name = str(dtype).removeprefix("torch.")
        raise MinillmError(f"a quantised pool must be int8 or float8_e4m3fn, got {name}")
    return LARGEST[dtype]


@jit
def quantize_heads(first, second, LARGEST: tl.constexpr):
    """Device side of `quantize_kv`. A row a head, in two halves, fp32 [heads, d / 2]: what to store, and scale [heads].

    The halves are still fp32, on the grid of the format; conversion to int8 or fp8 is exact or rounds to the nearest.
    """
    amax = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
    amax = tl.maximum(amax, FLOOR)
    step = (LARGEST / amax)[:, None]
    first, second = first * step, second * step
    if LARGEST == 127:  # conversion to int8 cuts off, so round here
        first, second = tl.floor(first + 0.5), tl.floor(second + 0.5)
    return first, second, amax / LARGEST
