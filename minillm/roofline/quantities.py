"""Predictions that are no times: bytes of quantised weights and caches, their error, what it may do. Lesson 08.

Each is a function of plain data, so that a record's prediction can be worked out again. Lower bound, expectation and
upper bound, as for times; a result below its lower bound is an error in the measurement.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

from minillm.config import ModelConfig
from minillm.errors import MinillmError
from minillm.roofline.cost import element_size

# The most that perplexity may grow on the text that ships with the project before a speed may be shown: a choice, made
# before measuring. int8 must be as good as free. For int4, rounded to the nearest in groups of 128, Lin et al. (2023,
# table 4) report a growth of about 5 % for a 7 B model, and small models lose more; twice that is the end of useful.
# A KV cache in eight bits, int8 or fp8, has the gate of eight bits.
GATES = {8: 1.01, 4: 1.10}
# The most that a server may add to its engine, a choice made before measuring: time of a burst over the engine's alone,
# seconds to a first token, bytes of 500 idle connections. cost_error: how far a m + b n may be off, in the median, on
# requests that its fit has not seen.
SERVING_GOALS = {"ratio": 1.10, "ttft_s": 0.020, "connection_bytes": 100e6, "cost_error": 0.15}
# How far what a client measured may be from what the server says of the same requests, as a share: a choice made before
# measuring. e2e is a request's trace beside its stream.
AGREE_GOALS = {"ttft": 0.05, "tpot": 0.05, "itl": 0.05, "e2e": 0.02}


def predict_quantity(shape: dict[str, Any]) -> dict[str, float]:
    """{"lower", "expected", "upper"} of {"quantity": name, "scheme" or "kv": ...}. Raises MinillmError for others."""
    from minillm.roofline import quantities_parallel

    known = {
        "weight_bytes": _weight_bytes, "weight_error": _weight_error, "kv_bytes": _kv_bytes, "kv_error": _kv_error,
        "perplexity_ratio": _perplexity_ratio, "serving_ratio": _serving_ratio, "serving_ttft": _serving_ttft,
        "connection_bytes": _connection_bytes, "agreement": _agreement,
        "request_cost": _request_cost, **quantities_parallel.KNOWN,
    }  # fmt: skip
    try:
        return known[shape["quantity"]](shape)
    except (KeyError, TypeError, AttributeError) as error:
        raise MinillmError(f"this quantity cannot be predicted ({error}); known are {', '.join(known)}") from None


def _config(shape: dict[str, Any]) -> ModelConfig:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in shape["model"].items()}
    return ModelConfig(**values)


def _largest(n: float) -> float:
    """The expected largest of n standard normal values, by Blom's formula (1958)."""
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


