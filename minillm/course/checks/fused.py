"""References of exercise 04 in plain torch, each with the switches that make the typical mistakes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.course.checks.tiny import randn

NAN = float("nan")


def padded(width: int) -> int:
    """The next power of two: the lanes of a program that holds a row."""
    return 1 << (width - 1).bit_length()


# 04.2


def softmax(x: Tensor) -> Tensor:
    return softmax_with(x)


def softmax_with(x: Tensor, *, zeros: bool = False, shift: bool = True, columns: bool = False, cut: int = 0) -> Tensor:
    """zeros: lanes behind the row count as 0; shift: subtract the maximum; cut: lanes left out at the end of a row."""
    if columns:
        return x.float().softmax(0).to(x.dtype)
    h, width = x.float(), x.shape[1]
    lanes = padded(width) - width if zeros else 0
    whole = torch.cat((h, h.new_zeros(len(h), lanes)), 1)
    peak = whole.max(1, keepdim=True).values if shift else torch.zeros(len(h), 1)
    e = torch.exp(whole - peak)
    total = (e[:, : e.shape[1] - cut] if cut else e).sum(1, keepdim=True)
    return (e[:, :width] / total).to(x.dtype)


def row_bytes(x: Tensor) -> tuple[int, int]:
    """A row in, a row out."""
    return x.numel() * x.element_size(), x.numel() * x.element_size()


# 04.3


def norm_args(seed: int, rows: int, width: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Any:
    return lambda: (
        randn(seed, rows, width, dtype=dtype, scale=scale), randn(seed + 1, rows, width, dtype=dtype, scale=scale),
        1 + randn(seed + 2, width, dtype=dtype, scale=0.1), 1e-5,
    )  # fmt: skip


def rounded_args() -> Any:
    """Half of the sums are 2049, halfway between two numbers of fp16, and stored as 2048; the others, 2946, are exact.

    The norms of the stored and of the exact sums are then different numbers of fp16. All are a quarter of a step and
    more away from where rounding turns, so another order of the sum, or another rsqrt, changes nothing.
    """
    x, residual = torch.full((2, 96), 1024.0, dtype=torch.float16), torch.full((2, 96), 1025.0, dtype=torch.float16)
    x[:, 1::2], residual[:, 1::2] = 2000.0, 946.0
    return x, residual, torch.full((96,), 2.0, dtype=torch.float16), 1e-5


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return add_rms_norm_with(x, residual, weight, eps)


def add_rms_norm_with(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, over: int = 0, outside: bool = False,
    half: bool = False, first: bool = False, weighted: bool = True, centred: bool = False, kept: bool = True,
    rounded: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """over: what the sum is divided by; outside: eps beside the root; half: squares in x's dtype; first: norm of x
    alone; weighted: times weight; centred: minus the mean; kept: give back the sum, else x; rounded: norm of
    the stored sum."""
    total = (x.float() + residual.float()).to(x.dtype)
    h = (x if first else total).float() if rounded else x.float() + residual.float()
    if centred:
        h = h - h.mean(-1, keepdim=True)
    squares = (h.to(x.dtype) * h.to(x.dtype)).float() if half else h * h
    mean = squares.sum(-1, keepdim=True) / (over or x.shape[1])
    scale = 1 / (mean.sqrt() + eps) if outside else torch.rsqrt(mean + eps)
    norm = (h * scale).to(x.dtype)
    return norm * weight if weighted else norm, total if kept else x.clone()


def norm_bytes(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[int, int]:
    """x, residual and, by each program, the weight in; norm and sum out."""
    each = x.numel() * x.element_size()
    return 3 * each, 2 * each


# 04.4


def swiglu(gate_up: Tensor) -> Tensor:
    return swiglu_with(gate_up)


def swiglu_with(
    gate_up: Tensor, *, swapped: bool = False, interleaved: bool = False, overflow: bool = False, gate: str = "silu"
) -> Tensor:
    g, u = (gate_up[:, 0::2], gate_up[:, 1::2]) if interleaved else gate_up.chunk(2, dim=-1)
    g, u = (u.float(), g.float()) if swapped else (g.float(), u.float())
    if overflow:
        opened = g * torch.exp(g) / (1 + torch.exp(g))
    else:
        openings = {"silu": F.silu(g), "sigmoid": torch.sigmoid(g), "gelu": F.gelu(g), "none": g}
        opened = openings[gate]
    return (opened * u).to(gate_up.dtype)


def swiglu_bytes(gate_up: Tensor) -> tuple[int, int]:
    size = gate_up.numel() * gate_up.element_size()
    return size, size // 2


# 04.5


def rope_args(
    seed: int, heads: int, kv_heads: int, d: int, positions: list[int], slots: list[int], blocks: int = 3, size: int = 4
) -> Any:
    """Arguments of `rope_kv_write`; the pools hold NaN, so that every slot shows who wrote it."""

    def build() -> Any:
        angles = torch.outer(torch.arange(40.0), 10000.0 ** (-torch.arange(0, d, 2) / d))
        angles = torch.cat((angles, angles), 1)
        pool = torch.full((blocks, size, kv_heads, d), NAN)
        return (
            randn(seed, len(positions), heads + 2 * kv_heads, d), angles.cos(), angles.sin(),
            torch.tensor(positions), torch.tensor(slots), pool, pool.clone(), heads,
        )  # fmt: skip

    return build


def rope_kv_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor,
    num_heads: int,
) -> Tensor:  # fmt: skip
    return rope_kv_with(qkv, cos, sin, positions, slots, k_pool, v_pool, num_heads)


def rope_kv_with(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, k_pool: Tensor, v_pool: Tensor,
    num_heads: int, *, sign: int = 1, pairs: str = "halves", by: str = "positions", keys: bool = True,
    values: bool = False, at: str = "slots", pools: str = "kv", padding: str = "skip",
) -> Tensor:  # fmt: skip
    """sign: of the sine; pairs: "halves" or "neighbours"; by: what turns, "positions", "index" or "slots"; keys,
    values: whether they are rotated; at: "slots" or "positions"; pools: "kv" or "vk"; padding: "skip", "last" or
    "zero" (the slot that -1 becomes)."""
    tokens, heads, d = qkv.shape
    kv = (heads - num_heads) // 2
    angle = {"positions": positions, "index": torch.arange(tokens), "slots": slots.clamp_min(0)}[by]
    c, s = cos[angle, : d // 2].unsqueeze(1), sign * sin[angle, : d // 2].unsqueeze(1)

    def turned(x: Tensor) -> Tensor:
        if pairs == "neighbours":
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    q, k, v = qkv.split((num_heads, kv, kv), dim=1)
    k, v = turned(k) if keys else k, turned(v) if values else v
    where = slots if at == "slots" else positions.where(slots >= 0, slots)
    if padding != "skip":
        where = where.where(where >= 0, torch.tensor(k_pool.shape[0] * k_pool.shape[1] - 1 if padding == "last" else 0))
    real = where >= 0
    page = (where[real] // k_pool.shape[1], where[real] % k_pool.shape[1])
    for pool, x in zip((k_pool, v_pool) if pools == "kv" else (v_pool, k_pool), (k, v)):
        pool[page] = x[real]
    return turned(q)
