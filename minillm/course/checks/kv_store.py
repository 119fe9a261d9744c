"""References and typical mistakes of exercise 02 for what a KV cache stores: append, attend, a cache for the engine.

Loops over single vectors in float64, apart from solutions/ and the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.course.candidate import CandidateError, NotAttempted, OverTimeError
from minillm.course.checks.tiny import randn

Plan = list[tuple[int, int, int]]  # (row, start, num_new) for each sequence of a step

SMALL = ModelConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
)  # fmt: skip


# 02.2 append


def append(cache: Tensor, new: Tensor, plan: Plan) -> None:
    for row, start, num_new in plan:
        if start + num_new > cache.shape[2]:
            raise ValueError(f"row {row} holds {cache.shape[2]} tokens, {start + num_new} are too many")
    append_with(cache, new, plan)


def append_with(
    cache: Tensor, new: Tensor, plan: Plan, *, shift: int = 0, reset: bool = False, by_place: bool = False,
    same_tokens: bool = False, all_rows: bool = False, no_transpose: bool = False,
) -> None:  # fmt: skip
    n = 0
    for place, (row, start, num_new) in enumerate(plan):
        rows = range(cache.shape[0]) if all_rows else [place if by_place else row]
        first = 0 if same_tokens else n
        tokens = new[first : first + num_new]
        block = tokens.reshape(new.shape[1], num_new, -1) if no_transpose else tokens.transpose(0, 1)
        for i in range(num_new):
            for r in rows:
                cache[r, :, (0 if reset else start) + i + shift] = block[:, i]
        n += num_new


def appended(function: Any, cache: Tensor, new: Tensor, plan: Plan) -> Any:
    function(cache, new, plan)
    return function.after[0]


def full(function: Any, cache: Tensor, new: Tensor, plans: Sequence[Plan]) -> list[str]:
    """What comes of each plan. Fitting and overflowing writes are one case: raising always must not earn points."""
    found = []
    for plan in plans:
        try:
            function(cache.clone(), new[: sum(n for _, _, n in plan)], plan)
            found.append("written")
        except (NotAttempted, OverTimeError):
            raise
        except CandidateError as error:
            found.append("ValueError" if str(error).startswith("it raised ValueError") else str(error))
    return found


def cache_args(seed: int, tokens: int, plan: Plan) -> Callable[[], Any]:
    return lambda: (randn(seed, 3, 2, 8, 4), randn(seed + 1, tokens, 2, 4), list(plan))


# 02.3 attention over the cache


def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, start: int) -> Tensor:
    return attend_with(q, k_cache, v_cache, start)


def attend_with(
    q: Tensor, k: Tensor, v: Tensor, start: int, *, extra: int = 1, causal: bool = True, shifted: bool = True,
    whole: bool = False, old_only: bool = False, tile: bool = False, scale: float | None = None,
) -> Tensor:  # fmt: skip
    n, heads, dim = q.shape
    kv_heads, length, _ = k.shape
    out = torch.zeros(q.shape, dtype=torch.float64)
    for h in range(heads):
        g = h % kv_heads if tile else h // (heads // kv_heads)
        for i in range(n):
            seen = (start if shifted else 0) + i + extra if causal else start + n
            seen = length if whole else start if old_only else min(seen, start + n)
            scores = k[g, :seen].double() @ q[i, h].double() * (dim**-0.5 if scale is None else scale)
            out[i, h] = scores.softmax(-1) @ v[g, :seen].double()
    return out.to(q.dtype)


def attend_args(seed: int, n: int, start: int, heads: int, kv_heads: int, rest: float = 1.0) -> Callable[[], Any]:
    """A row of 12 slots, start + n of them written; the others hold numbers of an earlier sequence, or `rest` = NaN."""

    def args() -> tuple[Tensor, Tensor, Tensor, int]:
        k, v = randn(seed + 1, kv_heads, 12, 16), randn(seed + 2, kv_heads, 12, 16)
        k[:, start + n :] *= rest
        v[:, start + n :] *= rest
        return randn(seed, n, heads, 16), k, v, start

    return args


# 02.7 a cache for the engine


class KVCache:
    """K and V as one list of vectors for each (layer, slot, KV head): slow, and nothing can alias."""

    def __init__(self, config: Any, num_rows: int, length: int, dtype: torch.dtype, device: str = "cpu"):
        shape = (config.num_layers, num_rows, config.num_kv_heads, length, config.head_dim)
        self.k, self.v = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        self.dtype = dtype

    def layer(self, layer: int) -> int:
        return layer

    def slot(self, place: int, slot: int) -> int:
        return slot

    def first(self, start: int) -> int:
        return start

    def write(self, layer: int, k: Tensor, v: Tensor, plan: Plan) -> None:
        where = [(self.slot(place, slot), self.first(start), n) for place, (slot, start, n) in enumerate(plan)]
        append(self.k[self.layer(layer)], k.double(), where)
        append(self.v[self.layer(layer)], v.double(), where)

    def forward(self, layer: int, q: Tensor, plan: Plan) -> Tensor:
        out, n = torch.zeros(q.shape, dtype=torch.float64), 0
        for place, (slot, start, new) in enumerate(plan):
            k, v = (x[self.layer(layer), self.slot(place, slot)] for x in (self.k, self.v))
            out[n : n + new] = self.attention(q[n : n + new].double(), k, v, start)
            n += new
        return out.to(self.dtype)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        return attend_with(q, k, v, start)

    def move(self, source: int, target: int, length: int) -> None:
        self.k[:, target, :, :length] = self.k[:, source, :, :length]
        self.v[:, target, :, :length] = self.v[:, source, :, :length]


class OneLayerForAll(KVCache):
    def layer(self, layer: int) -> int:
        return 0


class SlotByPlace(KVCache):
    def slot(self, place: int, slot: int) -> int:
        return place


class StartsAtZero(KVCache):
    def first(self, start: int) -> int:
        return 0


class ReadsTheWholeRow(KVCache):
    def attention(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        return attend_with(q, k, v, start, whole=True)


class MovesNothing(KVCache):
    def move(self, source: int, target: int, length: int) -> None:
        pass


class MovesKeysOnly(KVCache):
    def move(self, source: int, target: int, length: int) -> None:
        self.k[:, target, :, :length] = self.k[:, source, :, :length]


class MovesOneLayer(KVCache):
    def move(self, source: int, target: int, length: int) -> None:
        self.k[0, target, :, :length] = self.k[0, source, :, :length]
        self.v[0, target, :, :length] = self.v[0, source, :, :length]


class MovesByAlias(KVCache):
    def __init__(self, *args: Any):
        super().__init__(*args)
        self.names: dict[int, int] = {}

    def slot(self, place: int, slot: int) -> int:
        return self.names.get(slot, slot)

    def move(self, source: int, target: int, length: int) -> None:
        self.names[target] = source


def serve(kind: Any, steps: list[Any]) -> list[Tensor]:
    """Play engine: `steps` are plans, or ("move", source, target, length). Gives what `forward` gave, step by step."""
    cache = kind(SMALL, 3, 10, torch.float32)
    out = []
    for number, step in enumerate(steps):
        if step[0] == "move":
            cache.move(*step[1:])
            continue
        tokens = sum(n for _, _, n in step)
        for layer in range(SMALL.num_layers):
            seed = 1000 + 10 * number + layer
            k, v = randn(seed, tokens, 2, 16), randn(seed + 300, tokens, 2, 16)
            cache.write(layer, k, v, step)
        for layer in range(SMALL.num_layers):  # after all writes: a layer that shares its memory would show
            out.append(cache.forward(layer, randn(1000 + 10 * number + layer + 600, tokens, 4, 16), step))
    return out


def serve_args(*steps: Any) -> Callable[[], Any]:
    return lambda: (list(steps),)