def _matrices(shape: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(outputs, inputs, bias elements) of every quantised matrix of the model."""
    c = _config(shape)
    qkv = c.q_size + 2 * c.kv_size
    layer = [
        (qkv, c.hidden_size, qkv if c.attention_bias else 0),
        (c.hidden_size, c.q_size, c.hidden_size if c.attention_out_bias else 0),
        (2 * c.intermediate_size, c.hidden_size, 2 * c.intermediate_size if c.mlp_bias else 0),
        (c.hidden_size, c.intermediate_size, c.hidden_size if c.mlp_bias else 0),
    ]
    return layer * c.num_layers + ([(c.vocab_size, c.hidden_size, 0)] if shape.get("head") else [])


def _weight_bytes(shape: dict[str, Any]) -> dict[str, float]:
    """Bytes of all quantised matrices with scales, zeros and biases: exact."""
    from minillm.quant import scheme_of

    scheme, size = scheme_of(shape["scheme"]), element_size(shape["dtype"])
    total = sum(scheme.weight_bytes(n_out, n_in) + bias * size for n_out, n_in, bias in _matrices(shape))
    return {"lower": total, "expected": total, "upper": total}


def _weight_error(shape: dict[str, Any]) -> dict[str, float]:
    """Root of the mean square error of a weight, over the root of its mean square, for normal weights.

    Rounding is off by step / sqrt(12). The step of int8 is the largest of n magnitudes / 127, that of int4 the range of
    a group / 15. At worst all of a row's energy is in one weight (int8), of a group's in two (int4), and every other
    weight is off by half a step.
    """
    from minillm.quant import scheme_of

    scheme = scheme_of(shape["scheme"])
    expected = worst = count = 0.0
    for n_out, n_in, _ in _matrices(shape):
        if scheme.group:
            step, most = 2 * _largest(scheme.group) / 15, math.sqrt(2 * scheme.group) / 15
        else:
            step, most = _largest(2 * n_in) / 127, math.sqrt(n_in) / 127
        expected += n_out * n_in * step**2 / 12
        worst += n_out * n_in * most**2 / 4
        count += n_out * n_in
    return {"lower": 0.0, "expected": math.sqrt(expected / count), "upper": math.sqrt(worst / count)}


def _kv_bytes(shape: dict[str, Any]) -> dict[str, float]:
    """Bytes that a token leaves in a paged cache, scales included: exact. kv: "auto", "int8" or "fp8"."""
    from minillm.cache.pool import block_bytes

    total = float(block_bytes(_config(shape), 1, element_size(shape["dtype"]), shape["kv"]))
    return {"lower": total, "expected": total, "upper": total}


def _kv_error(shape: dict[str, Any]) -> dict[str, float]:
    """Root of the mean square error of an entry over the root of its mean square, for normal keys and values.

    A head's largest of d magnitudes becomes the largest number of the format. int8: a step is that / 127, and at worst
    all energy is in one entry, as for weights. fp8 (e4m3): between 2^e and 2^(e+1) a step is 2^e / 8, so small values
    have small steps, and at worst every value is off by 1/16 of itself.
    """
    c = _config(shape)
    largest = _largest(2 * c.head_dim)
    if shape["kv"] == "int8":
        return {"lower": 0.0, "expected": largest / 127 / math.sqrt(12), "upper": math.sqrt(c.head_dim) / 127 / 2}
    if shape["kv"] != "fp8":
        raise KeyError(f"a cache of {shape['kv']!r}")
    within = lambda e: 2 * NormalDist(sigma=448 / largest).cdf(2.0**e) - 1  # share of magnitudes below 2^e
    squares = sum((within(e + 1) - within(e)) * (2.0**e / 8) ** 2 / 12 for e in range(-6, 9))
    return {"lower": 0.0, "expected": math.sqrt(squares) / (448 / largest), "upper": 1 / 16}


def _perplexity_ratio(shape: dict[str, Any]) -> dict[str, float]:
    """Quantised over plain. No theory gives it: the upper bound is the gate, and the hope is no loss."""
    from minillm.quant import scheme_of

    bits = 8 if "kv" in shape else scheme_of(shape["scheme"]).bits
    return {"lower": 0.0, "expected": 1.0, "upper": GATES[bits]}


def _serving_ratio(shape: dict[str, Any]) -> dict[str, float]:
    """Time of a burst through the server over that of the engine alone: every token costs a chunk.

    Expected as if nothing overlapped: a step of matrix products waits for its slowest core. With perfect overlap it
    would be 1; noise can bring it below that, and the bound is only 0.
    """
    expected = 1 + shape["chunks"] * shape["chunk_s"] / shape["burst_s"]
    return {"lower": 0.0, "expected": expected, "upper": SERVING_GOALS["ratio"]}


def _serving_ttft(shape: dict[str, Any]) -> dict[str, float]:
    """Seconds that a server adds to a newcomer's first token: its way in and out, behind half of a step's chunks.

    The difference of two medians. A newcomer waits for the step under way, on either side between nothing and a step:
    that is how far noise can bring it down.
    """
    expected = shape["request_s"] + shape["streams"] / 2 * shape["chunk_s"]
    return {"lower": -shape["step_s"], "expected": expected, "upper": SERVING_GOALS["ttft_s"]}


def _connection_bytes(shape: dict[str, Any]) -> dict[str, float]:
    """Memory of idle connections: so many times what one costs a bare server, measured with fewer."""
    expected = float(shape["connections"] * shape["each"])
    return {"lower": 0.0, "expected": expected, "upper": SERVING_GOALS["connection_bytes"]}


def _request_cost(shape: dict[str, Any]) -> dict[str, float]:
    """Seconds of a request alone, a m + b n. No formula gives a floor: the least is what a and b leave out."""
    expected = shape["a"] * shape["m"] + shape["b"] * shape["n"]
    return {"lower": 0.0, "expected": expected, "upper": (1 + SERVING_GOALS["cost_error"]) * expected}


def _agreement(shape: dict[str, Any]) -> dict[str, float]:
    """A client's seconds over the server's, for the same requests: 1, and what the way there and back adds.

    Where the client's interval holds the server's (TTFT, by the same clock) nothing can be below 1; the thousandth is
    for the rounding of stamps. A gap between two tokens can be shorter for the client than it was for the engine.
    """
    goal = AGREE_GOALS[shape["of"]]
    expected = 1 + shape["added_s"] / shape["seconds"]
    return {"lower": 0.999 if shape["of"] == "ttft" else 0.0, "expected": expected, "upper": 1 + goal}
