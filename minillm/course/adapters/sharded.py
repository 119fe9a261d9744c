"""The engine's transformer on ranks in threads, with the answers of exercise 14 where its layers are cut.

Each rank holds a shard of every matrix. What is not the exercise's (norms, rotation, attention of a rank's own heads)
is the engine's. The embedding is whole on each rank here; the head is cut by the vocabulary. Lesson 14 swaps its own
parts in by the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.attention.causal import NoCacheAttention
from minillm.attention.protocol import Batch, Row
from minillm.config import ModelConfig
from minillm.models.linear import Linear
from minillm.models.transformer import TorchOps, Transformer
from minillm.models.weights import LayerWeights, Weights
from minillm.parallel.group import Group, run_threads


@dataclass(frozen=True)
class Parts:
    """What is cut, and how the ranks come together: the answers to 14.2, 14.3, 14.4 and 14.6, as they are asked for."""

    shard_qkv: Callable[[Tensor, int, int, int, int, int], Tensor]
    parallel_mlp: Callable[[Any, Tensor, Tensor, Tensor, Tensor | None], Tensor]
    all_reduce: Callable[[Any, Tensor], Tensor]
    next_tokens: Callable[[Any, Tensor, Sequence[float], Sequence[tuple[int, int]]], list[int]]


@dataclass(frozen=True)
class Written:
    """tokens[rank]: what that rank believes was written. calls, bytes: its all-reduces and sends, by kind."""

    tokens: list[list[int]]
    calls: dict[str, int]
    nbytes: dict[str, int]

    @property
    def agree(self) -> bool:
        return all(tokens == self.tokens[0] for tokens in self.tokens)


class _Ring:
    """A group whose all_reduce is an answer's."""

    def __init__(self, group: Group, all_reduce: Callable[[Any, Tensor], Tensor]):
        self.rank, self.size, self._group, self._reduce = group.rank, group.size, group, all_reduce
        self.all_gather, self.broadcast, self.send, self.recv = (
            group.all_gather, group.broadcast, group.send, group.recv,
        )  # fmt: skip

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._reduce(self._group, x)


class _WholeMlp(TorchOps):
    """gate_up, swiglu and down are one answer, called in place of down; the other two pass their input on."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return gate_up


def sharded(config: ModelConfig, weights: Weights, group: Any, parts: Parts) -> Transformer:
    """The rank's model. Raises what the answers raise."""
    n, r = group.size, group.rank
    share = lambda w, dim: w.chunk(n, dim)[r]
    local = config.replace(num_heads=config.num_heads // n, num_kv_heads=max(1, config.num_kv_heads // n))
    layers = []
    for w in weights.layers:
        gate, up = w.gate_up.chunk(2)
        qkv = parts.shard_qkv(w.qkv, config.num_heads, config.num_kv_heads, config.head_dim, r, n)
        layers.append(LayerWeights(
            input_norm=w.input_norm, qkv=qkv, o=share(w.o, 1), post_norm=w.post_norm,
            gate_up=torch.cat((share(gate, 0), share(up, 0))), down=share(w.down, 1).contiguous(),
        ))  # fmt: skip
    model = Transformer(local, Weights(weights.embed, layers, weights.final_norm, share(weights.lm_head, 0)), 512)
    model.ops = _WholeMlp()
    for layer in model.layers:
        layer.o, layer.gate_up = _Summed(layer.o, group), _same  # type: ignore[assignment]
        layer.down = _Mlp(group, layer.w, parts.parallel_mlp)  # type: ignore[assignment]
    return model


def _same(x: Tensor) -> Tensor:
    return x


class _Summed:
    def __init__(self, linear: Linear, group: Any):
        self.linear, self.group = linear, group

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.linear(x))


class _Mlp:
    def __init__(self, group: Any, w: LayerWeights, mlp: Callable[..., Tensor]):
        self.group, self.w, self.mlp = group, w, mlp

    def __call__(self, x: Tensor) -> Tensor:
        return self.mlp(self.group, x, self.w.gate_up, self.w.down, None)


def write(
    config: ModelConfig, weights: Weights, parts: Parts, prompt: Sequence[int], *, ranks: int, max_tokens: int,
    temperature: float = 0.0, seed: int = 0,
) -> Written:  # fmt: skip
    """`max_tokens` tokens after `prompt`, on so many ranks, each step from the beginning. Models without biases.

    Each rank goes on with the token that its own `next_tokens` has given: where they differ, their texts do.
    """

    def work(group: Group) -> tuple[list[int], dict[str, int], dict[str, int]]:
        ring = _Ring(group, parts.all_reduce)
        model, attention = sharded(config, weights, ring, parts), NoCacheAttention()
        text = list(prompt)
        for _ in range(max_tokens):
            batch = Batch.build([Row(0, 0, len(text))], text)
            hidden = model.forward(batch, attention)
            logits = F.linear(hidden[-1:], model.lm_head.weight).float()  # type: ignore[arg-type]
            text.append(parts.next_tokens(ring, logits, [temperature], [(seed, len(text))])[0])
        return text[len(prompt) :], dict(group.traffic.calls), dict(group.traffic.bytes)

    found = run_threads(ranks, work, timeout_s=60.0)
    return Written([tokens for tokens, _, _ in found], found[0][1], found[0][2])
