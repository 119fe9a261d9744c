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

from minillm.cache.pool import LARGEST, SMALLEST_AMAX, dequantize_kv, quantize_kv
from minillm.errors import MinillmError

__all__ = ["FLOOR", "dequantize_kv", "expect_pool_dtype", "quantize_heads", "quantize_kv"]

FLOOR = tl.constexpr(SMALLEST_AMAX)  # a head of zeros keeps a scale and stays zeros


def expect_pool_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raise MinillmError for a dtype that is no quantised one, or that this GPU cannot convert to."""
    if dtype not in LARGEST:
        name = str(dtype).removeprefix("torch.")
        raise MinillmError(f"a quantised pool must be int8 or float8_e4m3fn, got {name}")
    if dtype == torch.float8_e4m3fn and device.type == "cuda" and not torch.version.hip:
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            raise MinillmError(
                f"fp8 pools need a GPU of compute capability 8.9 or newer, this one has {capability[0]}."
                f"{capability[1]}; use int8"
            )


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
