"""References and typical mistakes of exercise 02 for what a KV cache costs: intensity of a step, sequences that fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minillm.config import ModelConfig
from minillm.course.checks.kv_store import SMALL
from minillm.course.tasks import Wrong

GIB = 2**30
LLAMA_8B = ModelConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
    head_dim=128, tie_word_embeddings=False,
)  # fmt: skip
LLAMA_8B_PARAMETERS = 7_504_924_672  # without the embedding table, of which a step reads a row for each token


# 02.5 intensity of a step


def step_intensity(
    config: Any, parameters: int, batch: int, start: int, new: int, bytes_per_element: int, ridge: float
) -> tuple[float, str]:
    return step_with(config, parameters, batch, start, new, bytes_per_element, ridge)


def step_with(
    c: Any, parameters: int, batch: int, start: int, new: int, size: int, ridge: float, *, flop: int = 2, kv: int = 2,
    attention: bool = True, attention_by_kv_heads: bool = False, full_square: bool = False, cache: bool = True,
    cache_by_query_heads: bool = False, shared_cache: bool = False, weights_each: bool = False, swap: bool = False,
) -> tuple[float, str]:  # fmt: skip
    flops = moved = 0
    for sequence in range(batch):
        seen = [start + new if full_square else start + i for i in range(1, new + 1)]
        heads = c.num_kv_heads if attention_by_kv_heads else c.num_heads
        flops += flop * parameters * new
        flops += 2 * flop * c.num_layers * heads * c.head_dim * sum(seen) if attention else 0
        heads = c.num_heads if cache_by_query_heads else c.num_kv_heads
        if cache and (sequence == 0 or not shared_cache):
            moved += size * kv * c.num_layers * heads * c.head_dim * (start + new)
        if sequence == 0 or weights_each:
            moved += size * parameters
    labels = ("compute", "memory") if swap else ("memory", "compute")
    return flops / moved, labels[flops / moved >= ridge]


def number(**slip: Any) -> Callable[..., tuple[float, str]]:
    """The step with one slip, as a mistake of the number alone: several slips give the same labels."""
    return lambda *args: (step_with(*args, **slip)[0], "")


H200_RIDGE = 989e12 / 4.8e12


def sweep(function: Any, steps: list[tuple[int, int, int]], ridge: float, part: int) -> list[Any]:
    """Part `part` of the answer for each (batch, start, new). A whole sweep is one case: no constant earns points."""
    found = []
    for batch, start, new in steps:
        answer = function(LLAMA_8B, LLAMA_8B_PARAMETERS, batch, start, new, 2, ridge)
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise Wrong("expected a pair (intensity, label)", "return two values: `return intensity, label`")
        found.append(answer[part])
    return found


def steps_args(steps: list[tuple[int, int, int]], part: int, ridge: float = H200_RIDGE) -> Callable[[], Any]:
    return lambda: (list(steps), ridge, part)


# 02.6 capacity


def capacity(config: Any, parameters: int, context: int, bytes_per_element: int, memory: int) -> tuple[int, int]:
    return capacity_with(config, parameters, context, bytes_per_element, memory)


def capacity_with(
    c: Any, parameters: int, context: int, size: int, memory: int, *, kv: int = 2, heads: int = 0, weights: bool = True,
    up: int = 0, negative: bool = False, reached: bool = False, one_byte: bool = False,
) -> tuple[int, int]:  # fmt: skip
    row = kv * c.num_layers * context * (heads or c.num_kv_heads) * c.head_dim * size
    held = parameters * (1 if one_byte else size)
    fit = (memory - (held if weights else 0)) // row + up
    more = -(-held // row) if reached else held // row + 1
    return (fit if negative else max(fit, 0)), more


def fits(function: Any, machines: list[tuple[Any, int, int, int, int]], part: int) -> list[Any]:
    """Part `part` of the answer for each (config, parameters, context, bytes per element, memory)."""
    return [function(*machine)[part] for machine in machines]


MACHINES = [
    (LLAMA_8B, 8_030_261_248, 8192, 2, 80 * GIB), (LLAMA_8B, 8_030_261_248, 1024, 2, 24 * GIB),
    (LLAMA_8B, 8_030_261_248, 131072, 1, 141 * 10**9), (SMALL, 40_960, 32, 2, 81_920 + 5 * 8192),
]  # fmt: skip
TOO_SMALL = [
    (LLAMA_8B, 8_030_261_248, 1024, 2, 8 * GIB),
    (LLAMA_8B, 8_030_261_248, 131072, 2, 24 * GIB),
    (LLAMA_8B, 8_030_261_248, 4096, 2, 24 * GIB),
]
