"""The line begins after the prefill, and that is taken for what overlap leaves."""

TASK = "15.1"
POINTS = 6
HINT = "that is without overlap"


def predict() -> dict[str, float]:
    kv = 2 * 32 * 8 * 128 * 2 * 8000
    prefill_s = 2 * 8e9 * 8000 / 400e12
    fast, slow = 400e9 / 8, 25e9 / 8
    return {
        "kv_mb": kv / 1e6,
        "fast_ms": 1e3 * kv / fast,
        "slow_ms": 1e3 * kv / slow,
        "break_even_gb_s": kv / prefill_s / 1e9,
        "exposed_ms": 1e3 * kv / slow,
        "prefills_per_decode": 64 / (250 * 0.020) * prefill_s,
    }
