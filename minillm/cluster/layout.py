"""How KV lies in an engine's pool, and which layouts can be turned into each other. Lesson 15.

On the wire KV is token-wise and has all heads: pieces [count, K, d] of one layer. So block size and tensor-parallel
degree may differ between two engines: the sender joins heads and leaves blocks, the receiver splits heads and fills
blocks of its own. Other numbers stand for something else, and are refused in words: another model's KV, or numbers of
another dtype, whose conversion would give other tokens than either engine computes alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from minillm.cache.pool import KV_DTYPES
from minillm.config import DTYPES
from minillm.errors import MinillmError

MAX_NUMBER = 1 << 30  # of layers, heads, tokens in a block: a larger one in a message is a mistake


@dataclass(frozen=True, slots=True)
class KVLayout:
    """num_kv_heads are those of the model, not of one rank.

    dtype ("float32", "bfloat16", "float16") is what the engine computes in; kv_dtype "auto" stores the same, "int8" and
    "fp8" store quantised numbers with scales. model is `cache.namespace.engine_namespace`, or any text that two engines
    have in common exactly if the same tokens give the same KV.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    kv_dtype: str
    block_size: int
    tp_size: int
    model: str

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "tp_size"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MAX_NUMBER:
                raise MinillmError(f"a KV layout's {name} is a whole number, at least 1, got {value!r:.80}")
        if self.dtype not in DTYPES:
            raise MinillmError(f"a KV layout's dtype is one of {', '.join(DTYPES)}, got {self.dtype!r:.80}")
        if self.kv_dtype not in ("auto", *KV_DTYPES):
            raise MinillmError(
                f"a KV layout's kv_dtype is one of auto, {', '.join(KV_DTYPES)}, got {self.kv_dtype!r:.80}"
            )
        if not isinstance(self.model, str):
            raise MinillmError(f"a KV layout's model is a text, got {self.model!r:.80}")
        if self.num_kv_heads % self.tp_size and self.tp_size % self.num_kv_heads:
            raise MinillmError(
                f"{self.num_kv_heads} KV heads cannot be shared by {self.tp_size} ranks: one must divide the other"
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, said: Any) -> KVLayout:
        """Of what another process says. Raises MinillmError with what is missing, unknown or impossible."""
        names = {f.name for f in fields(cls)}
        if not isinstance(said, Mapping) or set(said) != names:
            got = ", ".join(sorted(map(str, said))) if isinstance(said, Mapping) else type(said).__name__
            raise MinillmError(f"a KV layout has {', '.join(sorted(names))}; got {got:.200}")
        return cls(**said)

    @property
    def piece(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """dtype and shape, without the first dimension (tokens), of each tensor of a piece: k, v, k_scale, v_scale.

        fp8 travels as the bytes it is stored in (uint8).
        """
        stored = {"auto": getattr(torch, self.dtype), "int8": torch.int8, "fp8": torch.uint8}[self.kv_dtype]
        held: list[tuple[torch.dtype, tuple[int, ...]]] = [(stored, (self.num_kv_heads, self.head_dim))] * 2
        return held + ([] if self.kv_dtype == "auto" else [(torch.float32, (self.num_kv_heads,))] * 2)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, on the wire."""
        return self.num_layers * sum(d.itemsize * torch.Size(shape).numel() for d, shape in self.piece)


_DIFFERENT = {
    "model": "another model, or the same one with other weights, tokenizer, template, quantisation or attention",
    "num_layers": "another number of layers",
    "num_kv_heads": "another number of KV heads",
    "head_dim": "another head size",
    "dtype": "numbers of another dtype, and converted ones would give other tokens",
    "kv_dtype": "a KV cache of another dtype, and converted numbers would give other tokens",
}


def why_not(source: KVLayout, target: KVLayout) -> str | None:
    """Why KV of `source` cannot be used by `target`, for a person; None if it can, as it is or laid out anew."""
    for name in ("num_layers", "num_kv_heads", "head_dim", "dtype", "kv_dtype", "model"):  # the plainest reason first
        mine, theirs = getattr(source, name), getattr(target, name)
        if mine != theirs:
            return f"the KV comes from {_DIFFERENT[name]}: {name} {mine!s:.16} there, {theirs!s:.16} here"
    return None


def to_token_pieces(blocks: Sequence[Sequence[Tensor]], num_tokens: int) -> list[list[Tensor]]:
    """Whole blocks as pieces: by layer, the tensors of tokens 0 to num_tokens - 1, [num_tokens, K, ...]; new.

    blocks: of `KVPool.read_blocks`, in the order of the sequence; each tensor [L, block_size, K, ...].
    """
    held = sum(block[0].shape[1] for block in blocks)
    if not 0 < num_tokens <= held:
        raise MinillmError(f"{len(blocks)} blocks hold 1 to {held} tokens, asked for {num_tokens}")
    joined = [torch.cat(list(parts), 1)[:, :num_tokens] for parts in zip(*blocks, strict=True)]
    return [[t[layer].clone() for t in joined] for layer in range(joined[0].shape[0])]


def blocks_from_pieces(pieces: Sequence[Sequence[Tensor]], block_size: int) -> list[list[Tensor]]:
    """`to_token_pieces` undone, into blocks of any size: for `KVPool.write_blocks`. The last one ends in zeros."""
    if not pieces or len({(len(p), *(t.shape[0] for t in p)) for p in pieces}) != 1 or not pieces[0]:
        raise MinillmError("every layer has a piece with as many tensors and tokens as the others")
    stacked = [torch.stack(list(layers)) for layers in zip(*pieces, strict=True)]  # [L, tokens, K, ...]
    num_tokens = stacked[0].shape[1]
    count = -(-num_tokens // block_size)
    blocks = []
    for i in range(count):
        block = []
        for t in stacked:
            part = t[:, i * block_size : (i + 1) * block_size]
            whole = t.new_zeros(t.shape[0], block_size, *t.shape[2:])
            whole[:, : part.shape[1]] = part
            block.append(whole)
        blocks.append(block)
    return blocks
