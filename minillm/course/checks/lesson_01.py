"""Checks of exercise 01: naive decode. References in float64, apart from solutions/ and the engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minillm.course.checks.tiny import TinyModel, randn
from minillm.course.tasks import Answer, Case, Lesson, Mistake, Task, Wrong, prediction

PROMPT, NEW, PARAMETERS = 100, 100, 135e6
NAIVE = sum(PROMPT + i for i in range(NEW))  # every step feeds the prompt and all tokens so far


# 01.2 RMSNorm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    d = x.double()
    mean_square = (d * d).sum(-1, keepdim=True) / d.shape[-1]
    return (d / (mean_square + eps) ** 0.5 * weight.double()).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    d = x.double() - x.double().mean(-1, keepdim=True)
    return rms_norm(d, weight, eps).to(x.dtype)


def sum_not_mean(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    d = x.double()
    return (d / ((d * d).sum(-1, keepdim=True) + eps) ** 0.5 * weight.double()).to(x.dtype)


def eps_outside(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    d = x.double()
    return (d / ((d * d).mean(-1, keepdim=True) ** 0.5 + eps) * weight.double()).to(x.dtype)


def norm_in_input_dtype(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


# 01.3 RoPE


def rope(x: Tensor, offset: int, theta: float) -> Tensor:
    return _rope(x, offset, theta)


def _rope(x: Tensor, offset: int, theta: float, *, sign: int = 1, interleaved: bool = False, per: float = 2) -> Tensor:
    d, out = x.double(), torch.empty(x.shape, dtype=torch.float64)
    half = x.shape[-1] // 2
    for t in range(x.shape[0]):
        for i in range(half):
            angle = sign * (offset + t) * theta ** (-per * i / x.shape[-1])
            c, s = math.cos(angle), math.sin(angle)
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            out[t, :, a] = d[t, :, a] * c - d[t, :, b] * s
            out[t, :, b] = d[t, :, b] * c + d[t, :, a] * s
    return out.to(x.dtype)


# 01.4 causal attention with grouped heads


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _attention(q, k, v)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = True, shift: int | None = None,
    tile: bool = False,
) -> Tensor:  # fmt: skip
    """`shift` is the position of the first query; None means the queries are the last ones."""
    (tokens, heads, dim), (length, kv_heads, _) = q.shape, k.shape
    first = length - tokens if shift is None else shift
    out = torch.zeros(q.shape, dtype=torch.float64)
    for h in range(heads):
        g = h % kv_heads if tile else h // (heads // kv_heads)
        for t in range(tokens):
            seen = first + t + 1 if causal else length
            scores = k[:seen, g].double() @ q[t, h].double() * (dim**-0.5 if scale is None else scale)
            weights = (scores - scores.max()).exp()
            out[t, h] = (weights / weights.sum()) @ v[:seen, g].double()
    return out.to(q.dtype)


def qkv(seed: int, tokens: int, length: int, heads: int, kv_heads: int, scale: float = 1.0) -> Callable[[], Any]:
    def args() -> tuple[Tensor, Tensor, Tensor]:
        q = randn(seed, tokens, heads, 16, scale=scale)
        return q, randn(seed + 1, length, kv_heads, 16), randn(seed + 2, length, kv_heads, 16)

    return args


# 01.5 SwiGLU


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return _swiglu(x, gate, up, down, lambda g: g / (1 + torch.exp(-g)))


def _swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    d = x.double()
    hidden = act(torch.einsum("...d,id->...i", d, gate.double())) * torch.einsum("...d,id->...i", d, up.double())
    return torch.einsum("...i,di->...d", hidden, down.double()).to(x.dtype)


def mlp_args(seed: int, *lead: int) -> Callable[[], Any]:
    return lambda: (
        randn(seed, *lead, 12), randn(seed + 1, 20, 12), randn(seed + 2, 20, 12), randn(seed + 3, 12, 20, scale=0.3),
    )  # fmt: skip


# 01.6 the naive loop


MODEL = TinyModel()


def drive(function: Any, prompt: list[int], max_new_tokens: int, eos_id: int | None) -> dict[str, Any]:
    """Run the loop with a model that notes how many tokens each call was fed."""
    fed: list[int] = []

    def model(ids: Any) -> Tensor:
        ids = ids.reshape(-1).tolist() if isinstance(ids, Tensor) else list(ids)
        if not ids or not all(type(i) is int and 0 <= i < MODEL.vocab for i in ids):
            raise TypeError(f"model takes a non-empty list of token ids from 0 to {MODEL.vocab - 1}, got {ids!r}")
        fed.append(len(ids))
        if len(fed) > 50:
            raise RuntimeError("the model was called more than 50 times; when does the loop end?")
        return MODEL(ids)

    tokens = function(model, prompt, max_new_tokens, eos_id)
    if isinstance(tokens, list) and any(type(t) is not int for t in tokens):
        raise Wrong("the tokens are not plain ints", "`int(...)` or `.item()` takes the number out of a tensor")
    return {"tokens": tokens, "tokens fed in each call": fed}


def generate(model: Any, prompt: list[int], max_new_tokens: int, eos_id: int | None) -> list[int]:
    return _generate(model, prompt, max_new_tokens, eos_id)


def _generate(
    model: Any, prompt: list[int], limit: int, eos: int | None, *, row: int = -1, last_only: bool = False,
    keep_eos: bool = True, whole: bool = False,
) -> list[int]:  # fmt: skip
    new: list[int] = []
    while len(new) < limit:
        ids = (prompt + new)[-1:] if last_only and new else prompt + new
        token = int(model(ids)[row].argmax())
        if token != eos or keep_eos:
            new.append(token)
        if token == eos:
            break
    return prompt + new if whole else new


PROMPT_IDS = [3, 1, 4, 15, 9]
FREE = _generate(MODEL, PROMPT_IDS, 8, None)
STOP = next(t for t in FREE if FREE.index(t) >= 2)  # a token that first comes up third or later


LESSON = Lesson(
    "01",
    "naive_decode",
    [
        prediction(
            "01.1",
            "Predict the cost of forgetting",
            [
                Answer(
                    "tokens_naive", NAIVE, "tokens", rel=1e-5,
                    why="without a memory each step pushes the whole text through the model again",
                    hint="step i (from 0) feeds the prompt and the i tokens generated so far; add up 100 steps",
                    slips={
                        (NAIVE + NEW) / NAIVE: "the first step feeds the prompt alone; the last token is never fed",
                        PROMPT * NEW / NAIVE: "the text grows: each step also feeds the tokens generated so far",
                        (PROMPT + NEW) * NEW / NAIVE: "the text grows; it has its full length only at the end",
                    },
                ),
                Answer(
                    "tokens_cached", PROMPT + NEW - 1, "tokens", rel=1e-5,
                    why="with a memory each token passes through the model once",
                    hint="the prompt once, then each new token once, except the last, which nobody reads",
                    slips={(PROMPT + NEW) / (PROMPT + NEW - 1): "the last new token is never fed back"},
                ),
                Answer(
                    "tflop_naive", 2 * PARAMETERS * NAIVE / 1e12, "TFLOP", rel=0.01,
                    why="every parameter of a matrix takes part in one multiply-add for each token",
                    hint="2 FLOPs x parameters x tokens, divided by 1e12",
                    slips={
                        0.5: "a multiply-add is two FLOPs",
                        1e12: "that is in FLOP; the key asks for TFLOP (1e12)",
                        1e3: "that is in GFLOP; the key asks for TFLOP (1e12)",
                    },
                ),
            ],
        ),
        Task(
            "01.2", "rms_norm", "RMSNorm", rms_norm,
            [
                Case("two rows", lambda: (randn(1, 2, 8), randn(2, 8), 1e-5)),
                Case("small numbers", lambda: (randn(3, 4, 8, scale=1e-3), randn(4, 8), 1e-5),
                     why="eps keeps a row of zeros finite, and is added under the root"),
                Case("three dimensions", lambda: (randn(5, 2, 3, 8) + 1, randn(6, 8), 1e-6),
                     why="each vector of the last dimension is scaled on its own"),
                Case("float16 with values of 300", lambda: (randn(7, 3, 8, scale=300, dtype=torch.float16),
                                                            torch.ones(8, dtype=torch.float16), 1e-5),
                     rel=4e-3, abs=1e-3, why="300 squared is beyond float16: square in float32, return x's dtype",
                     hint="convert x with .float() before squaring, and the result back with .to(x.dtype)"),
            ],
            mistakes=[
                Mistake("RMSNorm does not subtract the mean; that is LayerNorm", layer_norm),
                Mistake("divide by the root of the mean of the squares, not of their sum", sum_not_mean),
                Mistake("eps is added under the root", eps_outside),
                Mistake("the squares overflow float16: compute in float32", norm_in_input_dtype),
                Mistake("the result is multiplied by weight", lambda x, w, e: rms_norm(x, torch.ones_like(w), e)),
                Mistake("weight multiplies as it is, not 1 + weight", lambda x, w, e: rms_norm(x, 1 + w.double(), e)),
            ],
        ),
        Task(
            "01.3", "rope", "Rotary position embedding", rope,
            [
                Case("from position 0", lambda: (randn(11, 4, 2, 8), 0, 10000.0)),
                Case("one token at position 5", lambda: (randn(12, 1, 3, 8), 5, 10000.0),
                     why="a decode step feeds one token, whose position is its place in the text"),
                Case("a chunk from position 100", lambda: (randn(13, 3, 1, 16), 100, 100000.0),
                     why="the second chunk of a prompt does not start at 0"),
            ],
            abs=1e-4,
            mistakes=[
                Mistake("positions start at `offset`, not at 0", lambda x, o, t: rope(x, 0, t)),
                Mistake("the rotation has the wrong sign: x1 cos - x2 sin, x2 cos + x1 sin",
                        lambda x, o, t: _rope(x, o, t, sign=-1)),
                Mistake("element i pairs with i + D/2 (rotate-half), not with its neighbour",
                        lambda x, o, t: _rope(x, o, t, interleaved=True)),
                Mistake("the exponent is 2 i / D", lambda x, o, t: _rope(x, o, t, per=1)),
                Mistake("theta is an argument", lambda x, o, t: _rope(x, o, 1e4 if t != 1e4 else 1e5)),
            ],
        ),
        Task(
            "01.4", "attention", "Causal attention with grouped heads", attention,
            [
                Case("three tokens, one head", qkv(21, 3, 3, 1, 1)),
                Case("9 query heads share 3 KV heads", qkv(24, 5, 5, 9, 3), points=2,
                     why="query head h reads KV head h // (H / H_kv)"),
                Case("the last token of 7", qkv(27, 1, 7, 2, 2), why="a decode step: one query sees all 7 keys"),
                Case("the last 3 tokens of 8", qkv(30, 3, 8, 4, 2), why="a chunk: the mask is shifted by S - T"),
                Case("scores of several hundred", qkv(33, 4, 4, 2, 1, scale=300.0),
                     why="exp overflows unless the maximum is subtracted",
                     hint="subtract the maximum of each row before exp, or use torch.softmax"),
            ],
            abs=1e-4,
            mistakes=[
                Mistake("a token must not see later ones: mask the future",
                        lambda q, k, v: _attention(q, k, v, causal=False)),
                Mistake("the queries are the last T of S positions: shift the mask by S - T",
                        lambda q, k, v: _attention(q, k, v, shift=0)),
                Mistake("divide the scores by sqrt(D)", lambda q, k, v: _attention(q, k, v, scale=1.0)),
                Mistake("divide the scores by sqrt(D), not by D",
                        lambda q, k, v: _attention(q, k, v, scale=1 / q.shape[-1])),
                Mistake("neighbouring query heads share a KV head (repeat_interleave, not repeat)",
                        lambda q, k, v: _attention(q, k, v, tile=True)),
            ],
        ),
        Task(
            "01.5", "swiglu", "The SwiGLU block", swiglu,
            [
                Case("two rows", mlp_args(41, 2)),
                Case("three dimensions", mlp_args(45, 2, 3)),
            ],
            abs=1e-4,
            mistakes=[
                Mistake("silu goes on the gate branch, not on the up branch", lambda x, g, u, d: swiglu(x, u, g, d)),
                Mistake("silu(g) is g * sigmoid(g), not sigmoid(g)",
                        lambda x, g, u, d: _swiglu(x, g, u, d, torch.sigmoid)),
                Mistake("the activation is silu, not gelu",
                        lambda x, g, u, d: _swiglu(x, g, u, d, torch.nn.functional.gelu)),
                Mistake("the gate needs its activation", lambda x, g, u, d: _swiglu(x, g, u, d, lambda a: a)),
            ],
        ),
        Task(
            "01.6", "generate", "The naive loop", generate,
            [
                Case("eight tokens, no end token", lambda: (list(PROMPT_IDS), 8, None), run=drive, points=2,
                     why="each step feeds the whole text and takes the best token after its last position"),
                Case("stops at the end token", lambda: (list(PROMPT_IDS), 8, STOP), run=drive,
                     why="the end token is part of the output, and nothing follows it"),
                Case("one token; and none", lambda: (list(PROMPT_IDS), None), points=0.5,
                     run=lambda f, prompt, eos: [drive(f, prompt, 1, eos), drive(f, prompt, 0, eos)],
                     why="max_new_tokens is exact"),
            ],
            mistakes=[
                Mistake("return the new tokens only, without the prompt", lambda *a: _generate(*a, whole=True)),
                Mistake("the next token is predicted at the last position, row -1", lambda *a: _generate(*a, row=0)),
                Mistake("this model keeps nothing: feed the whole text at every step",
                        lambda *a: _generate(*a, last_only=True)),
                Mistake("stop when eos_id comes up", lambda m, p, n, e: _generate(m, p, n, None)),
                Mistake("the end token belongs to the output", lambda *a: _generate(*a, keep_eos=False)),
                Mistake("one token too many: max_new_tokens is exact", lambda m, p, n, e: _generate(m, p, n + 1, e)),
                Mistake("one token too few: max_new_tokens is exact",
                        lambda m, p, n, e: _generate(m, p, max(n - 1, 0), e)),
            ],
        ),
    ],
)  # fmt: skip
