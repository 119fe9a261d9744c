"""Inputs for flash prefill where everything that a launch does not own is poison: NaN, or block ids from nowhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from kernel_cases import GUARD
from minillm.kernels.flash_prefill import flash_prefill, flash_prefill_reference, flash_prefill_tiled
from torch import Tensor

NOWHERE = (2**31 - 1, -(2**31), 10**6, -1)  # what follows in a block table: following any of these is a crash


@dataclass
class Case:
    """new, history: lengths of each sequence. q, k, v are views of one qkv whose rows have gaps; pools share memory."""

    new: Sequence[int]
    history: Sequence[int]
    H: int
    K: int
    d: int
    page: int
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None
    size: float = 1.0  # of the values
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        random = lambda *shape: torch.randn(*shape, generator=g) * self.size
        N, rows, kv = sum(self.new), self.H + 2 * self.K, self.kv_dtype or self.dtype
        buffer = torch.full((2 * GUARD + N * (rows * self.d + 16),), math.nan, dtype=self.dtype)
        qkv = buffer.as_strided((N, rows, self.d), (rows * self.d + 16, self.d, 1), GUARD)
        qkv[:, : self.H + self.K] = torch.randn(N, self.H + self.K, self.d, generator=g).to(self.dtype)
        qkv[:, self.H + self.K :] = random(N, self.K, self.d).to(self.dtype)
        self.qkv = qkv.to(self.device) if self.device != "cpu" else qkv

        pages = [math.ceil(h / self.page) for h in self.history]
        blocks = sum(pages) + 3
        order = torch.randperm(blocks, generator=g).tolist()
        tables = torch.tensor([[*NOWHERE, *NOWHERE] * (max(pages, default=0) // 8 + 1)] * len(pages), dtype=torch.int32)
        tables = tables.reshape(len(pages), -1)
        pools = torch.full((blocks, 2, self.page, self.K, self.d), 0.0 if kv == torch.int8 else math.nan).to(kv)
        scales = torch.full((2, blocks, self.K, self.page), math.nan).transpose(2, 3)
        for b, length in enumerate(self.history):
            mine, order = order[: pages[b]], order[pages[b] :]
            tables[b, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
            for j, block in enumerate(mine):
                used = min(self.page, length - j * self.page)
                values = torch.stack([random(used, self.K, self.d) / self.size, random(used, self.K, self.d)])
                if self.kv_dtype is not None:
                    scales[:, block, :used] = values.abs().amax(-1) / (127 if kv == torch.int8 else 448)
                    values = values / scales[:, block, :used, :, None]
                pools[block, :, :used] = (values.round() if kv == torch.int8 else values).to(kv)
        on = lambda x: x.to(self.device)
        self.pools, self.scales = on(pools), on(scales)
        self.tables, self.lens = on(tables), on(torch.tensor(list(self.history), dtype=torch.int32))
        self.cu = on(torch.tensor([0, *itertools.accumulate(self.new)], dtype=torch.int32))

    @property
    def tensors(self) -> list[Tensor]:
        q, k, v = self.qkv.split([self.H, self.K, self.K], dim=1)
        return [q, k, v, self.pools[:, 0], self.pools[:, 1], self.tables, self.cu, self.lens]

    @property
    def scaled(self) -> dict[str, Tensor]:
        return {} if self.kv_dtype is None else {"k_scale": self.scales[0], "v_scale": self.scales[1]}

    def launch(self, block_m: int = 16, block_n: int = 16, **more: object) -> Tensor:
        config = {"BLOCK_M": block_m, "BLOCK_N": block_n}
        return flash_prefill(*self.tensors, max(self.new, default=0), **self.scaled, **{"config": config, **more})

    def twin(self, block_m: int = 16, block_n: int = 16, **more: object) -> Tensor:
        return flash_prefill_tiled(*self.tensors, **self.scaled, block_m=block_m, block_n=block_n, **more)

    def oracle(self, **more: float) -> Tensor:
        """In float64, from the values as they are stored."""
        q, *rest = self.tensors
        return flash_prefill_reference(q.double(), *rest, **self.scaled, **more)
