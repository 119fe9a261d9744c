"""A whole block a sequence is wasted, not the mean."""

TASK = "06.1"
POINTS = 3
HINT = "the most, not the mean"


def predict() -> dict[str, float]:
    wasted = 200 * (32 - 1) * 128 / 1024
    largest = max(b for b in (16, 32, 64, 128, 256) if 600 / (600 + (b - 1)) >= 0.95)
    loaded = 2 * 8000 * 8 * 128 * 2
    return {"wasted_mib": wasted, "largest_block": largest, "kv_mb": loaded / 1e6, "parts": -(-132 // 8)}
