"""The memory of a paged KV cache: blocks of tokens, reserved once. Lesson 06 builds it, lesson 08 quantises it.

The memory of a token in a layer is one slot: `slot = block * block_size + offset`. Which blocks belong to a sequence,
and in which order, stands in its block table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.errors import MinillmError

KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST_AMAX = 1e-20  # the least that is divided by


class KVPool:
    """k and v [L, num_blocks + 1, block_size, K, d]; block 0 is never written and stays zero: padding reads it.

    Quantised ("int8" or "fp8"), k_scale and v_scale [L, num_blocks + 1, block_size, K] fp32 hold a scale for each token
    and head, value = stored * scale; otherwise they are None.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, kv_dtype: str = "auto",
        device: str | torch.device = "cpu",
    ):  # fmt: skip
        if kv_dtype != "auto" and kv_dtype not in KV_DTYPES:
            raise MinillmError(f"kv_cache_dtype {kv_dtype!r} is not known; use auto, {', '.join(KV_DTYPES)}")
        self.num_blocks, self.block_size, self.dtype = num_blocks, block_size, dtype
        shape = (config.num_layers, num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
        stored = KV_DTYPES.get(kv_dtype, dtype)
        self.k, self.v = (torch.zeros(shape, dtype=stored, device=device) for _ in range(2))
        self.k_scale: Tensor | None = None
        self.v_scale: Tensor | None = None
        if kv_dtype != "auto":
            self.k_scale, self.v_scale = (torch.zeros(shape[:-1], dtype=torch.float32, device=device) for _ in range(2))

    @property
    def quantized(self) -> bool:
        return self.k_scale is not None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.k, self.v, self.k_scale, self.v_scale) if t is not None)


def block_bytes(config: ModelConfig, block_size: int, itemsize: int, kv_dtype: str = "auto") -> int:
    """Bytes of one block over all layers: 2 L block_size K (d b), or with scales 2 L block_size K (d + 4)."""
    each = config.head_dim * itemsize if kv_dtype == "auto" else config.head_dim + 4
    return 2 * config.num_layers * block_size * config.num_kv_heads * each


def quantize_kv(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(stored, scale) of finite values, one scale a vector. x [..., d] -> [..., d] in dtype and [...] fp32.

    The scale is the largest entry over the largest number of the format, so nothing is cut off and nothing is
    calibrated; a vector of zeros keeps a tiny scale and stays zeros. The kernels that write a pool store the same bits.
    Raises MinillmError for another dtype.
    """
    if dtype not in LARGEST:
        name = str(dtype).removeprefix("torch.")
        raise MinillmError(f"a quantised pool must be int8 or float8_e4m3fn, got {name}")
    x = x.float()
    amax = x.abs().amax(-1).clamp_min(SMALLEST_AMAX)
    step = torch.full_like(amax, LARGEST[dtype]) / amax  # torch takes number / tensor as number * reciprocal
    stored = x * step.unsqueeze(-1)
    if dtype == torch.int8:
        stored = torch.floor(stored + 0.5)
    return stored.to(dtype), amax / LARGEST[dtype]


def dequantize_kv(stored: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """stored [..., d] * scale [...], multiplied in fp32, in dtype (fp64 for an oracle)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (stored.to(wide) * scale.to(wide).unsqueeze(-1)).to(dtype)
