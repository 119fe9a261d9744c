"""The memory of a paged KV cache: blocks of tokens, reserved once. Lesson 06 builds it, lesson 08 quantises it.

The memory of a token in a layer is one slot: `slot = block * block_size + offset`. Which blocks belong to a sequence,
and in which order, stands in its block table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.errors import MinillmError

KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
ALIGNED = 64  # bytes: where torch's own CPU tensors begin
SMALLEST_AMAX = 1e-20  # the least that is divided by
BlockLayout = tuple[tuple[torch.dtype, tuple[int, ...]], ...]  # dtype and shape of each tensor of one block


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
        self.k, self.v = (_zeros(shape, stored, device) for _ in range(2))
        self.k_scale: Tensor | None = None
        self.v_scale: Tensor | None = None
        if kv_dtype != "auto":
            self.k_scale, self.v_scale = (torch.zeros(shape[:-1], dtype=torch.float32, device=device) for _ in range(2))

    @property
    def quantized(self) -> bool:
        return self.k_scale is not None

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._stored)

    @property
    def _stored(self) -> list[Tensor]:
        """k, v and the scales there are. fp8 as raw bytes: torch copies it, but cannot scatter it."""
        held = [t for t in (self.k, self.v, self.k_scale, self.v_scale) if t is not None]
        return [t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in held]

    @property
    def block_layout(self) -> BlockLayout:
        """dtype and shape of each tensor of a block's payload."""
        return tuple((t.dtype, (t.shape[0], *t.shape[2:])) for t in self._stored)

    def read_block(self, i: int) -> list[Tensor]:
        """Block i over all layers, to the bit: k, v and the scales there are, new CPU tensors (see `block_layout`)."""
        return self.read_blocks([i])[0]

    def write_block(self, i: int, payload: Sequence[Tensor]) -> None:
        """Put back what `read_block` gave, into any block. MinillmError, and nothing written, if it does not fit."""
        self.write_blocks([i], [payload])

    def read_blocks(self, ids: Sequence[int]) -> list[list[Tensor]]:
        """`read_block` of each. From a GPU in one gather and one copy for each of the pool's tensors."""
        self._check_ids(ids)
        if not self.k.is_cuda or not ids:
            return [[t[:, i].clone(memory_format=torch.contiguous_format) for t in self._stored] for i in ids]
        index = torch.tensor(ids, dtype=torch.long, device=self.k.device)
        taken = []
        for t in self._stored:
            blocks = t.index_select(1, index).transpose(0, 1).contiguous()
            # Page-locked, since the link is slower to any other memory. Torch keeps and reuses it, so what leaves here
            # is copied once more: a payload in it would lock memory for as long as a tier holds it.
            taken.append(torch.empty(blocks.shape, dtype=t.dtype, pin_memory=True).copy_(blocks))
        return [[t[n].clone() for t in taken] for n in range(len(ids))]

    @torch.inference_mode()
    def write_blocks(self, ids: Sequence[int], payloads: Sequence[Sequence[Tensor]]) -> None:
        """`write_block` of each, all or nothing. To a GPU in one copy and one scatter for each of its tensors."""
        self._check_ids(ids)
        if len(ids) != len(payloads) or len(set(ids)) != len(ids):
            raise MinillmError(f"{len(payloads)} payloads for the blocks {list(ids)!r:.80}: each block needs its own")
        for payload in payloads:
            if (given := tuple((t.dtype, tuple(t.shape)) for t in payload)) != self.block_layout:
                raise MinillmError(f"this is no block of this pool: {given}, the pool has {self.block_layout}")
        if not self.k.is_cuda or not ids:
            for i, payload in zip(ids, payloads, strict=True):
                for t, part in zip(self._stored, payload, strict=True):
                    t[:, i] = part
            return
        index = torch.tensor(ids, dtype=torch.long, device=self.k.device)
        for t, parts in zip(self._stored, zip(*payloads, strict=True), strict=True):
            shape = (t.shape[0], len(ids), *t.shape[2:])
            staged = torch.stack(parts, 1, out=torch.empty(shape, dtype=t.dtype, pin_memory=True))
            t.index_copy_(1, index, staged.to(t.device, non_blocking=True))

    def read_tokens(self, layer: int, ids: Sequence[int], start: int, count: int) -> list[Tensor]:
        """Tokens start to start + count - 1 of one layer of a sequence, to the bit; new CPU tensors.

        ids: its block table. k and v [count, K, d], and [count, K] of the scales there are. Waits for a GPU.
        """
        slots = self._slots(layer, ids, start, count)
        return [t[layer].flatten(0, 1).index_select(0, slots).cpu() for t in self._stored]

    @torch.inference_mode()
    def write_tokens(self, layer: int, ids: Sequence[int], start: int, tensors: Sequence[Tensor]) -> None:
        """Put what `read_tokens` gave into a block table's. MinillmError, and nothing written, if it does not fit."""
        count = tensors[0].shape[0] if tensors and tensors[0].dim() else 0
        slots = self._slots(layer, ids, start, count)
        expected = tuple((t.dtype, (count, *t.shape[3:])) for t in self._stored)
        if (given := tuple((t.dtype, tuple(t.shape)) for t in tensors)) != expected:
            raise MinillmError(f"these are no tokens of this pool: {given}, {count} of them are {expected}")
        for t, part in zip(self._stored, tensors, strict=True):
            t[layer].view(-1, *t.shape[3:]).index_copy_(0, slots, part.to(t.device))

    def _slots(self, layer: int, ids: Sequence[int], start: int, count: int) -> Tensor:
        """Where the tokens of a block table lie in a layer, int64 [count]."""
        if not 0 <= layer < self.k.shape[0]:
            raise MinillmError(f"layers are 0 to {self.k.shape[0] - 1}, got {layer}")
        if start < 0 or count < 0 or start + count > len(ids) * self.block_size:
            held = f"{len(ids)} blocks of {self.block_size}"
            raise MinillmError(f"{held} hold tokens 0 to {len(ids) * self.block_size - 1}, got {count} from {start}")
        first, end = start // self.block_size, -(-(start + count) // self.block_size)
        self._check_ids(used := ids[first:end])
        if len(set(used)) != len(used):
            raise MinillmError(f"a block table names each block once, got {list(used)!r:.80}")
        at = torch.arange(start, start + count)
        table = torch.tensor(list(used) or [0], dtype=torch.long)
        slots = table[at // self.block_size - first] * self.block_size + at % self.block_size
        return slots.to(self.k.device)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not all(1 <= i <= self.num_blocks for i in ids):
            raise MinillmError(f"blocks are 1 to {self.num_blocks} (0 is padding), got {list(ids)!r:.80}")


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """torch.zeros, but on a CPU of pages that the system gives when they are first written: what nobody uses costs
    nothing, and an engine starts at once."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(nbytes + ALIGNED, dtype=np.uint8)  # calloc
    start = -memory.ctypes.data % ALIGNED
    return torch.from_numpy(memory[start : start + nbytes]).view(dtype).view(*shape)


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
