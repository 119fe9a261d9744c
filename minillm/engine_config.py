"""`EngineConfig`: what a user may choose about how an engine runs. Every lesson adds its options here.

An option that is accepted is honoured. One that this engine would ignore is refused, in words (rule 9 of
docs/source.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from minillm.config import dtype_name, positive_whole
from minillm.errors import MinillmError

BLOCK_SIZES = (16, 32, 64, 128, 256)
CHOICES: dict[str, tuple[str | None, ...]] = {
    "kv_cache": ("paged", "contiguous", "none"),
    "attention_backend": ("auto", "reference", "torch", "triton"),
    "quantization": (None, "int8", "int4"),
    "kv_cache_dtype": ("auto", "int8", "fp8"),
    "batching": ("auto", "continuous", "static"),
    "prefix_cache": ("radix", "hash"),
    "scheduling_policy": ("fcfs", "priority", "deadline"),
    "preemption_mode": ("auto", "recompute", "swap"),
}
FLAGS = ("enforce_eager", "enable_chunked_prefill", "enable_prefix_caching", "batch_invariant", "compile")
WHOLE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "engines_on_device",
)  # positive whole numbers
OPTIONAL_WHOLE = ("max_model_len", "threads", "num_kv_blocks", "kv_cache_memory_bytes")  # or None
BYTES = ("kv_host_bytes", "kv_disk_bytes")  # whole numbers, 0 is none
MAX_THREADS = 1024  # torch dies in its thread pool on absurd numbers
PAGED_ONLY = (
    "attention_backend", "block_size", "num_kv_blocks", "kv_cache_memory_bytes", "kv_cache_dtype", "enforce_eager",
    "enable_prefix_caching", "engines_on_device",
    "kv_host_bytes", "kv_disk_bytes", "batch_invariant",
)  # fmt: skip
# Options of a part of the engine that is not there unless asked for: name -> who reads it.
PREFIX_ONLY = ("prefix_cache", "cache_floors", "public_prefixes")
CONTINUOUS_ONLY = (
    "enable_chunked_prefill", "enable_prefix_caching", "scheduling_policy", "watermark", "preemption_mode",
    "kv_host_bytes", "kv_disk_bytes", "max_num_batched_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs.

    dtype          "auto" (the checkpoint's, or fp32 on a CPU without bf16 instructions), or one of DTYPES
    device         "auto" (cuda if there is one, else cpu), "cpu", "cuda", "cuda:1" ...
    kv_cache       "paged": blocks of tokens, through a block table (lesson 06); "contiguous": a row a sequence
                   (lesson 02); or "none": recompute every token at every step (lesson 01)
    attention_backend  of a paged cache: "reference" (plain torch, fp32 inside), "torch" (the fast path of a CPU),
                   "triton" (the kernels; interpreted, so slow, on a CPU); "auto" is triton on a GPU
                   where its kernels run this model, else torch
    block_size     tokens a block of a paged cache holds: 16 to 256, a power of two
    num_kv_blocks  blocks of a paged cache; None takes what max_num_seqs longest sequences need, if half of the free
                   memory holds that, and on a CPU at most 4 GiB (or one longest sequence)
    kv_cache_memory_bytes  the same in bytes: as many blocks as they hold; give one of the two
    engines_on_device  engines like this one, itself among them, that divide the device's memory where nobody said how
                   much of it is for KV (`minillm serve --split` sets it)
    quantization   of the weights (lesson 08): None, "int8" (a scale an output) or "int4" (a scale a group of inputs)
    kv_cache_dtype  of a paged cache: "auto" (the model's dtype), "int8" or "fp8", with a scale a token and head
    enforce_eager  never capture CUDA graphs (lesson 07); an engine of several processes captures none anyway
    max_model_len  most tokens of prompt and output together; None takes the model's limit
    max_num_seqs   most sequences that run together
    seed           seeds requests that bring none
    threads        CPU threads for torch; None leaves torch's choice

    batching       "continuous": requests join and leave at every step (lesson 09); "static": groups start and end
                   together; "auto" is continuous for a paged cache, static for the others, which can do no other
    max_num_batched_tokens  most tokens a step computes: the token budget (lesson 10)
    enable_chunked_prefill  a prompt may be computed in parts, beside others' decode steps; without, whole and alone
    enable_prefix_caching  keep the KV of finished requests for later ones that begin alike (lesson 11). Off unless
                   asked for: whoever measures a prompt twice here wants it computed twice
    prefix_cache   "radix" (a tree) or "hash" (a table of chained hashes)
    cache_floors   tenant -> cached blocks that other tenants cannot evict; a number with a point, below 1, is a share
                   of all blocks
    public_prefixes  token ids or texts of prompts' beginnings that all tenants may share; nothing else is shared. A
                   text is tokenised as a prompt is: to match a chat, write it as the chat template does
    scheduling_policy  "fcfs", "priority" (smaller first, ageing) or "deadline" (earliest first)
    priority_ageing_s  seconds of waiting that make up for one step of priority
    watermark      share of the blocks that admission leaves free, so that running requests can grow
    preemption_mode  of a request that loses its blocks (lesson 12): "recompute", "swap" to a tier, or "auto":
                   whichever the cost model predicts cheaper
    kv_host_bytes, kv_disk_bytes, kv_disk_path  room for evicted and swapped blocks in host memory and on disk; 0 is
                   none, and the path is a folder
    batch_invariant  a request's logits do not depend, to the bit, on what runs beside it; slower (lesson 09)
    tensor_parallel_size, pipeline_parallel_size  processes that share each layer, and stages of layers one after the
                   other (lesson 14): as many processes as their product, this one among them. threads, and
                   kv_cache_memory_bytes, are then each process's
    compile        on a CPU: compile the operators between the matrix products when the model is loaded, which takes
                   some seconds and a C++ compiler (lesson 09)
    """

    dtype: str = "auto"
    device: str = "auto"
    kv_cache: str = "paged"
    attention_backend: str = "auto"
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    enforce_eager: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 32
    seed: int = 0
    threads: int | None = None
    batching: str = "auto"
    max_num_batched_tokens: int = 512
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = False
    prefix_cache: str = "radix"
    cache_floors: Mapping[str, int | float] = field(default_factory=dict)
    public_prefixes: Sequence[Any] = ()
    scheduling_policy: str = "fcfs"
    priority_ageing_s: float = 10.0
    watermark: float = 0.01
    preemption_mode: str = "auto"
    kv_host_bytes: int = 0
    kv_disk_bytes: int = 0
    kv_disk_path: str | None = None
    batch_invariant: bool = False
    compile: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    engines_on_device: int = 1

    def __post_init__(self) -> None:
        if self.dtype != "auto":
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
        for name, choices in CHOICES.items():
            if not isinstance(getattr(self, name), str | None) or getattr(self, name) not in choices:
                known = ", ".join(repr(c) for c in choices)
                raise MinillmError(f"{name} {getattr(self, name)!r} is not known; use one of {known}")
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise MinillmError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.block_size, int) or self.block_size not in BLOCK_SIZES:
            raise MinillmError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {self.block_size!r}")
        for name in (*WHOLE, *OPTIONAL_WHOLE):
            value = getattr(self, name)
            if value is not None or name in WHOLE:
                positive_whole(name, value)
        for name in BYTES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise MinillmError(f"{name} must be a whole number of bytes, 0 for none, got {value!r}")
        _share("watermark", self.watermark)
        _seconds("priority_ageing_s", self.priority_ageing_s)
        if self.threads is not None and self.threads > MAX_THREADS:
            raise MinillmError(f"threads must be at most {MAX_THREADS}, got {self.threads}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**63:
            raise MinillmError(f"seed must be a whole number from 0 to 2**63-1, got {self.seed!r}")
        if self.num_kv_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise MinillmError("num_kv_blocks and kv_cache_memory_bytes say the same in two ways; give one of the two")
        if self.engines_on_device > 1 and (self.num_kv_blocks or self.kv_cache_memory_bytes):
            raise MinillmError(
                "engines_on_device divides the memory that nobody asked for; with num_kv_blocks or "
                "kv_cache_memory_bytes it would be ignored"
            )
        self._check_floors()
        self._check_public()
        if self.kv_disk_path is not None and (not isinstance(self.kv_disk_path, str) or not self.kv_disk_path):
            raise MinillmError(f"kv_disk_path must be the path of a folder, as text, got {self.kv_disk_path!r:.80}")
        self._refuse_ignored()

    def _check_floors(self) -> None:
        if not isinstance(self.cache_floors, Mapping):
            raise MinillmError(f"cache_floors must be {{tenant: blocks}}, got {self.cache_floors!r:.80}")
        for tenant, blocks in self.cache_floors.items():
            whole = isinstance(blocks, int) and not isinstance(blocks, bool) and blocks >= 0
            share = isinstance(blocks, float) and 0 <= blocks < 1
            if not isinstance(tenant, str) or not (whole or share):
                raise MinillmError(
                    f"cache_floors must map a tenant's name to blocks or a share below 1, got {tenant!r}: {blocks!r}"
                )

    def _check_public(self) -> None:
        listed = isinstance(self.public_prefixes, Sequence) and not isinstance(self.public_prefixes, str | bytes)
        entries: Sequence[Any] = self.public_prefixes if listed else [None]
        for entry in entries:
            if isinstance(entry, bytes) or not isinstance(entry, Sequence):
                what = entry if listed else self.public_prefixes
                raise MinillmError(
                    f"public_prefixes must be a list of texts or of lists of token ids, got {what!r:.80}"
                )

    def _refuse_ignored(self) -> None:
        """Options that nothing in this engine would read."""
        self._unread(PAGED_ONLY, self.kv_cache == "paged", "kv_cache='paged'", repr(self.kv_cache))
        if self.batching == "continuous" and self.kv_cache != "paged":
            raise MinillmError(
                f"batching='continuous' needs kv_cache='paged', since requests join at any step; got {self.kv_cache!r}"
            )
        self._unread(CONTINUOUS_ONLY, self.continuous, "batching='continuous'", "static groups")
        self._unread(PREFIX_ONLY, self.enable_prefix_caching, "enable_prefix_caching=True", "no prefix cache")
        self._unread(("priority_ageing_s",), self.scheduling_policy == "priority", "scheduling_policy='priority'",
                     f"scheduling_policy={self.scheduling_policy!r}")  # fmt: skip
        tiers = bool(self.kv_host_bytes or self.kv_disk_bytes)
        if self.preemption_mode == "swap" and not tiers:
            raise MinillmError("preemption_mode='swap' needs a place to swap to: set kv_host_bytes or kv_disk_bytes")
        if bool(self.kv_disk_bytes) != (self.kv_disk_path is not None):
            raise MinillmError("kv_disk_bytes and kv_disk_path belong together: a folder, and how much it may hold")
        if tiers and self.preemption_mode == "recompute" and not self.enable_prefix_caching:
            raise MinillmError(
                "kv_host_bytes and kv_disk_bytes hold what is evicted from a prefix cache or swapped out; with "
                "preemption_mode='recompute' and no prefix cache nothing is: leave them at 0"
            )
        if self.batch_invariant and self.attention_backend != "auto":
            raise MinillmError("batch_invariant has an attention of its own; leave attention_backend at 'auto'")
        if self.batch_invariant and self.compile:
            raise MinillmError("batch_invariant has operators of its own; compile=True would be ignored with it")

        if self.world_size > 1 and not self.continuous:
            raise MinillmError(
                f"tensor_parallel_size {self.tensor_parallel_size} and pipeline_parallel_size "
                f"{self.pipeline_parallel_size} need kv_cache='paged' and batching='continuous'"
            )
        if self.world_size > 1 and self.batch_invariant:
            raise MinillmError("batch_invariant: a sum over ranks depends on how many there are; leave one of the two")

    @property
    def world_size(self) -> int:
        """Processes of this engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def _unread(self, names: Sequence[str], read: bool, owner: str, here: str) -> None:
        for f in fields(self):
            default = f.default if f.default_factory is MISSING else f.default_factory()
            value = getattr(self, f.name)
            if f.name in names and not read and value != default and (value or default):
                raise MinillmError(f"{f.name} belongs to {owner}; with {here} it would be ignored")

    @property
    def continuous(self) -> bool:
        return self.batching == "continuous" or (self.batching == "auto" and self.kv_cache == "paged")

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))


def _share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise MinillmError(f"{name} must be at least 0 and below 1, got {value!r}")


def _seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise MinillmError(f"{name} must be a number of seconds above 0, got {value!r}")
