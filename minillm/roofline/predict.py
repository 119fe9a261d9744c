"""Seconds from FLOPs, bytes and ceilings: what a step should take, and what it cannot beat. Lesson 00 builds this.

For each operator   t = max(FLOPs / peak, bytes / bandwidth) + overhead * calls,   summed, since each operator
needs the one before. Where the library's matrix products were measured at this row count, a product
takes at least what they took. Two bounds stand beside it:

lower  everything overlaps and everything is fused: only weights and KV cross the bus. Nothing beats it.
upper  nothing overlaps: arithmetic, then bytes, then calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.roofline.cost import Op, continuous, element_size, generation, kv_bytes_per_token, step, total
from minillm.roofline.device import Device

FORMULA = "2"  # raised with every change of a formula in cost.py or here: records name it


@dataclass(frozen=True)
class Term:
    """One operator's share of a prediction, in seconds.

    flops_seconds at the peak, bytes_seconds at the bandwidth, and kernel_seconds at the measured rate of
    the library's products (0 where none was measured). `bound`, "compute" or "memory", compares the first two.
    """

    name: str
    seconds: float
    flops_seconds: float
    bytes_seconds: float
    kernel_seconds: float
    overhead_seconds: float
    flops: int
    bytes: int
    bound: str


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, or of a whole generation.

    intensity is FLOPs a byte, ridge the intensity where arithmetic starts to be the limit; `bound` says
    which side this work lies on. `tokens` are those computed (prefill) or written (generation).
    """

    lower: float
    expected: float
    upper: float
    flops: int
    bytes: int
    compulsory_bytes: int
    intensity: float
    ridge: float
    bound: str
    tokens: int
    terms: tuple[Term, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.expected

    @property
    def tokens_per_s_bounds(self) -> tuple[float, float]:
        """Tokens/s at the upper and at the lower bound of the time."""
        return self.tokens / self.upper, self.tokens / self.lower

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"terms": [asdict(t) for t in self.terms]}


def bound(flops: float, bytes_moved: float, device: Device, dtype: str) -> str:
    """ "compute" when the arithmetic takes at least as long as the bytes, else "memory"."""
    return "compute" if flops / device.peak(dtype) >= bytes_moved / device.roof_bandwidth else "memory"


def term(op: Op, device: Device, dtype: str) -> Term:
    """The roofline of one operator."""
    flops_s, bytes_s = op.flops / device.peak(dtype), op.bytes / device.bandwidth(op.kind)
    kernel_s = op.flops / device.gemm_rate(dtype, op.rows) if op.kind == "linear" and op.flops else 0.0
    overhead = op.calls * device.call_overhead
    limit = "compute" if flops_s >= bytes_s else "memory"
    seconds = max(flops_s, bytes_s, kernel_s) + overhead
    return Term(op.name, seconds, flops_s, bytes_s, kernel_s, overhead, op.flops, op.bytes, limit)


def predict(ops: Sequence[Op], device: Device, dtype: str = "bfloat16", tokens: int = 1) -> Prediction:
    """Predict operators that depend on each other in order."""
    terms = tuple(term(op, device, dtype) for op in ops)
    whole = total(ops)
    return Prediction(
        lower=max(whole.flops / device.peak(dtype), whole.compulsory_bytes / device.roof_bandwidth),
        expected=sum(t.seconds for t in terms),
        upper=sum(max(t.flops_seconds, t.kernel_seconds) + t.bytes_seconds + t.overhead_seconds for t in terms),
        flops=whole.flops, bytes=whole.bytes, compulsory_bytes=whole.compulsory_bytes,
        intensity=whole.flops / whole.bytes, ridge=device.ridge(dtype),
        bound=bound(whole.flops, whole.bytes, device, dtype), tokens=tokens, terms=terms,
    )  # fmt: skip


def predict_step(
    config: ModelConfig, rows: Sequence[tuple[int, int]], device: Device, dtype: str = "bfloat16", *,
    captured: bool = False, **how: Any,
) -> Prediction:  # fmt: skip
    """One step of rows (new tokens, context). `how` goes to `cost.step`. tokens: all new ones.

    captured: the step is a CUDA graph, whose calls cost the host one launch together (lesson 07).
    """
    ops = step(config, rows, dtype, **how)
    if captured:
        ops = [replace(op, calls=int(i == 0)) for i, op in enumerate(ops)]
    return predict(ops, device, dtype, tokens=sum(n for n, _ in rows))


def predict_generation(
    config: ModelConfig,
    prompts: Sequence[int],
    new_tokens: int | Sequence[int],
    device: Device,
    dtype: str = "bfloat16",
    *,
    kv_cache: bool = True,
) -> Prediction:
    """A whole generation, prefill and decode: the sum of its steps, since a token needs the one before it."""
    steps = [predict(ops, device, dtype) for ops in generation(config, prompts, new_tokens, dtype, kv_cache=kv_cache)]
    tokens = new_tokens * len(prompts) if isinstance(new_tokens, int) else sum(new_tokens)
    return _sum(steps, device, dtype, tokens)


