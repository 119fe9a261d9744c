"""Numbers with units as people read them: 2.04 TB/s, 70.0 ms. Used by every figure and lesson."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PREFIXES = tuple(
    (10.0 ** (15 - 3 * i), prefix) for i, prefix in enumerate(("P", "T", "G", "M", "k", "", "m", "µ", "n"))
)


def si(value: float, unit: str, digits: int = 3) -> str:
    """`si(2.04e12, "B/s")` -> "2.04 TB/s". Three digits by default, which is what a median deserves."""
    if value == 0:
        return f"0 {unit}"
    size, prefix = next((p for p in PREFIXES if abs(value) >= p[0] * 0.9995), PREFIXES[-1])
    scaled = value / size
    whole = len(str(int(abs(scaled)))) if abs(scaled) >= 1 else 1
    return f"{scaled:.{max(0, digits - whole)}f} {prefix}{unit}"


def common_scale(values: Sequence[float]) -> tuple[float, str]:
    """One prefix for all: that of the geometric middle."""
    middle = float(np.exp(np.mean(np.log(np.maximum(values, 1e-30)))))
    return next((p for p in PREFIXES if middle >= p[0]), PREFIXES[-1])
