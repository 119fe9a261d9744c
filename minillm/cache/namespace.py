"""Who may read which cached block: the part of a prefix cache's key that is not tokens. Lesson 11 builds it.

The KV of a token depends on the model, on how it computes, and on every earlier token. Whether a request may use it
depends on whose it is, too: a hit is faster than a miss, so a hit on another tenant's block tells what that tenant
sent.
So the key is (engine, adapter, tenant, tokens). Only what an allow-list calls public is shared between tenants.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from minillm.errors import MinillmError

if TYPE_CHECKING:
    from minillm.request import Request

PUBLIC = None  # the scope of a block that every tenant may read; the scope of any other block is its tenant's name

ENGINE_PARTS = ("weights", "dtype", "quantization", "kv_dtype", "tokenizer", "template", "attention")


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides its tokens that a request's prefix must share with a cached one.

    engine         of `engine_namespace`: weights, dtype, quantization, kv dtype, tokenizer, template, attention
    tenant         whose request it is; "" is a tenant like any other
    adapter        name of the LoRA adapter; this engine has none, so it stays ""
    public_tokens  leading tokens that an allow-listed public prefix covers. Blocks wholly inside are shared by all
                   tenants; every later block is the tenant's own
    """

    engine: str
    tenant: str = ""
    adapter: str = ""
    public_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("engine", "tenant", "adapter"):
            if not isinstance(getattr(self, name), str):
                raise MinillmError(f"a namespace's {name} is a string, got {getattr(self, name)!r:.80}")
        if not isinstance(self.public_tokens, int) or isinstance(self.public_tokens, bool) or self.public_tokens < 0:
            raise MinillmError(f"public_tokens is a number of tokens, 0 or more, got {self.public_tokens!r:.80}")

    @property
    def model(self) -> tuple[str, str]:
        """What the numbers in a block depend on."""
        return self.engine, self.adapter

    def scope(self, index: int, block_size: int) -> str | None:
        """Who may read the prefix's block `index` (from 0): PUBLIC, or the tenant."""
        return PUBLIC if (index + 1) * block_size <= self.public_tokens else self.tenant

    def reader_key(self, end: int) -> bytes:
        """The same as bytes, for the block that ends before token `end`: with the block's whole prefix it names the
        block, to any tier. Two keys are equal exactly if model and scope are.
        """
        public = end <= self.public_tokens
        return json.dumps([self.engine, self.adapter, public, "" if public else self.tenant]).encode()


def engine_namespace(**parts: Any) -> str:
    """One name for all that an engine's KV depends on: SHA-256 over the parts, as 64 hexadecimal digits.

    weights, dtype, quantization, kv_dtype, tokenizer, template, attention: each a string, a number, or lists and dicts
    of them. None may be missing, for a part that is left out is a part that may change unnoticed.
    """
    missing = [name for name in ENGINE_PARTS if parts.get(name) in (None, "")]
    unknown = sorted(set(parts) - set(ENGINE_PARTS))
    if missing or unknown:
        raise MinillmError(
            f"engine_namespace needs {', '.join(ENGINE_PARTS)}; missing: {', '.join(missing) or 'nothing'}, "
            f"unknown: {', '.join(unknown) or 'nothing'}. Where an engine has none of a part, say 'none'"
        )
    try:
        text = json.dumps(parts, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise MinillmError(f"engine_namespace takes strings, numbers, lists and dicts: {error}") from None
    return hashlib.sha256(text.encode()).hexdigest()


class PublicPrefixes:
    """The allow-list: token prefixes that all tenants may share, such as the system prompt of a product.

    A request that goes another way half through a public prefix shares the whole blocks before that point: they hold
    public tokens only.
    """

    def __init__(self, prefixes: Iterable[Sequence[int]], block_size: int):
        self.block_size = positive("block_size", block_size)
        self._tree: dict[tuple[int, ...], Any] = {}  # block -> the same, for the blocks that may follow it
        self.num_blocks = 0  # all that may ever be shared
        for prefix in prefixes:
            tokens = tuple(prefix)
            if len(tokens) < block_size:
                raise MinillmError(
                    f"a public prefix of {len(tokens)} tokens is shorter than a block of {block_size}: only whole "
                    f"blocks are shared. Make it longer, or the blocks smaller"
                )
            node = self._tree
            for at in range(0, len(tokens) - block_size + 1, block_size):
                block = tokens[at : at + block_size]
                self.num_blocks += block not in node
                node = node.setdefault(block, {})

    def leading(self, tokens: Sequence[int]) -> int:
        """How many of the first tokens are public: whole blocks, O(tokens)."""
        node, at = self._tree, 0
        while (following := node.get(tuple(tokens[at : at + self.block_size]))) is not None:
            node, at = following, at + self.block_size
        return at


def positive(name: str, value: Any) -> int:
    """value, if it is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise MinillmError(f"{name} is a whole number, at least 1, got {value!r:.80}")
    return value


class Namespaces:
    """The namespace of each request of an engine, found once: what of a prompt is public takes a look at all of it."""

    def __init__(self, engine: str, public: PublicPrefixes | None = None):
        self.engine, self._public = engine, public
        self._known: WeakKeyDictionary[Request, Namespace] = WeakKeyDictionary()

    def of(self, request: Request) -> Namespace:
        if (namespace := self._known.get(request)) is None:
            public = 0 if self._public is None else self._public.leading(request.prompt_token_ids)
            namespace = self._known[request] = Namespace(self.engine, request.tenant, public_tokens=public)
        return namespace

    def forget(self, request: Request) -> None:
        self._known.pop(request, None)
