"""The attention backends of a paged cache, by name."""

from __future__ import annotations

from typing import Any

import torch

from minillm.attention.paged import PagedReference, PagedSDPA
from minillm.attention.protocol import AttentionBackend
from minillm.attention.triton import TritonAttention, TritonOps
from minillm.cache.pool import KVPool
from minillm.errors import MinillmError
from minillm.models.transformer import Transformer
from minillm.parts import OwnAttention, make_part


def make_attention(name: str, model: Transformer, pool: KVPool, part: Any = None) -> AttentionBackend:
    """The backend of a paged cache, by name, or a learner's own. Triton brings its fused operators along."""
    if part is not None:
        if name != "auto":
            raise MinillmError(f"parts: attention takes the place of attention_backend={name!r}; give one of the two")
        return OwnAttention(make_part("attention", part, "the KVPool", pool), pool.k.shape[3])
    if name == "auto":
        try:
            return make_attention("triton" if model.device.type == "cuda" else "torch", model, pool)
        except MinillmError:  # no Triton, or a head_dim or fp8 pool that its kernels do not run on this GPU
            return PagedSDPA(pool)
    if name != "triton":
        return PagedReference(pool) if name == "reference" else PagedSDPA(pool)
    if model.device.type == "cpu" and model.dtype == torch.bfloat16:
        raise MinillmError(
            "attention_backend='triton' on a CPU runs in Triton's interpreter, which is wrong in bf16; "
            "use dtype='float32' or 'float16', or attention_backend='torch'"
        )
    attention, model.ops = TritonAttention(pool), TritonOps()
    return attention
