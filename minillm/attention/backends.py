"""The attention backends of a paged cache, by name, and the cache itself as an engine's options ask for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minillm.attention.paged import PagedReference, PagedSDPA
from minillm.attention.protocol import AttentionBackend
from minillm.attention.triton import TritonAttention, TritonOps
from minillm.cache.paged import PagedCache
from minillm.cache.pool import KVPool, block_bytes
from minillm.config import EngineConfig
from minillm.device import free_memory
from minillm.errors import MinillmError
from minillm.models.transformer import Transformer
from minillm.parts import OwnAttention, make_part


def make_paged_cache(model: Transformer, config: EngineConfig, make_allocator: Callable[[int], Any]) -> PagedCache:
    """What `max_num_seqs` longest sequences need, at most half of the free memory; or `num_kv_blocks`, as asked."""
    each = block_bytes(model.config, config.block_size, model.dtype.itemsize, config.kv_cache_dtype)
    fits = free_memory(model.device) // 2 // each
    wanted = config.max_num_seqs * -(-model.max_len // config.block_size)
    blocks = config.num_kv_blocks or min(wanted, fits)
    if not 1 <= blocks <= 2 * fits:
        raise MinillmError(
            f"{max(blocks, 1)} blocks of KV cache take {max(blocks, 1) * each / 1e9:.2f} GB, and "
            f"{2 * fits * each / 1e9:.2f} GB are free; lower num_kv_blocks, max_model_len or max_num_seqs"
        )
    pool = KVPool(model.config, blocks, config.block_size, model.dtype, config.kv_cache_dtype, model.device)
    return PagedCache(pool, make_allocator)


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
