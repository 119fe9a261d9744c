"""How much of each ceiling operators reach on this machine, fitted and judged on other shapes; for `bench ladder`.

The roofline names four costs of a step: streaming products, attention, elementwise work, calls. A fit
scales each by one non-negative number. It is judged only on shapes that it never saw.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minillm.errors import MinillmError
from minillm.roofline.cost import Op
from minillm.roofline.device import Device
from minillm.roofline.predict import term

Sample = tuple[Sequence[Op], float]  # the operators of a step, the seconds it took
FEATURES = ("linear", "attention", "elementwise", "calls")


def features(ops: Sequence[Op], device: Device, dtype: str) -> np.ndarray:
    """Seconds that the roofline gives to products, attention, elementwise work and look-ups, and calls."""
    found = dict.fromkeys(FEATURES, 0.0)
    for op in ops:
        t = term(op, device, dtype)
        found[{"gather": "elementwise"}.get(op.kind, op.kind)] += t.seconds - t.overhead_seconds
        found["calls"] += op.calls * (device.call_overhead or 1e-6)
    return np.array([found[name] for name in FEATURES])


@dataclass(frozen=True)
class Fit:
    """One factor a feature: 1 is the roofline itself, 2 means that half of the ceiling is reached."""

    factors: dict[str, float]

    def seconds(self, ops: Sequence[Op], device: Device, dtype: str) -> float:
        return float(features(ops, device, dtype) @ np.array([self.factors[n] for n in FEATURES]))

    def errors(self, samples: Sequence[Sample], device: Device, dtype: str) -> list[float]:
        """|predicted - measured| / measured for each sample."""
        return [abs(self.seconds(ops, device, dtype) - s) / s for ops, s in samples]

    def median_error(self, samples: Sequence[Sample], device: Device, dtype: str) -> float:
        return statistics.median(self.errors(samples, device, dtype))


def fit(samples: Sequence[Sample], device: Device, dtype: str) -> Fit:
    """Least squares of the *relative* error with factors of at least 0.

    The best such solution is a plain one on the features it uses, so all sixteen choices of features are tried.
    """
    if len(samples) < len(FEATURES):
        raise MinillmError(f"a fit of {len(FEATURES)} factors needs as many measured shapes, got {len(samples)}")
    if min(s for _, s in samples) <= 0:
        raise MinillmError("measured seconds must be above 0")
    a = np.stack([features(ops, device, dtype) / s for ops, s in samples])  # predicted share: 1 is a perfect row
    best, least = np.zeros(len(FEATURES)), float(len(a))
    for used in itertools.product((False, True), repeat=len(FEATURES)):
        x = np.zeros(len(FEATURES))
        x[list(used)] = np.linalg.lstsq(a[:, list(used)], np.ones(len(a)), rcond=None)[0]
        error = float(((a @ x - 1) ** 2).sum())
        if x.min() >= 0 and error < least:
            best, least = x, error
    return Fit(dict(zip(FEATURES, best.tolist(), strict=True)))


@dataclass(frozen=True)
class KernelFit:
    """Seconds of one kernel's launch = factor * roofline + overhead. A factor of 1.1 means 91 % of the ceiling."""

    factor: float
    overhead: float

    def seconds(self, op: Op, device: Device, dtype: str) -> float:
        return self.factor * _roofline(op, device, dtype) + self.overhead


def _roofline(op: Op, device: Device, dtype: str) -> float:
    t = term(op, device, dtype)
    return t.seconds - t.overhead_seconds


def fit_kernel(samples: Sequence[tuple[Op, float]], device: Device, dtype: str) -> KernelFit:
    """Least squares of the relative error; both numbers at least 0. One sample gives an overhead of 0."""
    if not samples or min(s for _, s in samples) <= 0:
        raise MinillmError("a kernel's fit needs at least one measured shape, its seconds above 0")
    a = np.array([[_roofline(op, device, dtype) / s, 1.0 / s] for op, s in samples])
    one = np.ones(len(a))
    choices = [np.array([float(a[:, 0] @ one / (a[:, 0] @ a[:, 0])), 0.0])]
    if len(samples) > 1:
        choices.append(np.linalg.lstsq(a, one, rcond=None)[0])
        choices.append(np.array([0.0, float(a[:, 1] @ one / (a[:, 1] @ a[:, 1]))]))
    x = min((c for c in choices if c.min() >= 0), key=lambda c: float(((a @ c - one) ** 2).sum()))
    return KernelFit(float(x[0]), float(x[1]))
