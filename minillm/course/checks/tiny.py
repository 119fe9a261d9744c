"""A transformer small enough to check against: two layers of random weights in float64, nothing shared with the engine.

`model(ids)` gives float32 logits `[T, V]`, one row for each token. The same ids always give the same logits.
Tooling of lessons 01 to 03.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def randn(seed: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers that depend on `seed` alone."""
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


class TinyModel:
    vocab, dim, heads, kv_heads, head_dim, hidden, layers = 40, 16, 2, 1, 8, 24, 2

    def __init__(self, seed: int = 7):
        d, q, kv, i = self.dim, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        sizes = {"q": (q, d), "k": (kv, d), "v": (kv, d), "o": (d, q), "gate": (i, d), "up": (i, d), "down": (d, i)}
        self.table = randn(seed, self.vocab, d, dtype=torch.float64)
        self.weights = [
            {
                name: randn(seed + 10 * layer + j, *size, scale=0.4, dtype=torch.float64)
                for j, (name, size) in enumerate(sizes.items())
            }
            for layer in range(1, self.layers + 1)
        ]

    def __call__(self, ids: Sequence[int]) -> Tensor:
        return self._logits(tuple(ids)).clone()

    @functools.cache  # noqa: B019  (one model for the life of the process; the same texts come up again and again)
    def _logits(self, ids: tuple[int, ...]) -> Tensor:
        x = self.table[torch.tensor(ids)]
        for w in self.weights:
            h = _normed(x)
            q, k, v = ((h @ w[n].T).reshape(len(ids), -1, self.head_dim) for n in "qkv")
            x = x + _attended(_turned(q), _turned(k), v).reshape(len(ids), -1) @ w["o"].T
            h = _normed(x)
            x = x + (torch.nn.functional.silu(h @ w["gate"].T) * (h @ w["up"].T)) @ w["down"].T
        return (_normed(x) @ self.table.T).float()


def _normed(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def _turned(x: Tensor) -> Tensor:
    """RoPE as a product of complex numbers."""
    half = x.shape[-1] // 2
    rate = 1e4 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(torch.arange(len(x), dtype=torch.float64), rate)[:, None]
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)
