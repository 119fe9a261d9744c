"""The sides of a quality report: models that read a text and write on. Lesson 08 builds it.

A side is a transformer and a cache. Weights are quantised in the transformer, keys and values in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minillm.attention.backends import make_attention
from minillm.attention.causal import NoCacheAttention
from minillm.attention.protocol import Batch, Row
from minillm.cache.blocks import BlockAllocator
from minillm.cache.paged import PagedCache
from minillm.cache.pool import KVPool
from minillm.config import ModelConfig
from minillm.models.transformer import Transformer
from minillm.models.weights import Weights
from minillm.quant import quantize_model
from minillm.request import Request, SamplingParams
from minillm.runner import CachedRunner, PagedRunner, Runner

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Source:
    """A model that can be loaded again and again: the variants must start from the same weights."""

    config: ModelConfig
    load: Callable[[], Weights]
    device: str

    def transformer(self, scheme: str | None = None, head: bool = False) -> Transformer:
        on_cpu = self.device == "cpu"
        model = Transformer(self.config, self.load(), pack=on_cpu and scheme is None)
        return model if scheme is None else quantize_model(model, scheme, head=head)


class Side(Protocol):
    model: Transformer

    def logits(self, tokens: list[int], begin: int = 0) -> Tensor:
        """Scores after each token of a sequence, from token `begin` on: [T - begin, V] fp32."""

    def generate(self, prompt: list[int], count: int) -> list[int]:
        """Greedy tokens after the prompt, one step at a time, through the variant's own decode path."""


class EngineSide:
    """A transformer with a contiguous cache."""

    def __init__(self, model: Transformer):
        self.model = model

    def logits(self, tokens: list[int], begin: int = 0) -> Tensor:
        batch = Batch.build([Row(0, 0, len(tokens))], tokens, self.model.device)
        return self.model.logits(self.model.forward(batch, NoCacheAttention())[begin:]).float()

    def generate(self, prompt: list[int], count: int) -> list[int]:
        return written_by(CachedRunner(self.model), prompt, count)


class PagedSide:
    """A transformer with a paged cache. `logits` too goes through the pool: every token sees stored keys and values."""

    def __init__(self, model: Transformer, kv_dtype: str, length: int):
        """kv_dtype: "auto", "int8" or "fp8"; length: tokens of the longest sequence."""
        self.model = model
        blocks = -(-length // BLOCK_SIZE)
        self.pool = KVPool(model.config, blocks, BLOCK_SIZE, model.dtype, kv_dtype, model.device)
        self.attention = make_attention("auto", model, self.pool)

    def logits(self, tokens: list[int], begin: int = 0) -> Tensor:
        blocks = range(1, 1 + -(-len(tokens) // BLOCK_SIZE))
        # The first token on its own: a prompt computed at once has its keys at hand, and would not read the pool.
        parts = [Row(0, 0, 1, blocks)] + [Row(0, 1, len(tokens) - 1, blocks)] * (len(tokens) > 1)
        hidden = []
        for row in parts:
            batch = Batch.build([row], tokens[row.start : row.context], self.model.device)
            hidden.append(self.model.forward(batch, self.attention))
        return self.model.logits(torch.cat(hidden)[begin:]).float()

    def generate(self, prompt: list[int], count: int) -> list[int]:
        cache = PagedCache(self.pool, BlockAllocator)
        return written_by(PagedRunner(self.model, cache, self.attention), prompt, count)

    @property
    def token_bytes(self) -> float:
        """Bytes of a token in the pool as it was allocated."""
        return self.pool.nbytes / ((self.pool.num_blocks + 1) * self.pool.block_size)


def written_by(runner: Runner, prompt: list[int], count: int) -> list[int]:
    greedy = SamplingParams(temperature=0.0, max_tokens=count)
    request = Request("quality", list(prompt), greedy, seed=0, max_tokens=count)
    runner.start([request])
    written: list[int] = []
    for _ in range(count):
        written.append(int(runner.forward([request])[0].argmax()))
        request.output_token_ids.append(written[-1])
    return written
