"""FLOPs and bytes of every operator of one engine step. Lesson 00 builds this; lesson 02 adds the KV cache.

A step is a list of rows, one a sequence: (new tokens it computes, context tokens whose KV exists).
A prefill of 128 tokens is [(128, 0)], a decode step of two sequences [(1, 200), (1, 77)], a mixed batch both.
There are no phases in these formulas, only rows.

FLOPs are those of matrix products, two a multiply-add, as torch's FlopCounterMode counts them; norms,
RoPE and SiLU are below one percent and counted as bytes only. Symbols: t new tokens, L layers, D hidden,
I intermediate, V vocabulary, H query heads, H_kv KV heads, d head_dim, b bytes an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.config import ModelConfig, dtype_name
from minillm.errors import MinillmError

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Row = tuple[int, int]

# torch operator calls of one operator in one layer of the plain engine, views not counted; a test counts them on
# the real transformer, and so does lesson 07.
CALLS = {
    "embedding": 1, "rms_norm": 8, "qkv": 1, "qk_norm": 17, "rope": 5, "kv_write": 2, "attention": 1, "o_proj": 1,
    "residual": 1, "gate_up": 1, "silu_mul": 2, "down": 1, "lm_head": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Op:
    """One operator, summed over the layers of a step. Bytes are split by what they are.

    weights      parameters read; of the embedding table only the rows looked up
    kv_read      keys and values of the context, read from the cache
    kv_written   keys and values of the new tokens, written to the cache
    activations_read, activations_written   what passes between operators and a fused kernel could keep
    """

    name: str
    kind: str  # "linear", "quantized", "attention", "elementwise" or "gather": which ceiling it meets
    flops: int = 0
    weights: int = 0
    kv_read: int = 0
    kv_written: int = 0
    activations_read: int = 0
    activations_written: int = 0
    calls: int = 0
    rows: int = 0  # rows of the matrix product: tokens computed together

    @property
    def bytes_read(self) -> int:
        return self.weights + self.kv_read + self.activations_read

    @property
    def bytes_written(self) -> int:
        return self.kv_written + self.activations_written

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def compulsory_bytes(self) -> int:
        """What must cross the memory bus however well the operators are fused: weights and KV."""
        return self.weights + self.kv_read + self.kv_written


def element_size(dtype: str) -> int:
    return BYTES[dtype_name(dtype)]


def parameter_count(config: ModelConfig) -> int:
    """Parameters, a tied head counted once: what `sum(p.numel())` gives."""
    c = config
    table = c.vocab_size * c.hidden_size
    return table * (1 if c.tie_word_embeddings else 2) + c.num_layers * sum(_layer(c).values()) + c.hidden_size


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes the parameters occupy."""
    return parameter_count(config) * element_size(dtype)


