"""A link in bits."""

TASK = "12.1"
POINTS = 5.5
HINT = "GB/s are bytes, not bits"


def predict() -> dict[str, float]:
    return {
        "peak_blocks": 18,
        "swap_mb": 260.046848,
        "swap_ms": 10.40187,
        "recompute_ms": 40.0,
        "break_even_gb_s": 52.009368,
    }
