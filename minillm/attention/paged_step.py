"""A step over paged sequences, cut into few calls of torch's fused attention. Used by `PagedSDPA`; lesson 09 reads it.

Sequences that add one token each are attended together, in groups of similar length. Every other sequence is attended
alone. Whatever does not depend on the layer is made here, once a step: tables, masks, buffers, and the views of all
layers. A layer then costs no Python per sequence, only per group and per chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.attention.causal import attend_sdpa, causal_bias
from minillm.attention.protocol import Batch, Row
from minillm.cache.pool import KVPool, dequantize_kv

SPREAD = 2  # sequences of a group differ at most by this factor in blocks: what is padded stays below what is read
SHARED_TOKENS = 64  # a common beginning of this length is attended once for all; below, the merge costs more
Member = tuple[Row, int]  # a sequence with one new token, and which of the step's tokens that is


class Blocks:
    """The pool as an attention reads it on a CPU: whole blocks.

    A block is one run of memory, so gathering blocks is a few long copies; gathering tokens is many short ones.
    """

    def __init__(self, pool: KVPool):
        self.pool = pool
        self.size = pool.block_size
        self._shape = (pool.block_size, *pool.k.shape[3:])  # (block_size, K, d)
        stored = [(pool.k, pool.k_scale), (pool.v, pool.v_scale)]
        self._codes = [as_bytes(x).flatten(2).unbind(0) for x, _ in stored]  # for k and v: [N + 1, bs * K * d] a layer
        self._scales = [None if s is None else s.flatten(2).unbind(0) for _, s in stored]

    def gather(self, layer: int, ids: Tensor, into: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of the blocks ids [n], in the model's dtype, [n * block_size, K, d] each.

        into: two buffers [n, bs * K * d] of the pool's storage type, used again by every layer: fresh memory costs a
        page fault for each 4 KiB. For a plain pool the results lie in them.
        """
        return self._gather(0, layer, ids, into[0]), self._gather(1, layer, ids, into[1])

    def _gather(self, which: int, layer: int, ids: Tensor, into: Tensor) -> Tensor:
        torch.index_select(self._codes[which][layer], 0, ids, out=into)
        scales = self._scales[which]
        if scales is None:
            return into.view(-1, *self._shape[1:])
        scale = scales[layer].index_select(0, ids).view(-1, self._shape[1])
        codes = into.view(self.pool.k.dtype).view(-1, *self._shape[1:])
        return dequantize_kv(codes, scale, self.pool.dtype)

    def buffers(self, n: int) -> tuple[Tensor, Tensor]:
        like = self._codes[0][0]
        return like.new_empty(n, like.shape[1]), like.new_empty(n, like.shape[1])

    def run(self, ids: Sequence[int], tokens: int) -> list[tuple[Tensor, Tensor]] | None:
        """Keys and values [tokens, K, d] of each layer as views, if the blocks are neighbours and not quantised."""
        first = ids[0]
        if self.pool.quantized or list(ids) != list(range(first, first + len(ids))):
            return None
        place = slice(first * self.size, first * self.size + tokens)
        k, v = (x.flatten(1, 2)[:, place].unbind(0) for x in (self.pool.k, self.pool.v))
        return list(zip(k, v, strict=True))


