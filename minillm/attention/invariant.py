"""Batch-invariant attention over a paged KV cache, in plain torch: every product has one shape. Lesson 09 explains why.

A library's attention kernel adds over the keys in an order that depends on how many queries there are and on how long
the other sequences are. Here the position of a token decides everything. Queries stand in tiles of 16 positions, keys
in tiles of 64, both counted from the start of the sequence. The token at position p is always row p % 16 of its query
tile, and meets the key tiles 0 to p // 64 in that order: an online softmax in fp32 (Milakov and Gimelshein, 2018). A
place without a token in this step holds zeros.

So a token's result does not depend on the chunk, the batch, the block table or the block size, by construction: each
product has a fixed shape and the token a fixed place in it. What lies between the products is done a token at a time
by the exactly rounded operations of `models/invariant.py`. Keys behind the token are hidden: their weight is exactly 0,
and adding 0 changes no bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.attention.paged import PagedAttention, block_table, check_table, slots
from minillm.attention.protocol import Batch
from minillm.models.invariant import exp, total

QUERIES, KEYS = 16, 64  # KEYS is a multiple of QUERIES, so all tokens of a query tile meet the same key tiles


@dataclass
class TilePlan:
    """U query tiles, those with most key tiles first, so that key tile j concerns the first U_j of them.

    The step's N tokens are taken in the order of the tiles: key tile j concerns the first N_j of them.
    """

    new_slots: Tensor  # [N] where new tokens are written
    order: Tensor  # [N] the step's tokens in the order of the tiles
    seats: tuple[Tensor, Tensor]  # [N] each: tile and place in it
    keys: list[Tensor]  # for key tile j: [U_j, KEYS] slots, 0 where nothing is written yet
    hidden: list[Tensor]  # for key tile j: [N_j, KEYS] bool, true where the key lies behind the query


class PagedInvariant(PagedAttention):
    """An attention backend for `make_invariant`'s models. Writes and reads any pool, quantised ones too."""

    def plan(self, batch: Batch) -> TilePlan:  # type: ignore[override]
        for row in batch.rows:
            check_table(row, self.pool.block_size)
        device, rows = batch.token_ids.device, batch.rows
        tiles = [(i, t) for i, row in enumerate(rows) for t in range(row.start // QUERIES, -(-row.context // QUERIES))]
        tiles.sort(key=lambda tile: -(tile[1] * QUERIES // KEYS))
        of, index = torch.tensor(tiles, device=device).unbind(-1)
        whole = lambda numbers: torch.tensor(numbers, device=device)
        starts, contexts = whole([row.start for row in rows]), whole([row.context for row in rows])
        first = whole([s.start for s in batch.slices])

        positions = index[:, None] * QUERIES + torch.arange(QUERIES, device=device)  # [U, QUERIES]
        tile, seat = ((positions >= starts[of, None]) & (positions < contexts[of, None])).nonzero(as_tuple=True)
        positions, of_token = positions[tile, seat], of[tile]  # [N]
        order = positions - starts[of_token] + first[of_token]

        count = -(-max(row.context for row in rows) // KEYS)
        table = slots(block_table(rows, device), self.pool.block_size)[:, : count * KEYS]
        table = torch.nn.functional.pad(table, (0, count * KEYS - table.shape[1]))
        table = table.masked_fill_(torch.arange(count * KEYS, device=device) >= contexts[:, None], 0)
        new = torch.cat([table[i, row.start : row.context] for i, row in enumerate(rows)])
        keys, hidden = [], []
        for j in range(count):
            here = slice(j * KEYS, (j + 1) * KEYS)
            keys.append(table[of[: sum(t * QUERIES >= here.start for _, t in tiles)], here])
            concerned = positions[positions >= here.start]  # a prefix: tiles with more key tiles come first
            hidden.append(torch.arange(here.start, here.stop, device=device) > concerned[:, None])
        return TilePlan(new, order, (tile, seat), keys, hidden)

    def write(self, layer: int, k: Tensor, v: Tensor, plan: TilePlan) -> None:  # type: ignore[override]
        super().write(layer, k, v, plan)  # type: ignore[arg-type]

    def forward(self, layer: int, q: Tensor, plan: TilePlan) -> Tensor:
        """q [N, H, d] -> [N, H, d]. Scores, softmax and sums in fp32."""
        N, H, d = q.shape
        K = self.pool.k.shape[3]
        g = H // K
        tile, seat = plan.seats

        def seated(x: Tensor, tiles: int) -> Tensor:
            """[n, K, g, c], the first n tokens -> [tiles, K, QUERIES * g, c], each at its place, zeros elsewhere."""
            padded = x.new_zeros(tiles, K, QUERIES, g, x.shape[-1])
            padded[tile[: len(x)], :, seat[: len(x)]] = x
            return padded.flatten(2, 3)

        def taken(x: Tensor, n: int) -> Tensor:
            """The reverse."""
            return x.unflatten(2, (QUERIES, g))[tile[:n], :, seat[:n]]

        queries = seated(q[plan.order].float().view(N, K, g, d) * (1.0 / math.sqrt(d)), len(plan.keys[0]))
        out = queries.new_zeros(N, K, g, d)
        weight = queries.new_zeros(N, K, g, 1)  # sum of e^(score - top) so far
        top = torch.full_like(weight, -torch.inf)  # largest score so far
        for keys, hidden in zip(plan.keys, plan.hidden, strict=True):
            tiles, n = len(keys), len(hidden)
            k, v = (x.float().contiguous() for x in self.read(layer, keys))  # [tiles, K, KEYS, d]
            scores = taken(products(queries[:tiles], k.transpose(-1, -2)), n)  # [n, K, g, KEYS]
            scores.masked_fill_(hidden[:, None, None], -torch.inf)
            before, top[:n] = top[:n].clone(), torch.maximum(top[:n], scores.amax(-1, keepdim=True))
            p, fade = exp(scores - top[:n]), exp(before - top[:n])
            weight[:n] = weight[:n] * fade + total(p)
            out[:n] = out[:n] * fade + taken(products(seated(p, tiles), v), n)
        result = torch.empty_like(q)
        result[plan.order] = (out / weight).view(N, H, d).to(q.dtype)
        return result


def products(a: Tensor, b: Tensor) -> Tensor:
    """a [n, K, r, s] times b [n, K, s, c], one tile a call: a call over all n could choose its kernel by n."""
    out = a.new_empty(*a.shape[:-1], b.shape[-1])
    for i in range(len(a)):
        torch.bmm(a[i], b[i], out=out[i])
    return out
