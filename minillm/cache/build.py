"""The paged cache of an engine as its options ask for it: memory, allocator, prefix cache, tiers, cost model."""

from __future__ import annotations

import hashlib
import numbers
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minillm.attention.protocol import AttentionBackend
from minillm.cache.blocks import BlockAllocator
from minillm.cache.eviction import LRU
from minillm.cache.paged import PagedCache
from minillm.cache.pool import KVPool, block_bytes
from minillm.cache.prefix import PrefixCache, PublicPrefixes, RadixPrefixCache, engine_namespace
from minillm.cache.prefix_hash import HashPrefixCache
from minillm.cache.tiers import DiskTier, HostTier, Tiers
from minillm.config import ModelConfig, dtype_name
from minillm.device import free_memory
from minillm.engine_config import EngineConfig
from minillm.errors import MinillmError
from minillm.events import EventLog
from minillm.models.tokenizer import Tokenizer
from minillm.models.transformer import Transformer
from minillm.parts import OwnAttention, make_part

if TYPE_CHECKING:
    from minillm.parallel.pool import ShardedPool
    from minillm.parallel.ranks import Ranks


CPU_BYTES = 4 << 30  # vLLM's default on a CPU, too


def make_pool(model: Transformer, config: EngineConfig, ranks: Ranks | None = None) -> KVPool:
    """What `max_num_seqs` longest sequences need, at most half of the free memory, or of this engine's part of it where
    `engines_on_device` share it; or what was asked for.

    A CPU's memory is everybody's: there it is at most CPU_BYTES, or one longest sequence, unless it was asked for.

    ranks: this rank's part of a pool that has as many blocks everywhere, the fewest that any of them can hold.
    """
    each = block_bytes(model.config, config.block_size, model.dtype.itemsize, config.kv_cache_dtype)
    mates = ranks.place.world if ranks is not None and model.device.type == "cpu" else 1  # ranks that share the memory
    most = free_memory(model.device) // mates // each
    fits = _part(model.device, config.engines_on_device) // mates // 2 // each
    longest = -(-model.max_len // config.block_size)
    wanted = config.max_num_seqs * longest
    if model.device.type == "cpu":
        wanted = min(wanted, max(CPU_BYTES // each, longest))
    if config.kv_cache_memory_bytes is not None and not config.kv_cache_memory_bytes // each:
        raise MinillmError(
            f"kv_cache_memory_bytes {config.kv_cache_memory_bytes:,} holds no block, which takes {each:,}; give more"
        )
    asked = config.num_kv_blocks or (config.kv_cache_memory_bytes or 0) // each
    blocks = asked or min(wanted, fits)
    if blocks > most:
        raise MinillmError(
            f"{blocks} blocks of KV cache take {blocks * each / 1e9:.2f} GB, and {most * each / 1e9:.2f} GB are free "
            f"beside the weights; lower {'num_kv_blocks' if config.num_kv_blocks else 'kv_cache_memory_bytes'}"
        )
    if blocks < 1:
        share = "half" if config.engines_on_device == 1 else f"the part of one of {config.engines_on_device} engines"
        raise MinillmError(
            f"no block of KV cache, of {each / 1e6:.2f} MB, fits in {share} of the memory that is free beside the "
            "weights; take a smaller model or quantized weights, end what else uses the memory, or "
            + ("say how much with kv_cache_memory_bytes" if config.engines_on_device == 1 else "give each a card")
        )
    if ranks is not None:
        blocks = ranks.least(blocks)
    return KVPool(model.config, blocks, config.block_size, model.dtype, config.kv_cache_dtype, model.device)


def _part(device: torch.device, engines: int) -> int:
    """Free bytes for one of so many engines, whose weights may be there or not: nobody waits for the others."""
    free = free_memory(device)
    if engines > 1 and device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        free = max(0, min(free, total - engines * torch.cuda.memory_allocated(device)))
    return free // engines


def make_paged_cache(
    pool: KVPool | ShardedPool, model: Transformer, tokenizer: Tokenizer, config: EngineConfig,
    parts: Mapping[str, Any], attention: AttentionBackend, events: EventLog, weights_id: str = "",
) -> PagedCache:  # fmt: skip
    """A pool, who owns its blocks, and what becomes of those that nobody owns any more."""
    tiers = make_tiers(config, pool)
    restore = None
    if tiers is not None:
        from minillm.roofline.restore import RestoreModel  # the roofline is loaded only where a choice needs it

        restore = RestoreModel.for_machine(
            model.config, model.device.type, dtype=dtype_name(model.dtype), block_size=config.block_size,
            block_bytes=block_bytes(model.config, config.block_size, model.dtype.itemsize, config.kv_cache_dtype),
            chunk=config.max_num_batched_tokens, weights_as=config.quantization,
        )  # fmt: skip
    public = None
    if config.public_prefixes:
        public = PublicPrefixes(public_tokens(config, tokenizer, model.config.vocab_size), config.block_size)
    prefix = make_prefix_cache(config, parts, pool.num_blocks)
    return PagedCache(
        pool, parts.get("allocator", BlockAllocator), prefix=prefix, tiers=tiers,
        restore=restore, preemption_mode=config.preemption_mode,
        namespace=make_namespace(model, tokenizer, config, attention, weights_id), public=public, events=events,
    )  # fmt: skip


def make_prefix_cache(config: EngineConfig, parts: Mapping[str, Any], num_blocks: int) -> PrefixCache | None:
    if not config.enable_prefix_caching:
        return None
    floors = {
        tenant: floor if isinstance(floor, int) else int(floor * num_blocks)
        for tenant, floor in config.cache_floors.items()
    }
    kept = sum(floors.values())
    if kept >= num_blocks:
        raise MinillmError(f"cache_floors keep {kept} blocks, and the cache has {num_blocks}; nobody could run")
    make = parts.get("prefix_cache", HashPrefixCache if config.prefix_cache == "hash" else RadixPrefixCache)
    what = "the block size, the floors and an eviction policy"
    cache: PrefixCache = make_part("prefix_cache", make, what, config.block_size, floors, parts.get("eviction", LRU()))
    return cache


def public_tokens(config: EngineConfig, tokenizer: Tokenizer, vocab: int) -> list[list[int]]:
    """`public_prefixes` as token ids. A text becomes what the same text as a prompt becomes."""
    lists: list[list[int]] = []
    for prefix in config.public_prefixes:
        given: Sequence[int] = tokenizer.encode(prefix) if isinstance(prefix, str) else prefix
        for t in given:
            if isinstance(t, bool) or not isinstance(t, numbers.Integral) or not 0 <= t < vocab:
                raise MinillmError(
                    f"public_prefixes: token id {t!r:.80} is not in the vocabulary, whole numbers from 0 to {vocab - 1}"
                )
        lists.append([int(t) for t in given])
    return lists


def make_tiers(config: EngineConfig, pool: KVPool | ShardedPool) -> Tiers | None:
    tiers: list[HostTier | DiskTier] = []
    if config.kv_host_bytes > (free := free_memory(torch.device("cpu"))):
        raise MinillmError(
            f"kv_host_bytes asks for {config.kv_host_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free; lower it"
        )
    if config.kv_host_bytes:
        tiers.append(HostTier(config.kv_host_bytes))
    if config.kv_disk_bytes and config.kv_disk_path is not None:
        tiers.append(DiskTier(config.kv_disk_path, config.kv_disk_bytes, layout=pool.block_layout))
    return Tiers(tiers) if tiers else None


def make_namespace(
    model: Transformer, tokenizer: Tokenizer, config: EngineConfig, attention: AttentionBackend, weights_id: str,
    whole: ModelConfig | None = None,
) -> str:  # fmt: skip
    """What must be the same for KV to mean the same (rule 6 of docs/source.md).

    whole: the config of a model of which this is perhaps a part. The name is then the same for any block size and any
    number of ranks, for who lays KV out anew (cluster/layout.py).

    KV that nobody could recognise again gets a name that nobody else has: that of weights without an id, and that of a
    learner's attention, whose next version may compute something else.
    """
    backend = tokenizer.backend
    spelled = backend.to_str() if hasattr(backend, "to_str") else str(tokenizer.folder)
    computed_by = type(attention).__name__
    if isinstance(attention, OwnAttention):
        computed_by = f"{type(attention.part).__qualname__} {uuid.uuid4()}"
    return engine_namespace(
        weights=weights_id or f"in memory {uuid.uuid4()}", dtype=dtype_name(model.dtype),
        quantization=config.quantization or "none", kv_dtype=config.kv_cache_dtype,
        tokenizer=_digest(spelled),
        template=_digest(tokenizer.chat_template or "none"),
        attention={
            "backend": computed_by, "operators": type(model.ops).__name__,
            "block_size": config.block_size if whole is None else "any",
            "mode": _invariance(config), "device": model.device.type, "torch": str(torch.__version__),
            "model": str(whole or model.config),
        },
    )  # fmt: skip


def _invariance(config: EngineConfig) -> str:
    """With batch_invariant, KV is the same to the bit as long as the thread count is."""
    return f"invariant at {torch.get_num_threads()} threads" if config.batch_invariant else "fast"


def weights_id(folder: Path, exact: bool) -> str:
    """What distinguishes these weights. exact: by content, for KV that outlives the process (it reads every byte)."""
    whole = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        stat = file.stat()
        whole.update(f"{file.name} {stat.st_size}\n".encode())
        if exact:
            with file.open("rb") as stream:
                whole.update(hashlib.file_digest(stream, "sha256").digest())
        else:
            whole.update(f"{file.resolve()} {stat.st_mtime_ns}\n".encode())
    return whole.hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
