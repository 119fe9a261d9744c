"""References of exercise 08: a KV cache in eight bits, and the gate before a speed. With the typical errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.course.candidate import Candidate
from minillm.course.checks.tiny import randn

# 08.6 keys in eight bits


def write_kv(x: Tensor, slots: list[int], pool: Tensor, scales: Tensor) -> None:
    write_with(x, slots, pool, scales)


def write_with(
    x: Tensor, slots: list[int], pool: Tensor, scales: Tensor, *, over: str = "head", steps: int = 127,
    cut: bool = False, padding: bool = False, inverse: bool = False, unscaled: bool = False,
) -> None:  # fmt: skip
    """over: who shares a scale: "head" (of a token), "token" (all heads), "batch" (a head in all tokens), "all"."""
    w = x.double()
    dims = {"head": (2,), "token": (1, 2), "batch": (0, 2), "all": (0, 1, 2)}[over]
    amax = w.abs().amax(dims, keepdim=True).expand(*x.shape[:2], 1)
    scale = torch.where(amax == 0, 1.0, amax / steps)
    codes = w / scale
    codes = (codes.trunc() if cut else codes.round()).clamp(-128, 127)
    for i, slot in enumerate(slots):
        if slot >= 0 or padding:
            pool[slot] = codes[i].to(torch.int8)
            scales[slot] = 1.0 if unscaled else (1 / scale[i, :, 0] if inverse else scale[i, :, 0]).float()


def kv_args(
    seed: int, slots: Sequence[int], heads: int = 2, d: int = 8, sizes: Sequence[float] = (), zero: bool = False
) -> Callable[[], tuple[Any, ...]]:
    """New tokens for a pool of eight slots that holds others already. sizes: of the heads."""

    def args() -> tuple[Any, ...]:
        x = randn(seed, len(slots), heads, d)
        if sizes:
            x *= torch.tensor(list(sizes))[:, None]
        if zero:
            x[1] = 0.0
        pool = torch.randint(-127, 128, (8, heads, d), generator=torch.Generator().manual_seed(seed + 1))
        return x, list(slots), pool.to(torch.int8), randn(seed + 2, 8, heads).abs() + 0.5

    return args


def written(answer: Candidate, x: Tensor, slots: list[int], pool: Tensor, scales: Tensor) -> tuple[Any, Any]:
    """(pool, scales) as the call left them."""
    answer(x, slots, pool, scales)
    return answer.after[2], answer.after[3]


def later(answer: Candidate, x: Tensor, slots: list[int], pool: Tensor, scales: Tensor) -> Tensor:
    """The pool made whole, after tokens that came one at a time."""
    for i, slot in enumerate(slots):
        answer(x[i : i + 1], [slot], pool, scales)
        pool, scales = answer.after[2], answer.after[3]
    return pool.float() * scales[..., None]


# 08.7 the gate

GATES = {"int8": 1.01, "int4": 1.10}


def verdict(scheme: str, weights: str, report: dict[str, Any] | None, gates: dict[str, float]) -> str:
    return verdict_with(scheme, weights, report, gates)


def verdict_with(
    scheme: str, weights: str, report: dict[str, Any] | None, gates: dict[str, float], *, none: str = "no report",
    own: bool = True, ratio: str = "perplexity", nan_passes: bool = False, tokens: bool = True,
    gate: float | None = None, both: bool = False,
) -> str:  # fmt: skip
    """none: what is said without a report; own: whether it must be of these weights; tokens: lengths must agree."""
    if report is None:
        return none
    if own and report["weights"] != weights:
        return "other weights"
    losses = report["losses"]
    if scheme not in losses or (tokens and len(losses[scheme]) != len(losses["plain"])) or not losses["plain"]:
        return "not judged"
    mine, plain = (sum(x) / len(x) for x in (losses[scheme], losses["plain"]))
    if ratio == "perplexity":
        grown = math.exp(mine - plain)
    elif ratio == "mean of exp":
        grown = sum(map(math.exp, losses[scheme])) / sum(map(math.exp, losses["plain"]))
    else:
        grown = mine / plain
    limit = gates[scheme] if gate is None else gate
    if nan_passes:
        refused = grown > limit
    else:
        refused = not grown <= limit
    if both and grown < 1 / limit:
        refused = True
    return "perplexity" if refused else "shown"


def report_of(
    growth: dict[str, float], weights: str = "a7f3", n: int = 6, seed: int = 3, short: int = 0, nan: bool = False
) -> dict[str, Any]:
    """Losses in nats of n tokens; growth: of the perplexity, by scheme. The growth is not the same at every token."""
    g = torch.Generator().manual_seed(seed)
    plain = [float(f"{v:.3f}") for v in (torch.rand(n, generator=g) * 3 + 2).tolist()]
    report: dict[str, Any] = {"weights": weights, "losses": {"plain": plain}}
    for name, ratio in growth.items():
        wobble = [0.4 * (-1) ** i for i in range(n)]
        losses = [v + math.log(ratio) + w for v, w in zip(plain, wobble, strict=True)]
        report["losses"][name] = losses[: n - short]
        if nan:
            report["losses"][name][1] = math.nan
    return report


def verdicts(answer: Candidate, asked: list[tuple[str, str, dict[str, Any] | None]]) -> list[str]:
    return [answer(scheme, weights, report, dict(GATES)) for scheme, weights, report in asked]


def asked(*calls: tuple[str, str, dict[str, Any] | None]) -> Callable[[], tuple[Any]]:
    return lambda: ([*calls],)