class Run:
    """The first `tokens` tokens of one block table, read in every layer: a view where it can be, else gathered."""

    def __init__(self, blocks: Blocks, ids: Sequence[int], tokens: int, device: torch.device):
        self.tokens = tokens
        ids = ids[: -(-tokens // blocks.size)]
        self.views = blocks.run(ids, tokens)
        if self.views is None:
            self.blocks = blocks
            self.ids = torch.tensor(ids, device=device)
            self.buffers = blocks.buffers(len(ids))

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """[tokens, K, d] each."""
        if self.views is not None:
            return self.views[layer]
        k, v = self.blocks.gather(layer, self.ids, self.buffers)
        return k[: self.tokens], v[: self.tokens]


class Chunk:
    """The new tokens of one sequence: a prompt, a piece of one, or the next token of a lone stream."""

    def __init__(self, blocks: Blocks, row: Row, tokens: slice, device: torch.device):
        self.tokens = tokens
        # A prompt from its first token on needs nothing from a plain pool: its keys are at hand.
        self.run = None
        if row.start or row.num_new == 1 or blocks.pool.quantized:
            self.run = Run(blocks, row.blocks, row.context, device)
        self.mask = None  # torch's kernel turns a mask of bool into one of numbers, at every call
        if row.start and row.num_new > 1:
            self.mask = causal_bias(row.num_new, row.context, blocks.pool.dtype, device)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, d], k and v [N, K, d] of the whole step. Gives this sequence's rows, [n, H, d]."""
        k, v = (k[self.tokens], v[self.tokens]) if self.run is None else self.run.read(layer)
        return attend_sdpa(q[self.tokens], k.transpose(0, 1), v.transpose(0, 1), self.mask)


class DecodeGroup:
    """B > 1 sequences with one new token each: one gather, one call, and a second call for what they share.

    The query heads of a group are query rows of its KV head, so no key is copied per query head.

    Sequences that begin with the same blocks (a common system prompt) read those once: the queries of all are stacked
    over the shared keys, and the two parts are merged by their log-sum-exp (lesson 06; SGLang and vLLM call it cascade
    attention). Gathering the rest loses to a kernel that reads blocks in place, by the copy.
    """

    def __init__(self, blocks: Blocks, members: Sequence[Member], shared: int, device: torch.device):
        """shared: so many leading blocks are the same in all tables."""
        rows = [row for row, _ in members]
        self.blocks, self.B = blocks, len(rows)
        self.tokens = torch.tensor([i for _, i in members], device=device)  # which of the step's tokens are theirs
        self.prefix = Run(blocks, rows[0].blocks[:shared], shared * blocks.size, device) if shared else None
        counts = [-(-row.context // blocks.size) - shared for row in rows]
        self.T = max(counts) * blocks.size
        table = [i for row, n in zip(rows, counts, strict=True)
                 for i in (*row.blocks[shared : shared + n], *(0,) * (max(counts) - n))]  # fmt: skip
        self.ids = torch.tensor(table, device=device)
        self.buffers = blocks.buffers(len(table))
        lengths = torch.tensor([row.context for row in rows], device=device) - shared * blocks.size
        hidden = torch.arange(self.T, device=device) >= lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=blocks.pool.dtype, device=device).masked_fill_(hidden, -torch.inf)
        self.mask = mask[:, None, None]  # [B, 1, 1, T], added to the scores

    def forward(self, layer: int, q: Tensor) -> Tensor:
        """q [B, H, d] of the group's tokens -> [B, H, d]."""
        B, H, d = q.shape
        k, v = (x.view(B, self.T, -1, d).transpose(1, 2) for x in self.blocks.gather(layer, self.ids, self.buffers))
        K = k.shape[1]
        q = q.view(B, K, H // K, d)
        if self.prefix is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).reshape(B, H, d)
        own, own_lse = with_lse(q, k, v, self.mask)  # [B, K, H/K, d], [B, K, H/K]
        stacked = q.transpose(0, 1).reshape(1, K, -1, d)  # [1, K, B * H/K, d]
        k, v = (x.transpose(0, 1)[None] for x in self.prefix.read(layer))
        common, lse = (x.view(K, B, H // K, -1).transpose(0, 1) for x in with_lse(stacked, k, v, None))
        weight = torch.sigmoid(lse - own_lse.unsqueeze(-1))  # of the common part: e^a / (e^a + e^b)
        return torch.lerp(own.float(), common.float(), weight).to(q.dtype).view(B, H, d)


def with_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The kernel behind torch's fused attention on a CPU, which also gives each query's log-sum-exp, in fp32."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)


class Step:
    """The plan of one step: where new tokens are written, and the groups and chunks that are attended."""

    def __init__(self, blocks: Blocks, batch: Batch):
        bs, device = blocks.size, batch.token_ids.device
        new = [row.blocks[p // bs] * bs + p % bs for row in batch.rows for p in range(row.start, row.context)]
        self.new_slots = torch.tensor(new, device=device)
        self.begun = begun_blocks(batch.rows, bs, device)
        self.chunks: list[Chunk] = []
        self.groups: list[DecodeGroup] = []
        decode, end = [], 0
        for row in batch.rows:
            end += row.num_new
            if row.num_new == 1:
                decode.append((row, end - 1))
            else:
                self.chunks.append(Chunk(blocks, row, slice(end - row.num_new, end), device))
        cascade = device.type == "cpu"
        for members, shared in families(decode, bs) if cascade else [(decode, 0)]:
            for group in by_length(members, bs, shared):
                if len(group) == 1:
                    row, i = group[0]
                    self.chunks.append(Chunk(blocks, row, slice(i, i + 1), device))
                else:
                    self.groups.append(DecodeGroup(blocks, group, shared, device))
        self.single = len(self.groups) + len(self.chunks) == 1  # one call gives all of the step's tokens, in order


def begun_blocks(rows: Sequence[Row], block_size: int, device: torch.device) -> Tensor | None:
    """Blocks that this step begins and does not fill. They are cleaned before they are written.

    Whole blocks are read, so the free slots behind the newest token are read too. Their weight is 0, and 0 times what
    an earlier owner left there must be 0: NaN and infinity would pass.
    """
    begun = []
    for row in rows:
        last = (row.context - 1) // block_size
        if row.context % block_size and row.start <= last * block_size:
            begun.append(row.blocks[last])
    return torch.tensor(begun, device=device) if begun else None


def families(members: Sequence[Member], block_size: int) -> list[tuple[list[Member], int]]:
    """Sequences whose tables begin with the same blocks, with how many; those that share little come together last."""
    by_first: dict[int, list[Member]] = {}
    for member in members:
        by_first.setdefault(member[0].blocks[0], []).append(member)
    found, rest = [], []
    for family in by_first.values():
        shared = 0
        if len(family) > 1:
            most = min((row.context - 1) // block_size for row, _ in family)  # the newest token's block is one's own
            for ids in zip(*(row.blocks[:most] for row, _ in family), strict=True):
                if len(set(ids)) > 1:
                    break
                shared += 1
        if shared * block_size >= SHARED_TOKENS:
            found.append((family, shared))
        else:
            rest += family
    return [*found, (rest, 0)]


def by_length(members: Sequence[Member], block_size: int, shared: int) -> list[list[Member]]:
    """Groups whose lengths behind the shared blocks differ at most by the factor SPREAD, each in the step's order."""
    count = lambda member: -(-member[0].context // block_size) - shared
    groups: list[list[Member]] = []
    longest = 0
    for member in sorted(members, key=count, reverse=True):
        if not groups or count(member) * SPREAD < longest:
            groups.append([])
            longest = count(member)
        groups[-1].append(member)
    return [sorted(group, key=lambda member: member[1]) for group in groups]


def as_bytes(x: Tensor) -> Tensor:
    """Codes of one byte as uint8: torch cannot index fp8."""
    return x.view(torch.uint8) if x.itemsize == 1 else x
