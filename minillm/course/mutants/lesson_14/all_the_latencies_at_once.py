"""What is saved is not shared out over the all-reduces."""

from __future__ import annotations

TASK = "14.1"
POINTS = 5.5
HINT = "one of 160 is asked for"


def predict() -> dict[str, float]:
    weights, calls, each = 2 * 70e9, 2 * 80, 2 * 8192
    one, half = weights / 2e12, weights / 2 / 2e12
    moved = 2 * (2 - 1) / 2 * each / 400e9
    return {
        "rank_gb": weights / 2 / 1e9,
        "reduced_mb": calls * each / 1e6,
        "token_ms": 1e3 * (half + calls * (10e-6 + moved)),
        "break_even_us": 1e6 * (one - half),
        "kv_kb": 2 * 80 * 1 * 128 * 2 / 1e3,
        "bubble": (4 - 1) / (8 + 4 - 1),
    }