def step_weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of parameters that a step reads whole: all but an untied embedding table, of which it reads rows.

    A tied table is read whole after all, by the head.
    """
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return (parameter_count(config) - table) * element_size(dtype)


def kv_bytes_per_token(config: ModelConfig, dtype: str) -> int:
    """2 L H_kv d b: a key and a value of every layer and KV head."""
    return 2 * config.num_layers * config.kv_size * element_size(dtype)


def _layer(c: ModelConfig) -> dict[str, int]:
    """Parameters of one layer by operator."""
    qkv = c.q_size + 2 * c.kv_size
    return {
        "rms_norm": 2 * c.hidden_size,
        "qkv": qkv * c.hidden_size + (qkv if c.attention_bias else 0),
        "qk_norm": 2 * c.head_dim if c.qk_norm else 0,
        "o_proj": c.q_size * c.hidden_size + (c.hidden_size if c.attention_out_bias else 0),
        "gate_up": 2 * c.intermediate_size * (c.hidden_size + (1 if c.mlp_bias else 0)),
        "down": c.intermediate_size * c.hidden_size + (c.hidden_size if c.mlp_bias else 0),
    }


def attention_pairs(rows: Sequence[Row], masked: str = "exact") -> int:
    """Query-key pairs: causal ones (`exact`), or the full rectangle that a dense product computes (`dense`).

    The new token i of n sees the context c and the tokens 1..i: n c + n (n + 1) / 2 pairs.
    """
    if masked not in ("exact", "dense"):
        raise MinillmError(f"attention {masked!r} is not known; use 'exact' or 'dense'")
    return sum(n * c + (n * (n + 1) // 2 if masked == "exact" else n * n) for n, c in rows)


def step(
    config: ModelConfig,
    rows: Sequence[Row],
    dtype: str = "bfloat16",
    *,
    kv_cache: bool = True,
    attention: str = "exact",
    logits_rows: int | None = None,
    weights_as: str | None = None,
) -> list[Op]:
    """Operators of one step, in order. `logits_rows`: tokens that get logits; None is one a sequence.

    Without a KV cache nothing is kept: the context of every row must then be 0. `weights_as`: a scheme of quant.py
    for the matrices of the layers, "int8" or "int4"; activations, norms and head stay in `dtype`. Such a product has
    a kernel of its own, so the rate of the library's products says nothing of it: its kind is "quantized".
    """
    rows = [(int(n), int(c)) for n, c in rows]
    if not rows or any(n < 1 or c < 0 for n, c in rows):
        raise MinillmError(f"a step needs rows of (new tokens >= 1, context >= 0), got {rows!r}")
    if not kv_cache and any(c for _, c in rows):
        raise MinillmError("without a KV cache there is no context: every row recomputes all its tokens, (n, 0)")
    c, b, L = config, element_size(dtype), config.num_layers
    t = sum(n for n, _ in rows)
    heads = len(rows) if logits_rows is None else logits_rows
    context = sum(n for _, n in rows)
    weights = {name: L * n * b for name, n in _layer(c).items()}
    # Decode rows are attended together; rows with several new tokens one after the other, then joined.
    pieces = 1 if all(n == 1 for n, _ in rows) else len(rows)
    attention_calls = CALLS["attention"] if pieces == 1 else pieces + 1
    D, q, kv, inner = c.hidden_size, c.q_size, c.kv_size, c.intermediate_size

    def linear(name: str, n_in: int, n_out: int) -> Op:
        kind, held = "linear", weights[name]
        if weights_as is not None:
            from minillm.quant import scheme_of  # torch is needed only here

            kind, held = "quantized", held + L * (scheme_of(weights_as).weight_bytes(n_out, n_in) - n_in * n_out * b)
        return Op(
            name, kind, flops=2 * L * t * n_in * n_out, weights=held, activations_read=L * t * n_in * b,
            activations_written=L * t * n_out * b, calls=L * CALLS[name], rows=t,
        )  # fmt: skip

    def elementwise(name: str, read: int, written: int, times: int = L, weight: int = 0, kv_written: int = 0) -> Op:
        return Op(
            name, "elementwise", weights=weight, kv_written=kv_written, activations_read=read * b,
            activations_written=written * b, calls=times * CALLS[name], rows=t,
        )  # fmt: skip

    ops = [
        Op("embedding", "gather", weights=t * D * b, activations_written=t * D * b, calls=CALLS["embedding"], rows=t),
        elementwise("rms_norm", (2 * L + 1) * t * D, (2 * L + 1) * t * D, 2 * L + 1, weights["rms_norm"] + D * b),
        linear("qkv", D, q + 2 * kv),
    ]
    if c.qk_norm:
        ops.append(elementwise("qk_norm", L * t * (q + kv), L * t * (q + kv), weight=weights["qk_norm"]))
    ops.append(elementwise("rope", L * t * (q + kv), L * t * (q + kv)))
    if kv_cache:
        ops.append(elementwise("kv_write", L * t * 2 * kv, 0, L * pieces, kv_written=L * t * 2 * kv * b))
    ops += [
        Op(
            "attention", "attention", flops=4 * L * c.num_heads * c.head_dim * attention_pairs(rows, attention),
            kv_read=L * context * 2 * kv * b, activations_read=L * t * (q + 2 * kv) * b,
            activations_written=L * t * q * b, calls=L * attention_calls, rows=t,
        ),
        linear("o_proj", q, D),
        elementwise("residual", 4 * L * t * D, 2 * L * t * D, 2 * L),
        linear("gate_up", D, 2 * inner),
        elementwise("silu_mul", L * t * 2 * inner, L * t * inner),
        linear("down", inner, D),
        Op(
            "lm_head", "linear", flops=2 * heads * D * c.vocab_size, weights=D * c.vocab_size * b,
            activations_read=heads * D * b, activations_written=heads * c.vocab_size * b, calls=CALLS["lm_head"],
            rows=heads,
        ),
    ]  # fmt: skip
    return ops


def generation(
    config: ModelConfig,
    prompts: Sequence[int],
    new_tokens: int | Sequence[int],
    dtype: str = "bfloat16",
    *,
    kv_cache: bool = True,
    attention: str = "exact",
) -> list[list[Op]]:
    """The steps that write `new_tokens` tokens (one number, or one for each) after prompts of these lengths.

    Prompts are computed one after the other, each giving a first token; then all are decoded together, each
    until it has its tokens. The last token of a sequence is never computed. Cached, a decode step computes one
    token a sequence; without a cache every step computes everything again.
    """
    counts = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else list(new_tokens)
    if not prompts or min(prompts) < 1 or len(counts) != len(prompts) or min(counts) < 1:
        raise MinillmError(f"a generation needs prompts and new tokens >= 1, got {list(prompts)!r} and {new_tokens!r}")
    steps = [[(p, 0)] for p in prompts]
    for i in range(1, max(counts)):
        running = [p for p, n in zip(prompts, counts, strict=True) if n > i]
        steps.append([(1, p + i - 1) if kv_cache else (p + i, 0) for p in running])
    return [step(config, rows, dtype, kv_cache=kv_cache, attention=attention) for rows in steps]


def continuous(
    prompts: Sequence[int], new_tokens: Sequence[int], budget: int, seqs: int, shared: int = 0
) -> list[tuple[list[Row], int]]:
    """Steps of requests that join and leave a running batch (lesson 09): the rows, and how many of them give a token.

    A step computes at most `budget` tokens, and at most `seqs` requests run. Decodes go first, then prompts in order of
    arrival, cut where the budget ends. The first `shared` tokens of every prompt are the same: once they are computed,
    a request that starts later does not repeat them.
    """
    if not prompts or len(prompts) != len(new_tokens) or min(*prompts, *new_tokens, budget, seqs) < 1:
        raise MinillmError("a schedule needs prompts and new tokens >= 1, one for each, a budget and a limit >= 1")
    waiting = list(range(len(prompts)))
    computed: dict[int, int] = {}  # of those that run, in order of arrival
    known, steps = 0, []
    while waiting or computed:
        room, rows = budget, []
        for r in sorted(computed, key=lambda r: computed[r] < prompts[r]):  # stable: decodes, then prompts
            new = min(room, max(1, prompts[r] - computed[r]))
            if new:
                rows.append((r, new, computed[r]))
                room -= new
        while waiting and room and len(computed) < seqs:
            r = waiting.pop(0)
            start = min(known, prompts[r] - 1)
            new = min(room, prompts[r] - start)
            rows.append((r, new, start))
            room -= new
            computed[r] = start
        for r, new, start in rows:
            computed[r] = start + new
            known = max(known, min(shared, computed[r]))
        steps.append(([(new, start) for _, new, start in rows], sum(n + c >= prompts[r] for r, n, c in rows)))
        computed = {r: c for r, c in computed.items() if c < prompts[r] + new_tokens[r] - 1}
    return steps


def naive(config: ModelConfig, prompt: int, new_tokens: int, dtype: str = "bfloat16") -> list[list[Op]]:
    """Recompute everything at every step (lesson 01): FLOPs grow with the square of the length."""
    return generation(config, [prompt], new_tokens, dtype, kv_cache=False)


def cached(config: ModelConfig, prompt: int, new_tokens: int, dtype: str = "bfloat16") -> list[list[Op]]:
    """Compute each token once and keep its keys and values (lesson 02)."""
    return generation(config, [prompt], new_tokens, dtype)


def total(ops: Sequence[Op]) -> Op:
    """All operators as one: their FLOPs, bytes and calls summed."""
    names = ("flops", "weights", "kv_read", "kv_written", "activations_read", "activations_written", "calls")
    sums = {name: sum(getattr(op, name) for op in ops) for name in names}
    return Op("total", "linear", **sums, rows=max((op.rows for op in ops), default=0))
