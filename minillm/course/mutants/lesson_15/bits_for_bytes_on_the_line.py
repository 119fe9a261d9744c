"""Gb/s taken for GB/s."""

TASK = "15.1"
POINTS = 4
HINT = "eight to a byte"


def predict() -> dict[str, float]:
    kv = 2 * 32 * 8 * 128 * 2 * 8000
    prefill_s = 2 * 8e9 * 8000 / 400e12
    fast, slow = 400e9, 25e9
    last_byte_s = prefill_s / 32 + kv / slow  # the line begins after the first layer, and is busy from then on
    return {
        "kv_mb": kv / 1e6,
        "fast_ms": 1e3 * kv / fast,
        "slow_ms": 1e3 * kv / slow,
        "break_even_gb_s": kv / prefill_s / 1e9,
        "exposed_ms": 1e3 * (last_byte_s - prefill_s),
        "prefills_per_decode": 64 / (250 * 0.020) * prefill_s,
    }
