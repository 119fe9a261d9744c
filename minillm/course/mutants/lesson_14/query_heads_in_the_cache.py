"""Each of 16 cards caches 64 / 16 heads."""

from __future__ import annotations

TASK = "14.1"
POINTS = 5.5
HINT = "only KV heads are cached"


def predict() -> dict[str, float]:
    said = 160 * (10e-6 + 16_384 / 400e9)
    return {
        "rank_gb": 70.0,
        "reduced_mb": 160 * 16_384 / 1e6,
        "token_ms": 35 + 1e3 * said,
        "break_even_us": 35e3 / 160 - 1e6 * 16_384 / 400e9,
        "kv_kb": 2 * 80 * (64 / 16) * 128 * 2 / 1e3,
        "bubble": 3 / 11,
    }
