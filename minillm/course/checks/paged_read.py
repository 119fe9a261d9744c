"""References and typical mistakes of exercise 06 for attention: through a block table, and merged from parts.

Loops over single tokens in float64, apart from solutions/, the engine and the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.course.checks.tiny import randn

NOWHERE = 2**31 - 1  # what stands in a table behind a sequence's last block

# 06.4 attention through a table


def paged_attention(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Sequence[int], context: int) -> Tensor:
    return attention_with(q, k_pool, v_pool, table, context)


def attention_with(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Sequence[int], context: int, *, seen: int | None = None,
    shift: int = 0, identity: bool = False, tile: bool = False, scaled: bool = True, keys_only: bool = False,
) -> Tensor:  # fmt: skip
    (heads, dim), (_, page, kv_heads, _) = q.shape, k_pool.shape
    out = torch.zeros(q.shape, dtype=torch.float64)
    tokens = range(context if seen is None else seen)
    blocks = [t // page if identity else table[(t + shift) // page] for t in tokens]
    for h in range(heads):
        g = h % kv_heads if tile else h // (heads // kv_heads)
        k = torch.stack([k_pool[b, t % page, g].double() for t, b in zip(tokens, blocks, strict=True)])
        pool = k_pool if keys_only else v_pool
        v = torch.stack([pool[b, t % page, g].double() for t, b in zip(tokens, blocks, strict=True)])
        scores = k @ q[h].double() * (dim**-0.5 if scaled else 1.0)
        out[h] = scores.softmax(-1) @ v
    return out.to(q.dtype)


def whole_pages(q: Tensor, k: Tensor, v: Tensor, table: Sequence[int], context: int) -> Tensor:
    """The stale tail: all slots of the last block."""
    page = k.shape[1]
    return attention_with(q, k, v, table, context, seen=-(-context // page) * page)


def zeros_counted(q: Tensor, k: Tensor, v: Tensor, table: Sequence[int], context: int) -> Tensor:
    """Slots behind the last token take part with a key and a value of 0."""
    page, last = k.shape[1], (context - 1) // k.shape[1]
    k, v = k.clone(), v.clone()
    for pool in (k, v):
        pool[table[last], context - last * page :] = 0.0
    return whole_pages(q, k, v, table, context)


def pools(seed: int, tables: Sequence[Sequence[int]], lens: Sequence[int], page: int, K: int, d: int, rest: float,
          num_blocks: int = 8, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(k_pool, v_pool) with random tokens; a slot that no sequence owns is random too, times `rest` (NaN: poison)."""
    owned = torch.zeros(num_blocks, page, dtype=torch.bool)
    for table, n in zip(tables, lens, strict=True):
        for t in range(n):
            owned[table[t // page], t % page] = True
    made = [randn(seed + i, num_blocks, page, K, d) for i in (1, 2)]
    k, v = (torch.where(owned[..., None, None], x, x * rest).to(dtype) for x in made)
    return k, v


def attention_args(
    seed: int, table: Sequence[int], context: int, heads: int, kv_heads: int, rest: float = 1.0, page: int = 4
) -> Callable[[], Any]:
    """One sequence in pages of `page`; two entries behind its last block point nowhere."""

    def args() -> tuple[Any, ...]:
        k, v = pools(seed, [table], [context], page, kv_heads, 8, rest)
        return randn(seed, heads, 8), k, v, [*table, NOWHERE, NOWHERE], context

    return args


# 06.5 the decode kernel


def paged_decode(q: Tensor, k_pool: Tensor, v_pool: Tensor, block_tables: Tensor, context_lens: Tensor) -> Tensor:
    return decode_with(q, k_pool, v_pool, block_tables, context_lens)


def decode_with(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_tables: Tensor, context_lens: Tensor,
    one: Callable[..., Tensor] = paged_attention,
) -> Tensor:  # fmt: skip
    lens = context_lens.tolist()
    rows = [one(q[b], k_pool, v_pool, block_tables[b].tolist(), n) for b, n in enumerate(lens)]
    return torch.stack(rows)


def not_rescaled(q: Tensor, k_pool: Tensor, v_pool: Tensor, table: Sequence[int], context: int) -> Tensor:
    """Online softmax, a block at a time, whose output keeps the weights of older maxima."""
    (heads, dim), (_, page, kv_heads, _) = q.shape, k_pool.shape
    out = torch.zeros(heads, dim, dtype=torch.float64)
    for h in range(heads):
        g, top, weight = h // (heads // kv_heads), -math.inf, 0.0
        for first in range(0, context, page):
            block, n = table[first // page], min(page, context - first)
            x = k_pool[block, :n, g].double() @ q[h].double() * dim**-0.5
            new = max(top, float(x.max()))
            p = (x - new).exp()
            weight = weight * math.exp(top - new) + float(p.sum())
            out[h] += p @ v_pool[block, :n, g].double()
            top = new
        out[h] /= weight
    return out.to(q.dtype)


TABLES = {1: [[6, 2, 5]], 3: [[3], [7, 1], [4, 0, 6]]}


def decode_args(
    seed: int, lens: Sequence[int], group: int = 2, K: int = 2, rest: float = 1.0, dtype: torch.dtype = torch.float32
) -> Callable[[], Any]:
    """len(lens) 1 or 3, at most 48 tokens each: pages of 16, head_dim 16."""

    def args() -> tuple[Any, ...]:
        tables = TABLES[len(lens)]
        k, v = pools(seed, tables, lens, 16, K, 16, rest, dtype=dtype)
        need = [-(-n // 16) for n in lens]
        padded = [[*t[:n], *[NOWHERE] * (4 - n)] for t, n in zip(tables, need, strict=True)]
        q = randn(seed, len(lens), K * group, 16, scale=2.0, dtype=dtype)
        return q, k, v, torch.tensor(padded, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)

    return args


def decode_bytes(q: Tensor, k_pool: Tensor, v_pool: Tensor, tables: Tensor, lens: Tensor) -> tuple[int, int]:
    """A program for each sequence and KV head: its queries, its length, a table entry a block, each k and v once."""
    return bytes_with(q, k_pool, lens)


def bytes_with(
    q: Tensor, k_pool: Tensor, lens: Tensor, each_head: bool = False, each_token: bool = False
) -> tuple[int, int]:
    (B, H, d), (_, page, K, _) = q.shape, k_pool.shape
    programs, size = H if each_head else K, q.element_size()
    tokens = lens.tolist()
    entries = sum(tokens) if each_token else sum(-(-n // page) for n in tokens)
    loaded = B * H * d * size + programs * (4 * B + 4 * entries + 2 * sum(tokens) * d * size)
    return loaded, B * H * d * size


def loaded_ratio(args: Callable[[], Any], **how: bool) -> tuple[float, float]:
    q, k, _, _, lens = args()
    return bytes_with(q, k, lens, **how)[0] / bytes_with(q, k, lens)[0], 1.0


# 06.6 merge


def merge_parts(partial: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return merge_with(partial, lse)


def merge_with(
    partial: Tensor, lse: Tensor, *, equal: bool = False, base: float = math.e, normalise: bool = True,
    poison: bool = False, most: bool = False, plain_sum: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    heads, parts, d = partial.shape
    out = torch.zeros(heads, d, dtype=torch.float64)
    total = torch.full((heads,), -math.inf, dtype=torch.float64)
    for h in range(heads):
        live = [s for s in range(parts) if lse[h, s] > -math.inf]
        if not live:
            continue
        m = max(float(lse[h, s]) for s in live)
        weights = {s: 1.0 if equal else base ** (float(lse[h, s]) - m) for s in live}
        norm = sum(weights.values())
        for s in range(parts) if poison else live:
            out[h] += weights.get(s, 0.0) * partial[h, s].double()
        out[h] /= norm if normalise else 1.0
        total[h] = m if most else sum(float(lse[h, s]) for s in live) if plain_sum else m + math.log(norm)
    return out.float(), total.float()


def overflowing(partial: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    weight = lse.float().exp()
    norm = weight.sum(-1)
    read = torch.where(torch.isneginf(lse)[..., None], 0.0, partial)
    return (weight[..., None] * read).sum(-2) / norm[..., None], norm.log()


def merge_args(
    seed: int, parts: int, level: float = 0.0, empty: Sequence[tuple[int, int]] = (), junk: float = 0.0
) -> Callable[[], Any]:
    """Three heads; `empty`: (head, part) without tokens, whose output holds `junk`."""

    def args() -> tuple[Tensor, Tensor]:
        partial, lse = randn(seed, 3, parts, 8), randn(seed + 1, 3, parts, scale=1.5) + level
        for h, s in empty:
            lse[h, s], partial[h, s] = -math.inf, junk
        return partial, lse

    return args
