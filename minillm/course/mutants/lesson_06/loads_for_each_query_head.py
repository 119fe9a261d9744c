"""The KV of a group counted once for each query head."""

TASK = "06.1"
POINTS = 3.5
HINT = "not once for each query head"


def predict() -> dict[str, float]:
    wasted = 200 * (32 - 1) / 2 * 128 / 1024
    largest = max(b for b in (16, 32, 64, 128, 256) if 600 / (600 + (b - 1) / 2) >= 0.95)
    loaded = 2 * 8000 * 32 * 128 * 2
    return {"wasted_mib": wasted, "largest_block": largest, "kv_mb": loaded / 1e6, "parts": -(-132 // 8)}