def predict_serving(
    config: ModelConfig, prompts: Sequence[int], new_tokens: Sequence[int], device: Device, dtype: str = "bfloat16",
    *, budget: int, seqs: int, shared: int = 0, weights_as: str | None = None,
) -> Prediction:  # fmt: skip
    """Requests in a running batch, as `cost.continuous` schedules them: the sum of its steps.

    The lower bound holds for every schedule. It is the largest of three: all FLOPs at the peak; the least bytes
    (weights as often as the longest answer has tokens, and the KV of decodes but for the shared part); the request with
    the longest answer alone, step after step.
    """
    how: dict[str, Any] = {"weights_as": weights_as}
    rows = continuous(prompts, new_tokens, budget, seqs, shared)
    steps = [predict(step(config, r, dtype, logits_rows=n, **how), device, dtype) for r, n in rows]
    whole = _sum(steps, device, dtype, sum(new_tokens))
    pairs = list(zip(prompts, new_tokens, strict=True))
    known = shared if len(pairs) > 1 else 0
    read = sum((n - 1) * (p - known) + (n - 1) * (n - 2) // 2 for p, n in pairs)
    written = sum(n for r, _ in rows for n, _ in r)
    weights = sum(op.weights for op in step(config, [(1, 0)], dtype, **how)) * max(new_tokens)
    least = weights + kv_bytes_per_token(config, dtype) * (read + written)
    prompt, new = max(pairs, key=lambda pair: pair[1])
    alone = [step(config, [(prompt, 0)], dtype, **how)]
    alone += [step(config, [(1, prompt + i)], dtype, **how) for i in range(new - 1)]
    lower = max(
        whole.flops / device.peak(dtype), least / device.roof_bandwidth,
        sum(predict(ops, device, dtype).lower for ops in alone),
    )  # fmt: skip
    return replace(whole, lower=lower, compulsory_bytes=least)


def _sum(steps: Sequence[Prediction], device: Device, dtype: str, tokens: int) -> Prediction:
    """Steps one after the other: every field summed, term by term."""
    names = list(dict.fromkeys(t.name for p in steps for t in p.terms))
    summed_up = ("lower", "expected", "upper", "flops", "bytes", "compulsory_bytes")
    sums = {n: sum(getattr(p, n) for p in steps) for n in summed_up}
    by_name = {n: [t for p in steps for t in p.terms if t.name == n] for n in names}
    fields = ("seconds", "flops_seconds", "bytes_seconds", "kernel_seconds", "overhead_seconds", "flops", "bytes")
    terms = []
    for name, parts in by_name.items():
        summed = {f: sum(getattr(t, f) for t in parts) for f in fields}
        limit = "compute" if summed["flops_seconds"] >= summed["bytes_seconds"] else "memory"
        terms.append(Term(name=name, bound=limit, **summed))
    return Prediction(
        **sums, intensity=sums["flops"] / sums["bytes"], ridge=device.ridge(dtype),
        bound=bound(sums["flops"], sums["bytes"], device, dtype), tokens=tokens, terms=tuple(terms),
    )  # fmt: skip


def predict_shape(shape: dict[str, Any], device: Device) -> Prediction:
    """A prediction from plain data, as records keep it.

    {"model": {ModelConfig fields}, "dtype": ..., "rows": [[new, context], ...], "kv_cache": true} for a step,
    "prompts" and "new_tokens" in place of "rows" for a generation, and with "budget" and "seqs" (and "shared") for one
    in a running batch; but for a plain generation also "weights_as" for quantised weights; with "rows" also "captured"
    for a CUDA graph.
    {"kernel": {fields of cost.Op}, "dtype": ...} for one launch of one kernel.
    """
    if "kernel" in shape:
        return predict(ops_of(shape), device, shape["dtype"])
    config, dtype, kv_cache = _read(shape)
    if "rows" in shape:
        how = {"kv_cache": kv_cache, "weights_as": shape.get("weights_as"), "captured": shape.get("captured", False)}
        return predict_step(config, shape["rows"], device, dtype, **how)
    if "budget" in shape:
        batch = {name: shape[name] for name in ("budget", "seqs", "shared", "weights_as") if name in shape}
        return predict_serving(config, shape["prompts"], shape["new_tokens"], device, dtype, **batch)
    return predict_generation(config, shape["prompts"], shape["new_tokens"], device, dtype, kv_cache=kv_cache)


def ops_of(shape: dict[str, Any]) -> list[Op]:
    """The operators of a step given as plain data with "rows", or of one kernel."""
    if "kernel" in shape:
        try:
            return [Op(**shape["kernel"])]
        except TypeError as error:
            raise MinillmError(f"this kernel cannot be predicted ({error}); it needs the fields of cost.Op") from None
    config, dtype, kv_cache = _read(shape)
    return step(config, shape["rows"], dtype, kv_cache=kv_cache, weights_as=shape.get("weights_as"))


def _read(shape: dict[str, Any]) -> tuple[ModelConfig, str, bool]:
    try:
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in shape["model"].items()}
        config, dtype, kv_cache = ModelConfig(**values), shape["dtype"], shape["kv_cache"]
        if "rows" not in shape and not {"prompts", "new_tokens"} <= shape.keys():
            raise KeyError("rows")
        return config, dtype, kv_cache
    except (KeyError, TypeError, AttributeError) as error:
        needs = "model, dtype, kv_cache, and rows or prompts with new_tokens"
        raise MinillmError(f"this shape cannot be predicted ({error}); it needs {needs}") from None


def weights_floor(parameters: float, dtype: str, bandwidth: float) -> float:
    """Seconds to read all weights once: the least that one decode step can take, whatever the FLOP/s.

    70e9 parameters in bf16 at 2e12 bytes/s: 0.070 s, 14.3 tokens/s.
    """
    if parameters <= 0 or bandwidth <= 0:
        raise MinillmError(f"parameters and bandwidth must be above 0, got {parameters!r} and {bandwidth!r}")
    return parameters * element_size(dtype) / bandwidth
