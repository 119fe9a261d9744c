"""One all-reduce a layer is counted."""

from __future__ import annotations

TASK = "14.1"
POINTS = 5.5
HINT = "two a layer"


def predict() -> dict[str, float]:
    weights, calls, each = 2 * 70e9, 2 * 80, 2 * 8192
    one, half = weights / 2e12, weights / 2 / 2e12
    moved = 2 * (2 - 1) / 2 * each / 400e9
    return {
        "rank_gb": weights / 2 / 1e9,
        "reduced_mb": calls / 2 * each / 1e6,
        "token_ms": 1e3 * (half + calls * (10e-6 + moved)),
        "break_even_us": 1e6 * ((one - half) / calls - moved),
        "kv_kb": 2 * 80 * 1 * 128 * 2 / 1e3,
        "bubble": (4 - 1) / (8 + 4 - 1),
    }
