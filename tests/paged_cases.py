"""A paged cache made to catch a decode kernel that reads what it should not: what its tests share."""

import math

import torch
from kernel_cases import error
from minillm.kernels.paged_decode import paged_decode, paged_decode_reference, paged_decode_tiled

TILE = 64  # of configs.json, on a CPU
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3}  # sums over hundreds of tokens; half a unit of the last place


class Case:
    """q, pools with gaps, shuffled tables. Every slot that no sequence owns is NaN, every table entry past the end
    points to memory that does not exist."""

    def __init__(self, lens, group=3, K=2, d=64, page=16, dtype=torch.float32, kv=None, seed=0, sharp=1.0):
        g = torch.Generator().manual_seed(seed)
        B, H = len(lens), group * K
        need = [-(-t // page) for t in lens]
        ids = torch.randperm(sum(need) + 3, generator=g).tolist()
        raw = torch.full((2, len(ids), page + 1, K + 1, d + 16), math.nan)  # a gap after each slot, head and vector
        self.owned = torch.zeros(len(ids), page, dtype=torch.bool)
        self.tables = torch.full((B, max([1, *need]) + 2), 2**31 - 1, dtype=torch.int32)
        self.tables[:, -1] = -1
        for b, t in enumerate(lens):
            blocks, ids = ids[: need[b]], ids[need[b] :]
            self.tables[b, : need[b]] = torch.tensor(blocks, dtype=torch.int32)
            for i in range(t):
                self.owned[blocks[i // page], i % page] = True
        n = int(self.owned.sum())
        values = torch.randn(2, n, K, d, generator=g)
        self.k_scale = self.v_scale = None
        if kv is None:
            raw = raw.to(dtype)
            for pool, x in zip(raw[:, :, :page, :K, :d], values):
                pool[self.owned] = x.to(dtype)
        else:  # stored bytes have no NaN, so a slot that is not owned has a scale of NaN
            most = 127 if kv == torch.int8 else 448
            scales = torch.full((2, *self.owned.shape, K), math.nan)
            stored = torch.full(raw.shape, 99.0).to(kv)
            as_bytes = stored.view(torch.uint8)[:, :, :page, :K, :d]
            for pool, scale, x in zip(as_bytes, scales, values):
                amax = x.abs().amax(-1)
                scaled = x / amax[..., None] * most
                pool[self.owned] = (scaled.round() if kv == torch.int8 else scaled).to(kv).view(torch.uint8)
                scale[self.owned] = amax / most
            raw, (self.k_scale, self.v_scale) = stored, scales
        self.k_pool, self.v_pool = raw[:, :, :page, :K, :d]
        wide = torch.randn(B, H + 2 * K, d, generator=g).to(dtype) * sharp
        self.q = wide[:, :H]  # as a slice of a fused qkv: rows with gaps
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.shape = {"H": H, "K": K, "d": d, "itemsize": dtype.itemsize, "kv_itemsize": raw.element_size()}

    def kernel(self, num_splits=1, **changes):
        tensors = {
            "q": self.q, "k_pool": self.k_pool, "v_pool": self.v_pool, "block_tables": self.tables,
            "context_lens": self.lens, "k_scale": self.k_scale, "v_scale": self.v_scale,
        }  # fmt: skip
        capacity = self.tables.shape[1] * self.k_pool.shape[1]
        return paged_decode(**(tensors | {"max_context": capacity, "num_splits": num_splits} | changes))

    def tiled(self, num_splits=1, **more):
        return paged_decode_tiled(self.q, self.k_pool, self.v_pool, self.tables, self.lens, num_splits, TILE,
                                  self.k_scale, self.v_scale, **more)  # fmt: skip

    def oracle(self):
        return paged_decode_reference(
            self.q, self.k_pool, self.v_pool, self.tables, self.lens, self.k_scale, self.v_scale
        )

    def error(self, got):
        """Largest relative error of out and lse; a sequence of length 0 must be exactly 0 and -inf."""
        (out, lse), (right_out, right_lse) = got, self.oracle()
        empty = self.lens == 0
        if not (bool((out[empty] == 0).all()) and bool((lse[empty] == -torch.inf).all())):
            return math.inf
        return max(error(out, right_out), error(lse[~empty], right_lse[~empty]))

    def right(self, got):
        return self.error(got) <= TOLERANCE[self.q.dtype]
