"""Predictions that are no times: bytes of quantised weights, their error, what it may do to perplexity. Lesson 08.

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
GATES = {8: 1.01, 4: 1.10}


def predict_quantity(shape: dict[str, Any]) -> dict[str, float]:
    """{"lower", "expected", "upper"} of {"quantity": a name, "scheme": ..., ...}. Raises MinillmError for others."""
    known = {"weight_bytes": _weight_bytes, "weight_error": _weight_error, "perplexity_ratio": _perplexity_ratio}
    try:
        return known[shape["quantity"]](shape)
    except (KeyError, TypeError, AttributeError) as error:
        raise MinillmError(f"this quantity cannot be predicted ({error}); known are {', '.join(known)}") from None


def _matrices(shape: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(outputs, inputs, bias elements) of every quantised matrix of the model."""
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in shape["model"].items()}
    c = ModelConfig(**values)
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
    a group / 15; the expected largest of n normal values is taken by Blom's formula (1958). At worst all of a row's
    energy is in one weight (int8), of a group's in two (int4), and every other weight is off by half a step.
    """
    from minillm.quant import scheme_of

    scheme = scheme_of(shape["scheme"])
    largest = lambda n: NormalDist().inv_cdf((n - 0.375) / (n + 0.25))
    expected = worst = count = 0.0
    for n_out, n_in, _ in _matrices(shape):
        if scheme.group:
            step, most = 2 * largest(scheme.group) / 15, math.sqrt(2 * scheme.group) / 15
        else:
            step, most = largest(2 * n_in) / 127, math.sqrt(n_in) / 127
        expected += n_out * n_in * step**2 / 12
        worst += n_out * n_in * most**2 / 4
        count += n_out * n_in
    return {"lower": 0.0, "expected": math.sqrt(expected / count), "upper": math.sqrt(worst / count)}


def _perplexity_ratio(shape: dict[str, Any]) -> dict[str, float]:
    """Quantised over plain. No theory gives it: the upper bound is the gate, and the hope is no loss."""
    from minillm.quant import scheme_of

    return {"lower": 0.0, "expected": 1.0, "upper": GATES[scheme_of(shape["scheme"]).bits]}
