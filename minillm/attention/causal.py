"""Causal attention in plain torch, over one sequence. Lesson 01 builds `attend`; all backends are compared with it.

Grouped queries (GQA): H query heads share K key/value heads. Where one query token arrives, the group is laid
out as extra query rows, so that no key or value is copied per query head.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.attention.protocol import Batch


def causal_mask(num_new: int, context: int, device: str | torch.device = "cpu") -> Tensor:
    """[num_new, context] bool, true where a new token may look: itself and everything before it."""
    return torch.ones(num_new, context, dtype=torch.bool, device=device).tril(context - num_new)


def causal_bias(num_new: int, context: int, dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
    """The same to be added to scores: 0 where a new token may look, -inf elsewhere."""
    hidden = ~causal_mask(num_new, context, device)
    return torch.zeros(num_new, context, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v with a causal mask, the textbook way: it writes the n x T matrix.

    q [n, H, d] are the last n of T tokens; k and v [K, T, d], heads first, as a cache keeps them; gives [n, H, d].
    Scores are taken in fp32.
    """
    n, H, d = q.shape
    K, T, _ = k.shape
    qg = q.view(n, K, H // K, d)
    scores = torch.einsum("nkgd,ktd->kgnt", qg.float(), k.float()) / math.sqrt(d)
    scores = scores.masked_fill(~causal_mask(n, T, q.device), -torch.inf)
    return torch.einsum("kgnt,ktd->nkgd", scores.softmax(-1), v.float()).reshape(n, H, d).to(q.dtype)


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The same, same shapes, through torch's fused kernel, which never writes the matrix (lesson 05).

    mask: what `causal_bias` gives for n < T, for a caller that uses it more than once; made here otherwise.
    """
    n, H, d = q.shape
    K, T, _ = k.shape
    if n == 1:  # the group's heads become query rows: [1, K, H/K, d] against [1, K, T, d]
        return F.scaled_dot_product_attention(q.reshape(1, K, H // K, d), k[None], v[None]).reshape(1, H, d)
    if n < T and mask is None:
        mask = causal_mask(n, T, q.device)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], _per_query_head(k, H), _per_query_head(v, H), attn_mask=mask, is_causal=mask is None
    )
    return out[0].transpose(0, 1)


def _per_query_head(x: Tensor, H: int) -> Tensor:
    """[K, T, d] -> [1, H, T, d], each KV head repeated for the query heads of its group."""
    K, T, d = x.shape
    return x[None, :, None].expand(1, K, H // K, T, d).reshape(1, H, T, d)


class NoCacheAttention:
    """The backend of naive decode: every sequence arrives whole, and nothing is kept for the next step.

    `attend=attend` makes it the reference backend: with plain weights in fp32 it gives, bit for bit, the logits of
    the transformers library's eager attention on a CPU.
    """

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor] = attend_sdpa):
        self.attend = attend

    def plan(self, batch: Batch) -> list[slice]:
        for row in batch.rows:
            if row.start:
                raise ValueError(f"NoCacheAttention keeps no KV: a sequence must start at 0, got {row.start}")
        return batch.slices

    def write(self, layer: int, k: Tensor, v: Tensor, plan: list[slice]) -> None:
        self.k, self.v = k, v

    def forward(self, layer: int, q: Tensor, plan: list[slice]) -> Tensor:
        parts = [self.attend(q[s], self.k[s].transpose(0, 1), self.v[s].transpose(0, 1)) for s in plan]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
