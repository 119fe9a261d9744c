"""Attention over a paged KV cache by the kernels of lessons 04 to 06: nothing is gathered, blocks are read in place.

A step in which every sequence has one new token goes to the decode kernel. Any other step, a prompt, a chunk of one, or
chunks mixed with decode tokens, goes to the prefill kernel. On a CPU both run in Triton's interpreter: right, and slow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.attention.paged import block_table, check_table, write_slots
from minillm.attention.protocol import Batch
from minillm.cache.pool import KVPool
from minillm.device import expect_triton
from minillm.errors import MinillmError
from minillm.models.transformer import TorchOps

_INSTEAD = "attention_backend='torch'"


@dataclass
class TritonPlan:
    """What the kernels are told. All tensors are on the device and may be the fixed buffers of a captured graph."""

    slots: Tensor  # [N] int64, -1 is padding
    block_tables: Tensor  # [B, max_blocks] int32
    context_lens: Tensor  # [B] int32, the new tokens included; 0 is a padding row
    max_context: int  # sets the number of splits, so it may exceed the longest context
    prefill: tuple[Tensor, Tensor, int] | None = None  # cu_seqlens [B + 1], history_lens [B] int32, longest num_new


class TritonAttention:
    """The kernels, one a method. `rope_write` is fused, so `write` is there for keys that are already rotated."""

    def __init__(self, pool: KVPool):
        """Raises MinillmError for what the kernels would refuse at the first step: a head_dim, fp8 on an old GPU."""
        expect_triton(_INSTEAD)
        from minillm.kernels.flash_prefill import HEAD_DIMS, flash_prefill
        from minillm.kernels.kv_quant import expect_pool_dtype
        from minillm.kernels.paged_decode import paged_decode
        from minillm.kernels.rope_kv import rope_kv_write

        if (d := pool.k.shape[-1]) not in HEAD_DIMS:
            *most, last = HEAD_DIMS
            raise MinillmError(
                f"the kernels run head_dim {', '.join(map(str, most))} or {last}, this model has {d}; use {_INSTEAD}"
            )
        if pool.quantized:
            expect_pool_dtype(pool.k.dtype, pool.k.device)
        self.pool = pool
        self._prefill, self._decode, self._rope_write = flash_prefill, paged_decode, rope_kv_write
        self._new: tuple[Tensor, Tensor] | None = None  # keys and values of this layer's new tokens

    def plan(self, batch: Batch) -> TritonPlan:
        device, bs = batch.token_ids.device, self.pool.block_size
        for row in batch.rows:
            check_table(row, bs)
        # Of the new tokens alone: the slots of all that is visible would take the host as long as a small step.
        new = [row.blocks[p // bs] * bs + p % bs for row in batch.rows for p in range(row.start, row.context)]
        table = block_table(batch.rows, device, torch.int32)
        whole = lambda numbers: torch.tensor(numbers, dtype=torch.int32).to(device)
        counts = [row.num_new for row in batch.rows]
        prefill = None
        if any(n != 1 for n in counts):
            ends = [0]
            for n in counts:
                ends.append(ends[-1] + n)
            prefill = (whole(ends), whole([row.start for row in batch.rows]), max(counts))
        contexts = [row.context for row in batch.rows]
        return TritonPlan(torch.tensor(new).to(device), table, whole(contexts), max(contexts), prefill)

    def rope_write(
        self, layer: int, qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, plan: TritonPlan
    ) -> Tensor:
        """Rotate queries and keys and write keys and values into their slots, in one pass. Returns q [N, H, d]."""
        K = self.pool.k.shape[3]
        heads = qkv.shape[1] - 2 * K
        q, k = self._rope_write(
            qkv, cos, sin, positions, plan.slots, *self._layer(layer)[:2], heads, *self._layer(layer)[2:]
        )
        self._new = k, qkv[:, heads + K :]
        return q

    def write(self, layer: int, k: Tensor, v: Tensor, plan: TritonPlan) -> None:
        write_slots(self.pool, layer, k, v, plan.slots)
        self._new = k, v

    def forward(self, layer: int, q: Tensor, plan: TritonPlan) -> Tensor:
        k_pool, v_pool, k_scale, v_scale = self._layer(layer)
        if plan.prefill is None:
            out, _ = self._decode(
                q, k_pool, v_pool, plan.block_tables, plan.context_lens, plan.max_context,
                k_scale=k_scale, v_scale=v_scale,
            )  # fmt: skip
            return out
        assert self._new is not None, "rope_write or write comes first"
        cu_seqlens, history, longest = plan.prefill
        return self._prefill(
            q, *self._new, k_pool, v_pool, plan.block_tables, cu_seqlens, history, longest,
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip

    def _layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        p = self.pool
        if p.k_scale is None or p.v_scale is None:
            return p.k[layer], p.v[layer], None, None
        return p.k[layer], p.v[layer], p.k_scale[layer], p.v_scale[layer]


class TritonOps(TorchOps):
    """The operators between matrix products, fused (lesson 04). Rows of a view with gaps between them are fine."""

    def __init__(self) -> None:
        expect_triton(_INSTEAD)
        from minillm.kernels.rms_norm import add_rms_norm, rms_norm
        from minillm.kernels.swiglu import swiglu

        self._rms_norm = rms_norm
        self.add_rms_norm, self.swiglu = add_rms_norm, swiglu  # type: ignore[method-assign]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)
