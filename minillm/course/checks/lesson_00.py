"""Checks of exercise 00: the roofline. References in plain arithmetic, apart from solutions/ and the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minillm.config import ModelConfig
from minillm.course.tasks import Answer, Case, Lesson, Mistake, Task, prediction

LLAMA_8B = ModelConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
    head_dim=128, tie_word_embeddings=False,
)  # fmt: skip
SMOLLM2 = ModelConfig()
QWEN2 = ModelConfig(
    model_type="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14,
    num_kv_heads=2, head_dim=64, attention_bias=True,
)  # fmt: skip
NARROW = SMOLLM2.replace(hidden_size=512, num_heads=12, num_kv_heads=4, head_dim=64, num_layers=2)  # 12 * 64 is not 512

H200_FLOPS, H200_BANDWIDTH = 989e12, 4.8e12


# 00.2 arithmetic intensity


def intensity(m: int, n: int, k: int, bytes_per_element: float) -> float:
    return 2 * m * n * k / (bytes_per_element * (m * k + k * n + m * n))


# 00.3 which limit binds


def limiter(batch: int, n: int, k: int, bytes_per_element: float, peak_flops: float, bandwidth: float) -> str:
    work = 2 * batch * n * k / peak_flops
    traffic = bytes_per_element * (batch * k + k * n + batch * n) / bandwidth
    return "compute" if work >= traffic else "memory"


def sweep(function: Any, batches: Sequence[int], bytes_per_element: float, peak: float, bandwidth: float) -> list[str]:
    """One layer of 4096 x 4096 at each batch. A whole sweep is one case: a constant label must not earn points."""
    return [function(batch, 4096, 4096, bytes_per_element, peak, bandwidth) for batch in batches]


# 00.4 bytes of weights


def layer_elements(c: Any) -> int:
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention = c.hidden_size * (q + 2 * kv) + q * c.hidden_size
    bias = (q + 2 * kv) if c.attention_bias else 0
    return attention + bias + 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size


def weight_bytes(config: Any, bytes_per_element: int) -> tuple[int, int]:
    body = config.num_layers * layer_elements(config) + config.hidden_size
    table = config.vocab_size * config.hidden_size
    tables = 1 if config.tie_word_embeddings else 2
    return (body + tables * table) * bytes_per_element, (body + table) * bytes_per_element


def reads_all_it_stores(config: Any, bytes_per_element: int) -> tuple[int, int]:
    stored, _ = weight_bytes(config, bytes_per_element)
    return stored, stored


def ignores_tying(config: Any, bytes_per_element: int) -> tuple[int, int]:
    return weight_bytes(config.replace(tie_word_embeddings=False), bytes_per_element)


def forgets_the_head(config: Any, bytes_per_element: int) -> tuple[int, int]:
    stored, read = weight_bytes(config, bytes_per_element)
    return stored, read - config.vocab_size * config.hidden_size * bytes_per_element


def kv_like_q(config: Any, bytes_per_element: int) -> tuple[int, int]:
    return weight_bytes(config.replace(num_kv_heads=config.num_heads), bytes_per_element)


def two_mlp_matrices(config: Any, bytes_per_element: int) -> tuple[int, int]:
    less = config.num_layers * config.hidden_size * config.intermediate_size * bytes_per_element
    stored, read = weight_bytes(config, bytes_per_element)
    return stored - less, read - less


def without_norms(config: Any, bytes_per_element: int) -> tuple[int, int]:
    less = (2 * config.num_layers + 1) * config.hidden_size * bytes_per_element
    stored, read = weight_bytes(config, bytes_per_element)
    return stored - less, read - less


# 00.5 time of a list of operators


def step_time(
    ops: list[tuple[float, float]], peak_flops: float, bandwidth: float, overhead: float
) -> tuple[float, float]:
    lower = sum(max(flops / peak_flops, size / bandwidth) for flops, size in ops)
    upper = sum(flops / peak_flops + size / bandwidth for flops, size in ops)
    return lower + len(ops) * overhead, upper + len(ops) * overhead


def max_of_sums(ops: Any, peak_flops: float, bandwidth: float, overhead: float) -> tuple[float, float]:
    lower = max(sum(f for f, _ in ops) / peak_flops, sum(b for _, b in ops) / bandwidth)
    return lower + len(ops) * overhead, step_time(ops, peak_flops, bandwidth, overhead)[1]


def one_overhead(ops: Any, peak_flops: float, bandwidth: float, overhead: float) -> tuple[float, float]:
    lower, upper = step_time(ops, peak_flops, bandwidth, 0.0)
    return lower + overhead, upper + overhead


def swapped_bounds(ops: Any, peak_flops: float, bandwidth: float, overhead: float) -> tuple[float, float]:
    return step_time(ops, peak_flops, bandwidth, overhead)[::-1]


# 00.6 tokens a second


def decode_rate(config: Any, batch: int, context: int, bytes_per_element: int, bandwidth: float) -> float:
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * context * bytes_per_element
    return batch * bandwidth / (weight_bytes(config, bytes_per_element)[1] + batch * cache)


def cache_by_query_heads(c: Any, batch: int, context: int, bytes_per_element: int, bandwidth: float) -> float:
    cache = 2 * c.num_layers * c.num_heads * c.head_dim * context * bytes_per_element
    return batch * bandwidth / (weight_bytes(c, bytes_per_element)[1] + batch * cache)


def weights_for_each(c: Any, batch: int, context: int, bytes_per_element: int, bandwidth: float) -> float:
    return decode_rate(c, 1, context, bytes_per_element, bandwidth)


def cache_once(c: Any, batch: int, context: int, bytes_per_element: int, bandwidth: float) -> float:
    return batch * decode_rate(c, 1, context, bytes_per_element, bandwidth)


def no_cache(c: Any, batch: int, context: int, bytes_per_element: int, bandwidth: float) -> float:
    return decode_rate(c, batch, 0, bytes_per_element, bandwidth)


def keys_only(c: Any, batch: int, context: int, bytes_per_element: int, bandwidth: float) -> float:
    cache = c.num_layers * c.num_kv_heads * c.head_dim * context * bytes_per_element
    return batch * bandwidth / (weight_bytes(c, bytes_per_element)[1] + batch * cache)


def steps_not_tokens(c: Any, batch: int, context: int, bytes_per_element: int, bandwidth: float) -> float:
    return decode_rate(c, batch, context, bytes_per_element, bandwidth) / batch


LESSON = Lesson(
    "00",
    "roofline",
    [
        prediction(
            "00.1",
            "Predict a 70 B decode step",
            [
                Answer(
                    "ms_per_token", 70.0, "milliseconds",
                    why="at batch 1 every weight crosses the memory bus once for each token",
                    hint="70e9 parameters, 2 bytes each, divided by 2e12 bytes a second, is in seconds",
                    slips={
                        0.5: "bf16 is two bytes, not one",
                        8: "that counts bits; bandwidth is given in bytes a second",
                        2: "bf16 is two bytes, not four",
                        0.001: "that is in seconds; the key asks for milliseconds",
                    },
                ),
                Answer(
                    "tokens_per_second", 1000 / 70, "tokens/s",
                    why="one stream, one token a step",
                    hint="the inverse of the time of one token, in seconds",
                    slips={
                        2: "bf16 is two bytes, not one",
                        0.125: "that counts bits; bandwidth is given in bytes a second",
                        0.5: "bf16 is two bytes, not four",
                        0.001: "that is tokens in a millisecond; the key asks for tokens in a second",
                    },
                ),
            ],
        ),
        Task(
            "00.2", "intensity", "Arithmetic intensity of a matrix product", intensity,
            [
                Case("a square product", lambda: (4096, 4096, 4096, 2), why="prefill: many rows share each weight"),
                Case("one row", lambda: (1, 4096, 14336, 2), why="decode at batch 1: a GEMV, close to 1 FLOP a byte"),
                Case("an odd shape in fp32", lambda: (3, 5, 7, 4), why="all three matrices move: A, B and C"),
            ],
            mistakes=[
                Mistake("a multiply-add is two FLOPs", lambda m, n, k, b: intensity(m, n, k, b) / 2),
                Mistake(
                    "the result C is written to memory as well",
                    lambda m, n, k, b: 2 * m * n * k / (b * (m * k + k * n)),
                ),
                Mistake(
                    "only the weights were counted; the activations A and C move too", lambda m, n, k, b: 2 * m / b
                ),
                Mistake("each element is `bytes_per_element` bytes", lambda m, n, k, b: intensity(m, n, k, 1)),
                Mistake("that is bytes a FLOP, not FLOPs a byte", lambda m, n, k, b: 1 / intensity(m, n, k, b)),
            ],
        ),
        Task(
            "00.3", "limiter", "Which limit binds", limiter,
            [
                Case(
                    "bf16 on an H200", lambda: ([1, 8, 64, 200, 215, 300, 1024], 2, H200_FLOPS, H200_BANDWIDTH),
                    run=sweep, points=2, why="memory-bound in decode, compute-bound in prefill: no fixed label",
                ),
                Case(
                    "4 bytes on a laptop", lambda: ([1, 2, 4, 8, 16, 32, 64], 4, 200e9, 40e9),
                    run=sweep, why="the ridge is a property of the machine and the dtype, not a constant",
                ),
            ],
            mistakes=[
                Mistake("a label that never changes: compare the two times for each batch", lambda *a: "memory"),
                Mistake("a label that never changes: compare the two times for each batch", lambda *a: "compute"),
                Mistake(
                    "the two labels are swapped: the larger time is the limit",
                    lambda *a: {"memory": "compute", "compute": "memory"}[limiter(*a)],
                ),
                Mistake(
                    "bytes per element are missing from the traffic",
                    lambda b, n, k, e, p, w: limiter(b, n, k, 1, p, w),
                ),
                Mistake(
                    "a multiply-add is two FLOPs", lambda b, n, k, e, p, w: limiter(b, n, k, e, 2 * p, w)
                ),
                Mistake(
                    "only the weights were counted; at large batches the activations move too",
                    lambda b, n, k, e, p, w: "compute" if 2 * b / e >= p / w else "memory",
                ),
            ],
        ),
        Task(
            "00.4", "weight_bytes", "Bytes of the weights", weight_bytes,
            [
                Case("a tied model (SmolLM2-135M)", lambda: (SMOLLM2, 2), why="one table is both embedding and head"),
                Case("an untied model (Llama 8 B)", lambda: (LLAMA_8B, 2), why="two tables stored, one read in a step"),
                Case("q, k and v biases, fp32 (Qwen2 0.5 B)", lambda: (QWEN2, 4), why="Qwen2 has biases on q, k and v"),
                Case("heads wider than the model", lambda: (NARROW, 2), why="num_heads * head_dim is not D here"),
            ],
            rel=0.0, abs=0.5,
            mistakes=[
                Mistake("a step reads one row of the embedding table, not all of it", reads_all_it_stores, 0.5),
                Mistake("with a tied head the table is stored once, not twice", ignores_tying, 0.5),
                Mistake("the head multiplies by the whole table: it is read, tied or not", forgets_the_head, 0.5),
                Mistake("k and v have num_kv_heads heads, fewer than q (GQA)", kv_like_q),
                Mistake("the MLP has three matrices: gate, up and down", two_mlp_matrices),
                Mistake("two norms in a layer and one at the end have weights too", without_norms, 0.5),
                Mistake("multiply by bytes_per_element", lambda c, b: weight_bytes(c, 1)),
            ],
        ),
        Task(
            "00.5", "step_time", "Time of a step, lower and upper bound", step_time,
            [
                Case(
                    "a memory-bound and a compute-bound operator",
                    lambda: ([(1e9, 4e9), (8e12, 1e9)], 1e15, 4e12, 0.0),
                    why="operators depend on each other: the bytes of one cannot hide under the FLOPs of the next",
                ),
                Case("overhead of each call", lambda: ([(1e6, 1e6)] * 25, 1e12, 1e11, 5e-6), why="25 calls, not 1"),
                Case(
                    "one operator, and none", lambda: ([(3e9, 2e9)], 1e12, 1e12, 1e-6),
                    run=lambda f, ops, *a: [f(ops, *a), f([], *a)], why="an empty step takes no time",
                ),
            ],
            rel=1e-6, abs=1e-15,
            mistakes=[
                Mistake("take the maximum for each operator, then add, not the maximum of sums", max_of_sums, 0.5),
                Mistake("every operator pays the overhead, not the step as a whole", one_overhead, 0.5),
                Mistake("the bounds are swapped: the lower one is perfect overlap", swapped_bounds),
                Mistake(
                    "the overhead is missing", lambda o, p, w, h: step_time(o, p, w, 0.0)
                ),
                Mistake(
                    "both bounds are the same: without overlap the two times add up",
                    lambda o, p, w, h: (step_time(o, p, w, h)[0],) * 2,
                ),
            ],
        ),
        Task(
            "00.6", "decode_rate", "Tokens a second at a batch and a context", decode_rate,
            [
                Case("one stream, short", lambda: (LLAMA_8B, 1, 128, 2, H200_BANDWIDTH), why="nearly all weights"),
                Case("batch 32, 4096 tokens", lambda: (LLAMA_8B, 32, 4096, 2, H200_BANDWIDTH), points=2,
                     why="the weights are shared by the batch, the caches are not"),
                Case("batch 8 on the embedded model, fp32", lambda: (SMOLLM2, 8, 1000, 4, 40e9)),
            ],
            rel=2e-3,
            mistakes=[
                Mistake("the batch shares one read of the weights", weights_for_each),
                Mistake("each sequence reads a cache of its own", cache_once),
                Mistake("the KV cache of the whole context is read too", no_cache),
                Mistake("the cache holds num_kv_heads heads, not num_heads (GQA)", cache_by_query_heads),
                Mistake("keys and values: two tensors a layer", keys_only),
                Mistake("a step gives one token to each sequence of the batch", steps_not_tokens),
            ],
        ),
    ],
)  # fmt: skip
